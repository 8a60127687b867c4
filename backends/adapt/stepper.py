"""The stepper: a generator of steps, as a backend that shows some of its stages.

The function is a generator. It yields a dict for each speculative step, with any of the parts that its adapter says it
shows; the trace holds these parts and no others.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from specverify.backends.adapt.blackbox import BlackBox, blackbox
from specverify.backends.adapt.generated import tokens_of
from specverify.backends.admission.arrays import read_array
from specverify.backends.base import Declaration
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.trace import (
    Accepted,
    Attended,
    Committed,
    Drafted,
    Emitted,
    Kv,
    Lowered,
    Scored,
    Stage,
    Step,
    Trace,
)
from specverify.reference.tree import Tree

PARTS = {
    "tokens": (Stage.EMITTED, "the tokens that the step emits; every step has them"),
    "tree": (Stage.DRAFTED, "a pair: parents and tokens of the nodes that were verified, the pending root first"),
    "draft_logits": (Stage.DRAFTED, "float [nodes, draft vocabulary]: the draft's scores; NaN for nodes without any"),
    "proposal": (Stage.DRAFTED, "float [nodes, vocabulary]: the law from which each node's token was drawn"),
    "mask": (
        Stage.LOWERED,
        "bool [rows, committed + rows] or [rows, rows]; one for all layers, or a list of one each",
    ),
    "position": (Stage.LOWERED, "int [rows]"),
    "depth": (Stage.LOWERED, "int [rows]"),
    "parent": (Stage.LOWERED, "int [rows]; the root is its own parent"),
    "slot": (Stage.LOWERED, "int [rows]: the column of KV that each row writes"),
    "next_token": (Stage.LOWERED, "int [rows]: the first child, 0 for none"),
    "next_sibling": (Stage.LOWERED, "int [rows]: the next sibling in row order, 0 for none"),
    "ancestor": (Stage.LOWERED, "int [rows, height + 1]"),
    "retrieve_index": (Stage.LOWERED, "int [nodes]: the row that scores each node"),
    "attended": (Stage.ATTENDED, "float [layers, heads, nodes, head_dim], before the output projection"),
    "logits": (Stage.SCORED, "float [nodes, vocabulary]: the target's, before any processing"),
    "law": (Stage.SCORED, "float [nodes, vocabulary]: the target's law, where it samples; needs logits"),
    "routed": (
        Stage.SCORED,
        "int [layers, committed + nodes, experts of a row]: the experts that each row took, -1 where not known; None "
        "for a model without; needs logits",
    ),
    "indexed": (
        Stage.SCORED,
        "int [layers, committed + nodes, k]: the columns that each row attends to where an indexer chooses them, by "
        "position in the row's own text, ascending, -1 behind them and where not known; None for a model without; "
        "needs logits",
    ),
    "path": (Stage.ACCEPTED, "the accepted nodes from the root (0) downwards; needs bonus"),
    "bonus": (Stage.ACCEPTED, "the token after the path; needs path"),
    "logprobs": (Stage.EMITTED, "the log-probability of each emitted token, before any processing"),
    "keys": (Stage.COMMITTED, "float [layers, kv_heads, length, head_dim]: the cache after the step; needs values"),
    "values": (Stage.COMMITTED, "likewise; needs keys"),
}
"""The parts of a step, each with its stage and its form."""

TOGETHER = {"law": "logits", "routed": "logits", "indexed": "logits", "draft_logits": "tree", "proposal": "tree",
            "path": "bonus", "bonus": "path", "keys": "values", "values": "keys"}  # fmt: skip
"""Parts that mean nothing without another part."""

LOWERED_PARTS = tuple(name for name, (stage, _) in PARTS.items() if stage is Stage.LOWERED and name != "mask")
"""The parts that are arrays of `specverify.reference.trace.Lowered` by name."""


def stepper(
    steps: Callable[..., Iterator[Mapping[str, Any]]],
    *,
    shows: tuple[str, ...],
    trees: str = "any",
    **options: Any,
) -> Callable[[], "Stepper"]:
    """A backend's factory, from a generator function that yields one dict for each speculative step.

    Args:
        steps: Takes any of `blackbox.PARAMETERS` by name, at least `prompt_ids` and `max_new_tokens`. If it takes
            `trees`, it is given the trees of the case to verify, a list of (parents, tokens), one for each step, and
            proposes the bare root when they run out; otherwise it drafts in its own way.
        shows: The names of PARTS that its dicts hold; `tokens` need not be named. The invariants of a stage are asked
            where one of its parts is shown, and what needs an absent part is unobserved.
        trees: The case's trees that it can verify, one of `specverify.reference.abilities.TREES`.
        options: Those of `blackbox`.

    Raises:
        TypeError: `steps` cannot be called so, or a part is unknown or lacks the part that it needs.
    """
    unknown = next((part for part in shows if part not in PARTS), None)
    if unknown is not None:
        raise TypeError(f"stepper: shows {unknown!r}, which is none of {', '.join(PARTS)}")
    lonely_part = next((part for part in shows if TOGETHER.get(part, part) not in shows), None)
    if lonely_part is not None:
        raise TypeError(f"stepper: shows {lonely_part} without {TOGETHER[lonely_part]}")
    takes_trees = "trees" in inspect.signature(steps).parameters
    recorder = _StepRecorder(steps, takes_trees)
    open_box = blackbox(recorder, **{"name": getattr(steps, "__name__", "stepper"), **options})
    stages = frozenset({Stage.EMITTED, *(PARTS[part][0] for part in shows)})

    def open_stepper() -> Stepper:
        box = open_box()
        drafts = ("scripted", *box.declaration.drafts) if takes_trees else box.declaration.drafts
        declaration = replace(box.declaration, reveals=stages, drafts=drafts, trees=trees)
        return Stepper(box, recorder, frozenset({"tokens", *shows}), declaration)

    return open_stepper


class _StepRecorder:
    """The generator as a function that returns tokens, which keeps the dicts that were yielded."""

    def __init__(self, steps: Callable[..., Iterator[Mapping[str, Any]]], takes_trees: bool) -> None:
        self._steps = steps
        self._takes_trees = takes_trees
        signature = inspect.signature(steps)
        parameters = [parameter for parameter in signature.parameters.values() if parameter.name != "trees"]
        self.__name__ = getattr(steps, "__name__", "stepper")
        self.__signature__ = signature.replace(parameters=parameters)
        self.trees: list[tuple[list[int], list[int]]] = []
        self.recorded_steps: list[Mapping[str, Any]] = []

    def __call__(self, **arguments: Any) -> list[int]:
        self.recorded_steps = []
        emitted_tokens: list[int] = []
        for step in self._steps(**arguments, **({"trees": self.trees} if self._takes_trees else {})):
            if not isinstance(step, Mapping) or "tokens" not in step:
                raise TypeError(f"{self.__name__} yielded {type(step).__name__}, expected a dict with tokens")
            self.recorded_steps.append(dict(step))
            emitted_tokens += tokens_of(step["tokens"])
        return emitted_tokens


class Stepper:
    """A generator of steps, as a backend.

    Attributes:
        declaration: What its parameters and `shows` say that it can do.
    """

    def __init__(
        self, box: BlackBox, recorder: _StepRecorder, shown_parts: frozenset[str], declaration: Declaration
    ) -> None:
        self.declaration = declaration
        self._box = box
        self._recorder = recorder
        self._shown_parts = shown_parts

    def run(self, case: Case) -> Trace:
        """Run the generator to its end; each dict is one step of the trace."""
        self._recorder.trees = [(list(tree.parent), list(tree.token)) for tree in case.draft.trees or ()]
        trace = self._box.run(case)
        context = list(case.prompt[:-1])
        steps = []
        pending = case.prompt[-1]
        # A checkpoint does not say how many layers it has: there a mask for each layer must be given.
        layers = case.model.architecture.layers if isinstance(case.model, Seeded) else 1
        for number, parts in enumerate(self._recorder.recorded_steps):
            strange = set(parts) ^ self._shown_parts
            if strange:
                surplus = ", ".join(sorted(strange & set(parts))) or "nothing more"
                lacks = ", ".join(sorted(strange - set(parts))) or "nothing"
                raise TypeError(f"step {number} holds {surplus} beside what the adapter shows, and lacks {lacks}")
            tokens = tokens_of(parts["tokens"])
            last = number == len(self._recorder.recorded_steps) - 1
            steps.append(_step(tuple(context), parts, tokens, trace.finish if last else None, layers))
            if tokens:
                context += [pending, *tokens[:-1]]
                pending = tokens[-1]
        return replace(trace, steps=tuple(steps))


def _masks(mask: Any, committed: int, layers: int) -> tuple[Any, ...]:
    """A mask for each layer, each with the committed columns, which every row sees where the mask lacks them."""
    mask_list = list(mask) if isinstance(mask, (tuple, list)) and np.ndim(read_array(mask[0])) == 2 else None
    arrays = [read_array(layer_mask) for layer_mask in (mask_list or [mask])]
    full_masks = []
    for layer_mask in arrays:
        if not isinstance(layer_mask, np.ndarray) or layer_mask.ndim != 2:
            raise TypeError("mask: expected bool [rows, columns], or a list of one for each layer")
        ahead = committed if layer_mask.shape[1] == layer_mask.shape[0] else 0
        if ahead:
            committed_columns = np.ones((len(layer_mask), ahead), dtype=bool)
            layer_mask = np.concatenate([committed_columns, layer_mask.astype(bool)], 1)
        full_masks.append(layer_mask)
    return tuple(full_masks) if mask_list else (full_masks[0],) * layers


def _step(
    context: tuple[int, ...], parts: Mapping[str, Any], tokens: tuple[int, ...], finish: str | None, layers: int
) -> Step:
    """A step of a trace; the door checks the shapes of its arrays."""
    lowered_arrays = {name: parts[name] for name in LOWERED_PARTS if name in parts}
    if "mask" in parts:
        lowered_arrays["visible"] = _masks(parts["mask"], len(context), layers)
    drafted = None
    if "tree" in parts:
        parent, token = parts["tree"]
        tree = Tree(tuple(map(int, parent)), tuple(map(int, token)))
        drafted = Drafted(tree, parts.get("draft_logits"), None, parts.get("proposal"))
    return Step(
        context,
        drafted,
        Lowered(**lowered_arrays) if lowered_arrays else None,
        Attended(parts["attended"]) if "attended" in parts else None,
        _scored(parts) if "logits" in parts else None,
        Accepted(parts["path"], parts["bonus"]) if "path" in parts else None,
        Emitted(tokens, finish, parts.get("logprobs")),
        _committed_cache(parts) if "keys" in parts else None,
    )


def _scored(parts: Mapping[str, Any]) -> Scored:
    """The logits of the step, and what is shown beside them."""
    return Scored(parts["logits"], parts.get("law"), routed=parts.get("routed"), indexed=parts.get("indexed"))


def _committed_cache(parts: Mapping[str, Any]) -> Committed:
    """The cache after the step, as long as its keys."""
    return Committed(int(parts["keys"].shape[2]), after=Kv(parts["keys"], parts["values"]))
