"""EAGLE-3 heads: layouts of SafeAILab, SpecForge, SGLang, vLLM and speculators.

The name of the decoder layer tells the conventions: `midlayer.` stands for SafeAILab, SpecForge and SGLang, `layers.0.`
for vLLM and speculators. The numbers of the layers whose states are read mean their inputs in vLLM, and their outputs
in SGLang. `d2t` holds offsets of a reduced vocabulary: draft id d means target id d + d2t[d].
"""

from collections.abc import Collection
from typing import Any

import numpy as np

from specverify.reference.draft.eagle3 import LAYER_PREFIX, Eagle3, layer_prefix
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import MOST_LAYERS
from specverify.reference.draft.peagle import MASK_STATE, MOST_MASKS, PEagle
from specverify.reference.draft_files.layer_fields import (
    check_one_layer,
    check_rotated_and_dense,
    head_layer,
    layer_weights,
    own_embedding,
)
from specverify.reference.draft_files.target_sizes import TargetSizes
from specverify.reference.draft_files.tensors import HeadTensors
from specverify.reference.files.fields import Fields, UnreadableCheckpoint, quote_value
from specverify.reference.trace import Array

VLLM_PREFIX = "layers.0."
"""The prefix of the decoder layer in vLLM and speculators."""

IDS = "eagle_aux_hidden_state_layer_ids"

MASK_TOKENS = ("mask_token_id", "ptd_token_id", "pard_token")
"""The names of P-EAGLE's mask token: in speculators, and in configs for vLLM."""

MASKS = 7
"""Rows of mask tokens of a P-EAGLE head whose file tells no number of tokens: speculators trains eight levels."""


def is_parallel(fields: Fields, names: Collection[str]) -> bool:
    """Whether a head scores all levels at once, by mask tokens (P-EAGLE)."""
    classes = fields.get("architectures")
    has_class = any("peagle" in str(name).lower() for name in (classes if isinstance(classes, list) else [classes]))
    return has_class or fields.get("speculators_model_type") == PEagle.TAG or MASK_STATE in names


def place(name: str) -> str:
    """The name of a tensor in SafeAILab's layout."""
    name = name.removeprefix("model.")
    if name == "draft_id_to_target_id":
        return "d2t"
    return f"{LAYER_PREFIX}.{name.removeprefix(VLLM_PREFIX)}" if name.startswith(VLLM_PREFIX) else name


