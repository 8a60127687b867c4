"""Admission of stages: each stage of one step is rebuilt from our own types.

A step has seven stages: drafted, lowered, attended, scored, accepted, emitted, committed. Each array must have the
shape that the case and the step's tree give it. A stage that is None stays unrevealed.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from specverify.backends.admission.arrays import Axis, admit_array, expected_array, is_array_like, read_array
from specverify.backends.admission.misshapen import Misshapen, refusal
from specverify.backends.admission.numbers import TOKEN, admit_floats, admit_int, admit_ints, admit_word
from specverify.backends.admission.sizes import Cache, Sizes
from specverify.reference.draft.hidden import HeadInput, HiddenStates
from specverify.reference.family.recurrent import RecurrentState
from specverify.reference.malformed import Malformed
from specverify.reference.trace import (
    Accepted,
    Array,
    Attended,
    Committed,
    Drafted,
    Emitted,
    Kv,
    Lowered,
    Scored,
    Stage,
    Step,
)
from specverify.reference.tree import Tree

Part = TypeVar("Part")

FINISHES = ("eos", "stop", "grammar", "length")
"""The reasons for which a run ends; None stands for a run that ended with its steps."""

NODE = ("a node", "nodes")
"""The words of a refusal for a node."""
COIN = ("a place on the step's tape", "places on the step's tape")
"""The words of a refusal for a coin of the tape."""

PER_ROW = {
    name: (f"lowered.{name}", {"valid": "bool"}.get(name, "int"), name == "ancestor")
    for name in ("parent", "token", "depth", "position", "slot", "next_token", "next_sibling", "valid", "ancestor")
}
"""The fields of Lowered with a row for each: the name in a refusal, the kind, and whether there is a second axis."""

KV_FIELDS = {
    name: tuple(f"committed.{name}{part}" for part in ("", ".keys", ".values", ".first"))
    for name in ("before", "verified", "after", "draft")
}
"""The caches of Committed, with the names of the cache, its keys, its values and its first columns in a refusal."""


def require_type(field: str, value: object, kind: type[Part]) -> Part:
    """`value` if it is of our type `kind` or of a subclass; Misshapen otherwise."""
    if type(value) is kind or isinstance(value, kind):
        return value
    raise refusal(field, value, f"{kind.__module__}.{kind.__qualname__}")


def finish_word(field: str, value: object) -> str | None:
    """The reason for which a run ended, one of FINISHES, or None; Misshapen for other words."""
    reason = None if value is None else admit_word(field, value)
    if reason is None or reason in FINISHES:
        return reason
    raise refusal(field, reason, f"{', '.join(FINISHES)} or None")


def admit_step(step: Step, sizes: Sizes) -> Step:
    """A step with every stage that the backend reveals.

    The drafted tree tells the number of nodes, or else the first revealed stage does.

    Raises:
        Misshapen: with the stage, and with the path of the field in the step.
    """
    context = admit_ints("context", step.context, 0, sizes.last_token, TOKEN)
    drafted = _admit_stage(Stage.DRAFTED, step.drafted, lambda stage: _admit_drafted(stage, sizes))
    # The first revealed stage fixes the number of nodes; every later stage must agree with it.
    nodes = None if drafted is None else len(drafted.tree)
    lowered = _admit_stage(Stage.LOWERED, step.lowered, lambda stage: _admit_lowered(stage, sizes, nodes))
    if nodes is None and lowered is not None and lowered.retrieve_index is not None:
        nodes = len(lowered.retrieve_index)
    attended = _admit_stage(Stage.ATTENDED, step.attended, lambda stage: _admit_attended(stage, sizes, nodes))
    nodes = attended.output.shape[2] if nodes is None and attended is not None else nodes
    scored = _admit_stage(Stage.SCORED, step.scored, lambda stage: _admit_scored(stage, sizes, nodes, len(context)))
    nodes = len(scored.logits) if nodes is None and scored is not None else nodes
    accepted = _admit_stage(Stage.ACCEPTED, step.accepted, lambda stage: _admit_accepted(stage, sizes, nodes))
    emitted = _admit_stage(Stage.EMITTED, step.emitted, lambda stage: _admit_emitted(stage, sizes))
    committed = _admit_stage(Stage.COMMITTED, step.committed, lambda stage: _admit_committed(stage, sizes))
    return Step(context, drafted, lowered, attended, scored, accepted, emitted, committed)


def _admit_stage(stage: Stage, value: Any, admit: Callable[[Any], Part]) -> Part | None:
    """A stage, or None where the backend does not reveal the stage; a refusal inside the stage names it."""
    if value is None:
        return None
    try:
        return admit(value)
    except Misshapen as wrong:
        raise Misshapen(stage, wrong.why) from None


def _admit_drafted(value: object, sizes: Sizes) -> Drafted:
    drafted = require_type("drafted", value, Drafted)
    tree = _admit_tree("drafted.tree", drafted.tree, sizes)
    nodes: Axis = ("nodes", len(tree))
    logits = _admit_optional("drafted.logits", drafted.logits, (nodes, ("draft vocabulary", sizes.draft_vocabulary)))
    proposal = _admit_optional("drafted.proposal", drafted.proposal, (nodes, ("vocabulary", sizes.vocabulary)))
    ids = None if drafted.draft_ids is None else admit_ints("drafted.draft_ids", drafted.draft_ids)
    if ids is not None and len(ids) != len(tree):
        raise refusal(
            "drafted.draft_ids", drafted.draft_ids, f"one id for each of {len(tree)} nodes", f"{len(ids)} ids"
        )
    confidence = _admit_optional("drafted.confidence", drafted.confidence, (nodes,))
    head_input = None if drafted.given is None else _admit_head_input(drafted.given, sizes)
    return Drafted(tree, logits, ids, proposal, head_input, confidence)


def _admit_head_input(value: object, sizes: Sizes) -> HeadInput:
    """The rows that a draft's head has run; an invariant judges which rows they are."""
    head_input = require_type("drafted.given", value, HeadInput)
    tokens = admit_ints("drafted.given.tokens", head_input.tokens, 0, sizes.last_token, TOKEN)
    rows: Axis = ("rows", len(tokens))
    hidden = admit_array("drafted.given.hidden", head_input.hidden, "float", (rows, ("width", sizes.hidden)))
    reads = require_type("drafted.given.reads", head_input.reads, HiddenStates)
    first = admit_int("drafted.given.first", head_input.first, 0)
    adopted = admit_int("drafted.given.adopted", head_input.adopted, 0)
    own_rows = admit_ints("drafted.given.own_rows", head_input.own_rows, 1)
    return HeadInput(reads, first, tokens, hidden, adopted, own_rows)


