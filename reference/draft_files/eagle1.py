"""EAGLE-1 heads in the layouts of SafeAILab, vLLM and speculators."""

from typing import Any

from specverify.reference.draft.eagle1 import LAYER_PREFIX, Eagle1
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft_files.layer_fields import check_one_layer, head_layer, layer_weights, own_embedding
from specverify.reference.draft_files.target_sizes import TargetSizes
from specverify.reference.draft_files.tensors import HeadTensors
from specverify.reference.files.fields import Fields, UnreadableCheckpoint
from specverify.reference.trace import Array

FROM_SPECULATORS = {"fusion_fc.": "fc.", "transformer.": f"{LAYER_PREFIX}."}
"""Prefixes of speculators, each with the prefix of SafeAILab."""


def place(name: str) -> str:
    """The name of a tensor in SafeAILab's layout; vLLM may put `model.` in front."""
    name = name.removeprefix("model.")
    for their_prefix, our_prefix in FROM_SPECULATORS.items():
        if name.startswith(their_prefix):
            return our_prefix + name.removeprefix(their_prefix)
    return name


def read(fields: Fields, tensors: HeadTensors, target: TargetSizes) -> tuple[dict[str, Any], dict[str, Array]]:
    """The fields of `Eagle1` and the weights of an EAGLE-1 head.

    SafeAILab's `bias` is true if it is absent, speculators' `fusion_bias` false.

    Raises:
        UnreadableCheckpoint: with one line that says what is wrong.
    """
    if fields.flag("layernorms"):
        raise fields.refuse("layernorms is true: the further norms of speculators' variant are not computed")
    if "token_map" in tensors or fields.number("truncated_vocab_size", target.vocab_size) != target.vocab_size:
        raise fields.refuse(
            "a token map reduces the vocabulary: EAGLE-1 heads are read with the target's whole vocabulary"
        )
    if "lm_head.weight" in tensors:
        raise UnreadableCheckpoint(
            f"{tensors.root}: tensor lm_head.weight has no place in an EAGLE-1 head, whose scores come from the "
            "target's own head; remove the tensor"
        )
    check_one_layer(fields, Eagle1.WORD)
    layer = head_layer(fields, target, Eagle1.WORD)
    from_speculators = fields.get("speculators_model_type") is not None
    bias = fields.flag("fusion_bias") if from_speculators else fields.flag("bias", True)
    bias_words = f"fusion_bias {str(bias).lower()}" if from_speculators else f"bias {str(bias).lower()}"
    if not from_speculators and fields.get("bias") is None:
        bias_words = "no field bias, which means true"
    hidden = target.hidden_size
    state = own_embedding(tensors, fields, target)
    state |= tensors.linear("fc", hidden, 2 * hidden, bias, bias_words)
    state |= layer_weights(tensors, LAYER_PREFIX, layer, hidden, hidden, fields)
    norm = f"{LAYER_PREFIX}.post_attention_layernorm.weight"
    state[norm] = tensors.take(norm, (hidden,))
    return {"reads": HiddenStates(place="normed", shift=1), "layer": layer, "bias": bias}, state
