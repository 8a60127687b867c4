"""EAGLE-1 heads in the layouts of SafeAILab, vLLM and speculators.

Further decoder layers are named `layers.1` and so on, with a norm before attention that the first one lacks (SafeAILab,
vLLM). `no_rope_layers` has a 0 for each layer without rotary embedding, as in configurations of Llama 4, and counts the
head's own layers. A head with experts has Llama 4's names: all experts of a layer in one tensor, inputs first, gate and
up side by side.
"""

from typing import Any

from specverify.reference.draft.eagle1 import LAYER_PREFIX, Eagle1, layer_prefix
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import MOST_LAYERS, HeadLayer
from specverify.reference.draft_files.layer_fields import (
    attention_weights,
    check_one_layer,
    head_layer,
    layer_weights,
    own_embedding,
)
from specverify.reference.draft_files.target_sizes import TargetSizes
from specverify.reference.draft_files.tensors import HeadTensors
from specverify.reference.files.fields import Fields, UnreadableCheckpoint, quote_value
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
    layer = head_layer(fields, target, Eagle1.WORD)
    from_speculators = fields.get("speculators_model_type") is not None
    if from_speculators:
        check_one_layer(fields, Eagle1.WORD)
    layers = fields.integer("num_hidden_layers", 1)
    if not 1 <= layers <= MOST_LAYERS:
        raise fields.refuse(f"num_hidden_layers is {layers}: {Eagle1.WORD} heads of 1 to {MOST_LAYERS} layers are read")
    experts, taken = _experts(fields)
    bias = fields.flag("fusion_bias") if from_speculators else fields.flag("bias", True)
    bias_words = f"fusion_bias {str(bias).lower()}" if from_speculators else f"bias {str(bias).lower()}"
    if not from_speculators and fields.get("bias") is None:
        bias_words = "no field bias, which means true"
    hidden = target.hidden_size
    state = own_embedding(tensors, fields, target)
    state |= tensors.linear("fc", hidden, 2 * hidden, bias, bias_words)
    for number in range(layers):
        prefix = layer_prefix(number)
        if experts:
            state |= attention_weights(tensors, prefix, layer, hidden, hidden, fields)
            state |= _expert_weights(tensors, prefix, layer, hidden, experts)
        else:
            state |= layer_weights(tensors, prefix, layer, hidden, hidden, fields)
        for name in ("input_layernorm",) * (number > 0) + ("post_attention_layernorm",):
            norm = f"{prefix}.{name}.weight"
            state[norm] = tensors.take(norm, (hidden,), f"num_hidden_layers is {layers}" if number else "")
    words = {"reads": HiddenStates(place="normed", shift=1), "layer": layer, "bias": bias, "layers": layers}
    return {**words, "unrotated": _unrotated(fields, layers), "experts": experts, "experts_per_token": taken}, state


def _unrotated(fields: Fields, layers: int) -> tuple[int, ...]:
    """The layers without rotary embedding: those with a 0 in `no_rope_layers`, which may be absent."""
    flags = fields.get("no_rope_layers")
    if flags is None:
        return ()
    if not isinstance(flags, list) or any(type(flag) is not int or flag not in (0, 1) for flag in flags):
        raise fields.refuse(f"no_rope_layers is {quote_value(flags)}: a list of 1 (rotated) and 0 is read")
    if len(flags) != layers:
        raise fields.refuse(
            f"no_rope_layers has {len(flags)} entries, and the head {layers} layers: it counts the head's own layers; "
            "correct it"
        )
    return tuple(layer for layer, is_rotated in enumerate(flags) if not is_rotated)


def _experts(fields: Fields) -> tuple[int, int]:
    """The number of experts, 0 for a head without, and the number that a row goes through."""
    experts = fields.integer("num_local_experts", 0)
    if experts < 0:
        raise fields.refuse(f"num_local_experts is {experts}; correct it")
    return experts, fields.integer("num_experts_per_tok", 1) if experts else 1


def _expert_weights(tensors: HeadTensors, prefix: str, layer: HeadLayer, hidden: int, experts: int) -> dict[str, Array]:
    """The router, the experts and the shared expert of the layer under `prefix`, under the names of `Eagle1`."""
    inner = layer.intermediate_size
    reason = f"num_local_experts is {experts}"
    stored = f"{prefix}.feed_forward"
    ours = f"{prefix}.mlp"
    state = {f"{ours}.gate.weight": tensors.take(f"{stored}.router.weight", (experts, hidden), reason)}
    gate_and_up = tensors.take(f"{stored}.experts.gate_up_proj", (experts, hidden, 2 * inner), reason)
    down = tensors.take(f"{stored}.experts.down_proj", (experts, inner, hidden), reason)
    for number in range(experts):
        state[f"{ours}.experts.{number}.gate_proj.weight"] = gate_and_up[number, :, :inner].T.copy()
        state[f"{ours}.experts.{number}.up_proj.weight"] = gate_and_up[number, :, inner:].T.copy()
        state[f"{ours}.experts.{number}.down_proj.weight"] = down[number].T.copy()
    for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
        weight = tensors.take(f"{stored}.shared_expert.{name}_proj.weight", shape, reason)
        state[f"{ours}.shared_expert.{name}_proj.weight"] = weight
    return state