def _admit_tree(field: str, value: object, sizes: Sizes) -> Tree:
    """A tree with one root whose tokens are in the vocabulary."""
    tree = require_type(field, value, Tree)
    parent = admit_ints(f"{field}.parent", tree.parent)
    token = admit_ints(f"{field}.token", tree.token, 0, sizes.last_token, TOKEN)
    try:
        return Tree(parent, token)
    except Malformed as why:
        raise Misshapen(None, f"{field}.{why}, expected one tree below node 0") from None


def _admit_lowered(value: object, sizes: Sizes, nodes: int | None) -> Lowered:
    """Index arrays over R rows, at least one row for each node; masks may have any two lengths.

    An array that is None stays unrevealed; R is the length of the first array that is there. Padding rows are the
    reason why there may be more rows than nodes.
    """
    lowered = require_type("lowered", value, Lowered)
    masks = None if lowered.visible is None else _admit_masks("lowered.visible", lowered.visible, sizes.target.layers)
    rows: int | None = None
    index: dict[str, Array] = {}
    for name, (field, kind, has_columns) in PER_ROW.items():
        value_of_field = getattr(lowered, name)
        if value_of_field is None:
            continue
        row_axes: tuple[Axis, ...] = (("rows", rows), ("height + 1", None)) if has_columns else (("rows", rows),)
        index[name] = admit_array(field, value_of_field, kind, row_axes)
        if rows is None:
            rows = len(index[name])
            _check_rows(field, value_of_field, rows, nodes, kind)
    if rows is None and masks:
        _check_rows("lowered.visible", lowered.visible, len(masks[0]), nodes, "bool")
    nodes_axis: tuple[Axis, ...] = (("nodes", nodes),)
    order = lowered.retrieve_index
    axes = None
    if lowered.axes is not None:
        axes = admit_array("lowered.axes", lowered.axes, "int", (("axes", 3), ("columns", None)))
    if not index and masks is None and order is None and axes is None:
        raise refusal("lowered", value, "at least one of its arrays, or None for the stage", "every array None")
    return Lowered(
        **index,
        visible=masks,
        retrieve_index=None if order is None else admit_array("lowered.retrieve_index", order, "int", nodes_axis),
        axes=axes,
    )