def read(
    fields: Fields, tensors: HeadTensors, target: TargetSizes, midlayer: bool, parallel: bool = False
) -> tuple[dict[str, Any], dict[str, Array]]:
    """The fields of `Eagle3` and the weights of an EAGLE-3 head, or those of `PEagle`.

    Args:
        fields: config.json, with the fields of nested objects beside the outer ones.
        tensors: The tensors, by `place`.
        target: The target.
        midlayer: Whether the layer's prefix is that of SafeAILab, SpecForge and SGLang.
        parallel: Whether the head is one of P-EAGLE.

    Raises:
        UnreadableCheckpoint: with one line that says what is wrong.
    """
    masks = _mask_words(fields) if parallel else {}
    if parallel:
        fields = Fields(fields.where, {**fields.content, "parallel_drafting": None}, {})
    if midlayer:
        check_one_layer(fields, Eagle3.WORD)
    check_rotated_and_dense(fields, Eagle3.WORD)
    layers = fields.integer("num_hidden_layers", 1)
    if not 1 <= layers <= MOST_LAYERS:
        raise fields.refuse(f"num_hidden_layers is {layers}: {Eagle3.WORD} heads of 1 to {MOST_LAYERS} layers are read")
    target.check_equal(fields, "target_hidden_size", target.hidden_size)
    hidden = target.hidden_size if fields.get("target_hidden_size") is None else fields.size("hidden_size")
    layer = head_layer(fields, target, Eagle3.WORD, hidden)
    norm_before_residual, norm_output = _flags(fields, midlayer)
    reads = _reads(fields, target, midlayer)
    ids = vocabulary(tensors, fields, target)
    state = own_embedding(tensors, fields, target, hidden)
    if hidden != target.hidden_size and not (state and "lm_head.weight" in tensors and reads.layers):
        raise fields.refuse(
            f"hidden_size is {hidden}, and {target.name} has {target.hidden_size}: such a head has fc, embed_tokens "
            "and lm_head of its own; save all of them"
        )
    state |= _fusion_weights(fields, tensors, reads, target.hidden_size, hidden, midlayer)
    state |= layer_weights(tensors, LAYER_PREFIX, layer, 2 * hidden, hidden, fields)
    for name in (
        f"{LAYER_PREFIX}.input_layernorm",
        f"{LAYER_PREFIX}.hidden_norm",
        f"{LAYER_PREFIX}.post_attention_layernorm",
        "norm",
    ):
        state[f"{name}.weight"] = tensors.take(f"{name}.weight", (hidden,))
    for prefix in map(layer_prefix, range(1, layers)):
        state |= layer_weights(tensors, prefix, layer, hidden, hidden, fields)
        for name in (f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"):
            state[f"{name}.weight"] = tensors.take(f"{name}.weight", (hidden,), f"num_hidden_layers is {layers}")
    state |= _head_matrix(fields, tensors, target, len(ids) or target.vocab_size, hidden)
    if parallel:
        width = reads.parts * target.hidden_size
        state[MASK_STATE] = tensors.take(MASK_STATE, (1, 1, width), "a head of P-EAGLE").reshape(width)
    words: dict[str, Any] = {"reads": reads, "layer": layer, "vocabulary": ids}
    words |= {"norm_before_residual": norm_before_residual, "norm_output": norm_output, "layers": layers}
    return {**words, **masks, "hidden_size": 0 if hidden == target.hidden_size else hidden}, state


def _mask_words(fields: Fields) -> dict[str, int]:
    """The number of rows of mask tokens, and the mask token, of a head of P-EAGLE."""
    stated = {name: fields.integer(name) for name in MASK_TOKENS if fields.get(name) is not None}
    if len(set(stated.values())) != 1:
        how = "is missing; add it" if not stated else f"is {' and '.join(map(str, stated.values()))}; correct it"
        raise fields.refuse(f"{MASK_TOKENS[0]} {how}")
    if fields.get(IDS) is not None and fields.get("speculators_model_type") is None:
        raise fields.refuse(
            f"{IDS} is stated in a P-EAGLE file without speculators_model_type: SpecForge counts outputs, vLLM inputs, "
            "under the same names of tensors"
        )
    plan = fields.get("speculators_config")
    methods = plan.get("proposal_methods") if isinstance(plan, dict) else None
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    slots = Fields(fields.where, first, {}).integer("speculative_tokens", MASKS + 1) - 1
    if not 1 <= slots <= MOST_MASKS:
        raise fields.refuse(f"speculative_tokens is {slots + 1}, not a number from 2 to {MOST_MASKS + 1}; correct it")
    (mask_token,) = set(stated.values())
    return {"mask_slots": slots, "mask_token": mask_token}


def _flags(fields: Fields, midlayer: bool) -> tuple[bool, bool]:
    """`norm_before_residual` and `norm_output`, where all readers of the layout agree on them."""
    norm_before_residual, norm_output = fields.flag("norm_before_residual"), fields.flag("norm_output")
    if not midlayer:
        if fields.flag("bias"):
            raise fields.refuse("bias is true: vLLM and SGLang give it to different projections; use attention_bias")
        return norm_before_residual, norm_output
    for name in ("norm_before_residual", "attention_bias", "qkv_bias"):
        if fields.flag(name):
            raise fields.refuse(
                f"{name} is true beside tensors named midlayer: vLLM heeds it, SafeAILab and SGLang do not; name the "
                "layer layers.0 if the head was trained with it, and else set it to false"
            )
    if norm_output:
        raise fields.refuse(
            "norm_output is true beside tensors named midlayer: SpecForge before its change 879 wrote true for heads "
            "that feed back the output before the norm; set it to false for such a head, and name the layer layers.0 "
            "if the normed output is fed back"
        )
    return norm_before_residual, norm_output


def _reads(fields: Fields, target: TargetSizes, midlayer: bool) -> HiddenStates:
    """The states that the head reads: layer inputs 2, N // 2 and N - 3 unless config.json numbers others."""
    numbers = fields.get(IDS)
    if not fields.flag("use_aux_hidden_state", True):
        if numbers is not None:
            raise fields.refuse(f"{IDS} is given, and use_aux_hidden_state is false; remove one of them")
        return HiddenStates(place="normed", shift=1)
    if numbers is None:
        layers = tuple(place - 1 for place in (2, target.layers // 2, target.layers - 3))
        if sorted(set(layers)) != list(layers) or layers[-1] < 0:
            raise fields.refuse(
                f"{IDS} is missing, and the usual layers 2, N // 2 and N - 3 make no sense in the {target.layers} "
                f"layers of {target.name}; add the field"
            )
        return HiddenStates(layers, shift=1)
    if not isinstance(numbers, list) or not numbers or any(type(number) is not int for number in numbers):
        raise fields.refuse(f"{IDS} is {quote_value(numbers)}, not a list of layer numbers; correct it")
    # In SGLang j is the output of layer j, in vLLM its input, which is the output of layer j - 1.
    layers = tuple(number if midlayer else number - 1 for number in numbers)
    meant = "outputs" if midlayer else "inputs"
    if len(set(layers)) < len(layers) or not all(-1 <= layer < target.layers - (not midlayer) for layer in layers):
        raise fields.refuse(
            f"{IDS} is {quote_value(numbers)}, and {target.name} has the layers 0 to {target.layers - 1}, of which the "
            f"{meant} are read, each once: the head of another target"
        )
    return HiddenStates(layers, shift=1)


def _fusion_weights(
    fields: Fields, tensors: HeadTensors, reads: HiddenStates, width: int, hidden: int, midlayer: bool
) -> dict[str, Array]:
    """`fc` with the norms before it, which speculators calls input_norm (one) and fc_norm (one for each state)."""
    norm_whole, norm_each = fields.flag("norm_before_fc"), fields.flag("fc_norm")
    if norm_whole and norm_each:
        raise fields.refuse("norm_before_fc and fc_norm are both true: they are two ways to norm the states")
    if not reads.layers:
        if norm_whole or norm_each:
            raise fields.refuse("a norm before fc is asked for, and use_aux_hidden_state false leaves out fc")
        return {}
    state: dict[str, Array] = {}
    if norm_whole:
        state["input_norm.weight"] = tensors.take("input_norm.weight", (reads.parts * width,), "norm_before_fc is true")
    for part in range(reads.parts) if norm_each else ():
        state[f"fc_norm.{part}.weight"] = tensors.take(f"fc_norm.{part}.weight", (width,), "fc_norm is true")
    bias = midlayer and fields.flag("bias")
    bias_words = f"bias {str(bias).lower()}" if midlayer else "no bias of fc in this layout"
    return state | tensors.linear("fc", hidden, reads.parts * width, bias, bias_words)


def _head_matrix(fields: Fields, tensors: HeadTensors, target: TargetSizes, rows: int, hidden: int) -> dict[str, Array]:
    """`lm_head`; a head without one, and without a vocabulary of its own, scores with the target's."""
    if "lm_head.weight" in tensors:
        if fields.flag("tie_word_embeddings"):
            raise fields.refuse(
                "tie_word_embeddings is true, and lm_head.weight is stored: SGLang would score with the embedding, "
                "vLLM with lm_head; set it to false"
            )
        return {"lm_head.weight": tensors.take("lm_head.weight", (rows, hidden))}
    is_whole = fields.get("draft_vocab_size") is None or rows == target.vocab_size
    if is_whole and not fields.flag("tie_word_embeddings"):
        return {}
    raise UnreadableCheckpoint(
        f"{tensors.root}: tensor lm_head.weight is missing; only a head of the target's whole vocabulary "
        "and without tie_word_embeddings scores with the target's"
    )


def vocabulary(tensors: HeadTensors, fields: Fields, target: TargetSizes) -> tuple[int, ...]:
    """The target ids that the head can name, ascending, by draft id; empty for all ids of the target.

    Raises:
        UnreadableCheckpoint: `d2t` is missing for a reduced vocabulary, leaves the target's ids, does not ascend, or
            disagrees with `t2d`.
    """
    size = target.vocab_size if fields.get("draft_vocab_size") is None else fields.size("draft_vocab_size")
    if size > target.vocab_size:
        raise fields.refuse(f"draft_vocab_size is {size}, more than the {target.vocab_size} of {target.name}")
    is_named = tensors.take_whole("t2d", (target.vocab_size,)) if "t2d" in tensors else None
    if "d2t" not in tensors:
        if size < target.vocab_size:
            raise UnreadableCheckpoint(
                f"{tensors.root}: tensor d2t is missing, and draft_vocab_size is {size} of {target.vocab_size}: "
                "without it draft ids would be read as the first target ids"
            )
        if is_named is not None and not is_named.all():
            raise UnreadableCheckpoint(f"{tensors.root}: t2d leaves ids out, and d2t is missing; save both")
        return ()
    target_ids = tensors.take_whole("d2t", (size,)) + np.arange(size)
    _check_ids(tensors, target_ids, is_named, target)
    return () if size == target.vocab_size else tuple(target_ids.tolist())


def _check_ids(tensors: HeadTensors, target_ids: Array, is_named: Array | None, target: TargetSizes) -> None:
    """Refuse target ids that are out of range, out of order, or other than those that `t2d` marks."""
    outside_ids = np.flatnonzero((target_ids < 0) | (target_ids >= target.vocab_size))
    if len(outside_ids):
        draft_id = int(outside_ids[0])
        target_id = int(target_ids[draft_id])
        raise UnreadableCheckpoint(
            f"{tensors.root}: d2t is out of range: draft id {draft_id} means target id {target_id}, and {target.name} "
            f"has ids 0 to {target.vocab_size - 1} (d2t holds offsets: target id less draft id)"
        )
    descents = np.flatnonzero(np.diff(target_ids) <= 0)
    if len(descents):
        draft_id = int(descents[0])
        target_id, next_id = int(target_ids[draft_id]), int(target_ids[draft_id + 1])
        raise UnreadableCheckpoint(
            f"{tensors.root}: d2t gives target id {target_id} to draft id {draft_id} and {next_id} to the next: target "
            "ids must ascend (d2t holds offsets: target id less draft id)"
        )
    if is_named is not None and not np.array_equal(np.flatnonzero(is_named), target_ids):
        raise UnreadableCheckpoint(
            f"{tensors.root}: d2t names {len(target_ids)} target ids and t2d marks {int((is_named != 0).sum())} "
            "others; the two belong to different vocabularies"
        )
    if is_named is None and len(target_ids) < target.vocab_size and int(target_ids[-1]) == len(target_ids) - 1:
        raise UnreadableCheckpoint(
            f"{tensors.root}: d2t holds zeros alone, which would name the first {len(target_ids)} target ids, and no "
            "t2d confirms it: the map was never filled"
        )