def _check_rows(field: str, value: object, rows: int, nodes: int | None, kind: str) -> None:
    """Raise Misshapen if there are fewer rows than nodes, or none."""
    if rows < (nodes or 1):
        raise refusal(field, value, f"{kind} [rows], a row for each of {nodes or 1} nodes at least")


def _admit_masks(field: str, value: object, layers: int | None) -> tuple[Array, ...]:
    """A mask for each layer, of any two lengths; layers that share one array keep sharing one array."""
    masks = _mask_list(value)
    if masks is None or (layers is not None and len(masks) != layers):
        expected = "a tuple of masks, one for each layer" if layers is None else f"a mask for each of {layers} layers"
        raise refusal(field, value, expected, f"{len(masks)} masks" if masks is not None else "")
    axes: tuple[Axis, ...] = (("rows", None), ("columns", None))
    # By identity: a mask that several layers share is converted once and stays shared.
    converted_masks: dict[int, Array] = {}
    for layer, mask in enumerate(masks):
        if id(mask) not in converted_masks:
            converted_masks[id(mask)] = admit_array(f"{field}[{layer}]", mask, "bool", axes)
    return tuple(converted_masks[id(mask)] for mask in masks)


def _mask_list(value: Any) -> list[Any] | None:
    """The masks as a list: from a tuple or list, or from one array [layers, rows, columns]; otherwise None."""
    if isinstance(value, (tuple, list)):
        return list(value)
    array_of_masks = read_array(value) if is_array_like(value) else None
    return list(array_of_masks) if isinstance(array_of_masks, np.ndarray) and array_of_masks.ndim == 3 else None


def _admit_attended(value: object, sizes: Sizes, nodes: int | None) -> Attended:
    attended = require_type("attended", value, Attended)
    target = sizes.target
    axes = (("layers", target.layers), ("heads", sizes.heads), ("nodes", nodes), ("head_dim", sizes.attended_width))
    return Attended(admit_array("attended.output", attended.output, "float", axes))


def _admit_scored(value: object, sizes: Sizes, nodes: int | None, context: int) -> Scored:
    scored = require_type("scored", value, Scored)
    vocabulary: Axis = ("vocabulary", sizes.vocabulary)
    logits = admit_array("scored.logits", scored.logits, "float", (("nodes", nodes), vocabulary))
    if not len(logits):
        raise refusal("scored.logits", scored.logits, "a row for the root at least")
    rows: Axis = ("nodes", len(logits))
    return Scored(
        logits,
        _admit_optional("scored.law", scored.law, (rows, vocabulary)),
        _admit_optional("scored.hidden", scored.hidden, (rows, ("width", sizes.hidden))),
        None if scored.legal is None else admit_array("scored.legal", scored.legal, "bool", (rows, vocabulary)),
        None if scored.refused is None else admit_array("scored.refused", scored.refused, "bool", (rows,)),
        _admit_choices("routed", scored.routed, sizes, context + len(logits), "experts"),
        _admit_choices("indexed", scored.indexed, sizes, context + len(logits), "columns"),
        _admit_choices("stored", scored.stored, sizes, context + len(logits), "codes"),
    )


def _admit_choices(name: str, value: Array | None, sizes: Sizes, rows: int, kind: str) -> Array | None:
    """Experts or columns of each row of context and tree, by layer; an invariant judges which they are."""
    axes: tuple[Axis, ...] = (("layers", sizes.target.layers), ("context + nodes", rows), (kind, None))
    return None if value is None else admit_array(f"scored.{name}", value, "int", axes)


def _admit_optional(field: str, value: object, axes: tuple[Axis, ...]) -> Array | None:
    """An array of floats with these axes, or None."""
    return None if value is None else admit_array(field, value, "float", axes)


def _admit_accepted(value: object, sizes: Sizes, nodes: int | None) -> Accepted:
    """Nodes of the tree, at least the root; an invariant judges whether they form a path."""
    accepted = require_type("accepted", value, Accepted)
    path = admit_ints("accepted.path", accepted.path, 0, None if nodes is None else nodes - 1, NODE)
    if not path:
        raise refusal("accepted.path", accepted.path, "nodes from the root (0) downwards, the root included")
    # Without a tape there is no largest place on it.
    last = None if sizes.coins is None else sizes.coins - 1
    coins = None if accepted.coins is None else admit_ints("accepted.coins", accepted.coins, 0, last, COIN)
    return Accepted(path, admit_int("accepted.bonus", accepted.bonus, 0, sizes.last_token, TOKEN), coins)


def _admit_emitted(value: object, sizes: Sizes) -> Emitted:
    emitted = require_type("emitted", value, Emitted)
    return Emitted(
        admit_ints("emitted.tokens", emitted.tokens, 0, sizes.last_token, TOKEN),
        finish_word("emitted.finish", emitted.finish),
        None if emitted.logprobs is None else admit_floats("emitted.logprobs", emitted.logprobs),
    )


def _admit_committed(value: object, sizes: Sizes) -> Committed:
    committed = require_type("committed", value, Committed)
    target = sizes.target
    before, verified, after = (
        _admit_kv(name, getattr(committed, name), target) for name in ("before", "verified", "after")
    )
    fallback = None if committed.fallback is None else admit_word("committed.fallback", committed.fallback)
    way = None if committed.way is None else admit_word("committed.way", committed.way)
    length = admit_int("committed.length", committed.length)
    matched = None if committed.matched is None else admit_int("committed.matched", committed.matched, 0)
    names = ("recurrent_before", "recurrent", "recurrent_root")
    states = (_admit_recurrent(name, getattr(committed, name)) for name in names)
    draft = _admit_kv("draft", committed.draft, sizes.draft)
    return Committed(length, before, verified, after, draft, fallback, way, matched, *states)


def _admit_recurrent(name: str, value: object) -> RecurrentState | None:
    """Windows and memories of floats, as many of one kind as of the other; an invariant judges their shapes."""
    if value is None:
        return None
    state = require_type(f"committed.{name}", value, RecurrentState)
    axes: dict[str, tuple[Axis, ...]] = {
        "windows": (("inputs", None), ("channels", None)),
        "memories": (("heads", None), ("key width", None), ("value width", None)),
    }
    arrays = {
        kind: tuple(admit_array(f"committed.{name}.{kind}", value, "float", shape) for value in getattr(state, kind))
        for kind, shape in axes.items()
    }
    if len(arrays["windows"]) != len(arrays["memories"]):
        raise refusal(f"committed.{name}", state, "as many windows as memories")
    return RecurrentState(**arrays)


def _admit_kv(name: str, value: object, cache: Cache) -> Kv | None:
    """Keys and values with the model's layers, heads and head dimension; an invariant judges their length."""
    if value is None:
        return None
    field, keys_field, values_field, first_field = KV_FIELDS[name]
    kv = require_type(field, value, Kv)
    keys = admit_array(keys_field, kv.keys, "float", cache.axes)
    values = admit_array(values_field, kv.values, "float", cache.value_axes)
    first = admit_ints(first_field, kv.first, 0)
    layers, heads, _, width = keys.shape
    value_shape = values.shape
    # For a checkpoint the case tells no sizes, but keys and values must still agree but for their widths.
    if value_shape[:2] != (layers, heads):
        value_axes = Cache(layers, heads, width).axes
        raise refusal(values_field, kv.values, expected_array("float", value_axes))
    if first and len(first) != layers:
        expected = f"one column for each of {layers} layers, or none"
        raise refusal(first_field, kv.first, expected, f"{len(first)} columns")
    return Kv(keys, values, first)
