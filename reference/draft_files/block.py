"""Drafts of blocks: DFlash, DFlash2 and DSpark under the names of z-lab, SpecForge and speculators.

z-lab and SpecForge number layers of the target by their outputs (`target_layer_ids`), speculators by their inputs
(`aux_hidden_state_layer_ids`; vLLM PR #40727). DFlash scores in place. SpecForge, speculators and DeepSeek train DSpark
from the anchor on, though SpecForge's `spec_generate` reads it in place. A confidence head is read, and ends paths of a
tree that asks for it (`"when": "head"`). DFlash2 is DFlash with convolutions and a selector, and says so by its class.
"""

from typing import Any

from specverify.reference.draft.block import (
    BIAS,
    CONFIDENCE_HEAD,
    CONVOLUTIONS,
    MARKOV,
    MARKOV_PREFIX,
    MOST_RANK,
    PREDECESSOR,
    PREVIOUS,
    SELECTOR,
    SIDES,
    SUCCESSOR,
    Block,
    layer_prefix,
)
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import MOST_LAYERS
from specverify.reference.draft_files.eagle3 import vocabulary
from specverify.reference.draft_files.layer_fields import head_layer, layer_weights, own_embedding
from specverify.reference.draft_files.target_sizes import TargetSizes
from specverify.reference.draft_files.tensors import HeadTensors
from specverify.reference.files.fields import Fields, UnreadableCheckpoint, quote_value
from specverify.reference.trace import Array

OPTIONS = "dflash_config"
"""The object of config.json that z-lab and SpecForge read first."""

SPECULATORS = ("dflash", "dflash2", "dspark")
"""The kinds of speculators that are read here, by `speculators_model_type`."""

CLASSES = ("dflash", "dspark")
"""Parts of names of classes, in small letters, of the drafts that are read here."""

INPUTS = "aux_hidden_state_layer_ids"
OUTPUTS = "target_layer_ids"

WRAPPER = "logit_head."
"""A prefix under which early files of SpecForge have the Markov and the confidence head."""

ATTENTION = ("gqa", "mha")
"""The words of `attention_mode` for the attention that is computed here."""


def is_block(fields: Fields) -> bool:
    """Whether config.json describes a draft of blocks; `check_known` refuses those that are not computed."""
    classes = fields.get("architectures")
    names = [str(name).lower() for name in (classes if isinstance(classes, list) else [classes])]
    has_class = any(part in name for name in names for part in CLASSES)
    return has_class or bool(fields.get(OPTIONS)) or fields.get("speculators_model_type") in SPECULATORS


def place(name: str) -> str:
    """The name of a tensor in z-lab's layout."""
    name = name.removeprefix("model.").removeprefix(WRAPPER)
    return "d2t" if name == "draft_id_to_target_id" else name


def read(fields: Fields, tensors: HeadTensors, target: TargetSizes) -> tuple[dict[str, Any], dict[str, Array]]:
    """The fields of `Block` and the weights of a draft of blocks.

    Raises:
        UnreadableCheckpoint: with one line that says what is wrong.
    """
    _check_stated_once(fields)
    layers = fields.integer("num_hidden_layers")
    if not 1 <= layers <= MOST_LAYERS:
        raise fields.refuse(f"num_hidden_layers is {layers}: drafts of blocks of 1 to {MOST_LAYERS} layers are read")
    for name, size in (("target_hidden_size", target.hidden_size), ("num_target_layers", target.layers)):
        target.check_equal(fields, name, size)
    layer = head_layer(fields, target, Block.WORD, has_windows=True)
    hidden = target.hidden_size
    reads = HiddenStates(_layer_ids(fields, target, layers))
    ids = vocabulary(tensors, fields, target)
    rows = len(ids) or target.vocab_size
    state = own_embedding(tensors, fields, target)
    state |= tensors.linear("fc", hidden, reads.parts * hidden, False, "no bias of fc")
    for name in ("hidden_norm", "norm"):
        state[f"{name}.weight"] = tensors.take(f"{name}.weight", (hidden,))
    for prefix in map(layer_prefix, range(layers)):
        state |= layer_weights(tensors, prefix, layer, hidden, hidden, fields)
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"{prefix}.{name}.weight"] = tensors.take(f"{prefix}.{name}.weight", (hidden,))
        for name in ("q_norm", "k_norm"):
            norm = f"{prefix}.self_attn.{name}.weight"
            state[norm] = tensors.take(norm, (layer.head_dim,))
    state |= _head_matrix(fields, tensors, rows, hidden, bool(ids))
    words: dict[str, Any] = {"reads": reads, "layer": layer, "layers": layers, "vocabulary": ids}
    words |= {"slots": fields.integer("block_size"), "mask_token": fields.integer("mask_token_id")}
    words |= _markov_words(fields) | _attention_words(fields, layers) | _selector_words(fields, hidden)
    is_dspark = _is_dspark(fields)
    words["from_anchor"] = fields.flag("sample_from_anchor", is_dspark)
    if words["markov_rank"]:
        state |= _markov_weights(tensors, target, words, rows)
    words["confidence"], weights = _confidence_weights(fields, tensors, hidden, words["markov_rank"])
    state |= weights
    state |= _further_weights(tensors, target, words, rows)
    return words, state


def _check_stated_once(fields: Fields) -> None:
    """Refuse an option that stands in OPTIONS and outside of it with two values."""
    for name, value in (fields.get(OPTIONS) or {}).items():
        if fields.get(name) != value:
            raise fields.refuse(f"{name} is stated twice, and differently; correct it")


def _is_dspark(fields: Fields) -> bool:
    """Whether the file is one of DSpark, which it tells in one of three ways."""
    classes = fields.get("architectures")
    names = [str(name).lower() for name in (classes if isinstance(classes, list) else [classes])]
    words = (*names, fields.get("projector_type"), fields.get("speculators_model_type"))
    return any("dspark" in str(word) for word in words)


def _layer_ids(fields: Fields, target: TargetSizes, layers: int) -> tuple[int, ...]:
    """The layers of the target whose outputs are read."""
    by_input = fields.get(INPUTS) is not None
    name = INPUTS if by_input else OUTPUTS
    numbers = fields.get(name)
    if by_input and fields.get(OUTPUTS) is not None:
        raise fields.refuse(f"{INPUTS} and {OUTPUTS} are both stated; keep one")
    if numbers is None:
        return _usual_layers(fields, target, layers)
    if not isinstance(numbers, list) or not numbers or any(type(number) is not int for number in numbers):
        raise fields.refuse(f"{name} is {quote_value(numbers)}, not a list of layer numbers; correct it")
    ids = tuple(number - by_input for number in numbers)
    if len(set(ids)) < len(ids) or min(ids) < -1 or max(ids) >= target.layers:
        read_words = "inputs" if by_input else "outputs"
        raise fields.refuse(
            f"{name} is {quote_value(numbers)}, and {target.name} has the layers 0 to {target.layers - 1}, of which "
            f"the {read_words} are read, each once"
        )
    if max(ids) == target.layers - 1:
        raise fields.refuse(
            f"{name} names the output of the last layer, which is normed in transformers and not in vLLM and SGLang: "
            "no reading is right for all"
        )
    return ids


def _usual_layers(fields: Fields, target: TargetSizes, layers: int) -> tuple[int, ...]:
    """The layers of z-lab and SpecForge for a draft of `layers` layers: evenly from 1 to N - 3, or the middle one."""
    if layers == 1:
        return (target.layers // 2,)
    span = target.layers - 4
    ids = tuple(round(1 + i * span / (layers - 1)) for i in range(layers))
    if len(set(ids)) < layers or ids[0] < 0:
        raise fields.refuse(
            f"{OUTPUTS} is missing, and {layers} layers evenly from 1 to N - 3 make no sense in the {target.layers} "
            f"layers of {target.name}; add the field"
        )
    return ids


def _head_matrix(fields: Fields, tensors: HeadTensors, rows: int, hidden: int, is_reduced: bool) -> dict[str, Array]:
    """`lm_head`, where the head has one; otherwise the target's scores, for all of its ids."""
    if "lm_head.weight" in tensors:
        if fields.flag("tie_word_embeddings"):
            raise fields.refuse("tie_word_embeddings is true, and lm_head.weight is stored; set it to false")
        return {"lm_head.weight": tensors.take("lm_head.weight", (rows, hidden))}
    if is_reduced:
        raise UnreadableCheckpoint(
            f"{tensors.root}: tensor lm_head.weight is missing, and draft_vocab_size is {rows}: the target's head "
            "scores its whole vocabulary"
        )
    return {}


def _attention_words(fields: Fields, layers: int) -> dict[str, Any]:
    """The windows of layers, and which layers are causal."""
    mode = fields.get("attention_mode")
    if mode is not None and mode not in ATTENTION:
        raise fields.refuse(f"attention_mode is {quote_value(mode)}; {', '.join(ATTENTION)} are computed")
    windows = _windows(fields, layers)
    if windows and fields.get("speculators_model_type") is not None:
        raise fields.refuse(
            "layer_types names sliding_attention: speculators counts a window from the anchor of a block, vLLM from "
            "each slot; no reading is right for both"
        )
    if fields.get("is_causal") is None:  # z-lab and SpecForge: layers with a window are causal
        return {"windows": windows, "causal": "windowed" if windows else "none"}
    return {"windows": windows, "causal": "all" if fields.flag("is_causal") else "none"}


def _windows(fields: Fields, layers: int) -> tuple[int, ...]:
    """The window of each layer, 0 for none; empty if no layer has one."""
    types = fields.get("layer_types")
    if types is None:
        if fields.flag("use_sliding_window"):
            raise fields.refuse("use_sliding_window is true, and layer_types is missing; add it")
        return ()
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or any(kind not in known for kind in types):
        raise fields.refuse(f"layer_types is {quote_value(types)}; layers are {' or '.join(known)}")
    if len(types) != layers:
        raise fields.refuse(f"layer_types has {len(types)} entries, and num_hidden_layers is {layers}; correct it")
    if known[1] not in types:
        return ()
    if not fields.flag("use_sliding_window"):
        raise fields.refuse("layer_types names sliding_attention, and use_sliding_window is not true; correct it")
    window = fields.size("sliding_window")
    return tuple(window if kind == known[1] else 0 for kind in types)


def _selector_words(fields: Fields, hidden: int) -> dict[str, Any]:
    """The sizes of convolutions and selector, 0 for none; a file of DFlash2 states them all."""
    names = {
        "conv_taps": "conv_kernel_size",
        "conv_group": "conv_group_size",
        "selector_rank": "selector_rank",
        "selector_top_k": "selector_top_k",
    }
    missing = [name for name in names.values() if not fields.get(name)]
    if len(missing) == len(names):
        if _is_dflash2(fields):
            raise fields.refuse(f"{', '.join(missing)} are missing from a draft that names DFlash2; add them")
        return {}
    if missing:
        raise fields.refuse(f"{', '.join(missing)}: missing beside other fields of DFlash2; add them")
    words = {word: fields.size(name) for word, name in names.items()}
    if hidden % words["conv_group"]:
        raise fields.refuse(f"conv_group_size is {words['conv_group']}, which does not divide hidden_size {hidden}")
    return words


def _is_dflash2(fields: Fields) -> bool:
    """Whether the file names DFlash2 as its class or as its kind."""
    classes = fields.get("architectures")
    names = classes if isinstance(classes, list) else [classes]
    return any("dflash2" in str(name).lower() for name in (*names, fields.get("speculators_model_type")))


def _further_weights(tensors: HeadTensors, target: TargetSizes, words: dict[str, Any], rows: int) -> dict[str, Array]:
    """The weights of convolutions and selector; a candidate's vectors have a row for each of the `rows` ids."""
    hidden, taps = target.hidden_size, words.get("conv_taps", 0)
    state: dict[str, Array] = {}
    for prefix in map(layer_prefix, range(words["layers"] if taps else 0)):
        for name in CONVOLUTIONS:
            kernel = f"{prefix}.{name}.base_kernel"
            state[kernel] = tensors.take(kernel, (SIDES, taps, hidden))
            deltas = SIDES * taps * (hidden // words["conv_group"])
            state |= tensors.linear(f"{prefix}.{name}.kernel_projection", deltas, hidden, False, "no bias of kernels")
    rank = words.get("selector_rank", 0)
    if rank:
        state[PREDECESSOR] = tensors.take(PREDECESSOR, (target.vocab_size, rank))
        state[SUCCESSOR] = tensors.take(SUCCESSOR, (rows, rank))
        state |= tensors.linear(f"{SELECTOR}.hidden_projection", rank, hidden, False, "no bias of the selector")
    return state


def _markov_words(fields: Fields) -> dict[str, Any]:
    """The rank of the Markov head, 0 for none, and its kind."""
    rank = fields.integer("markov_rank", 0)
    kind = fields.get("markov_head_type")
    kind = MARKOV[0] if kind is None else kind
    if not 0 <= rank <= MOST_RANK:
        raise fields.refuse(f"markov_rank is {rank}, no rank from 0 to {MOST_RANK}; correct it")
    if kind not in MARKOV:
        raise fields.refuse(f"markov_head_type is {quote_value(kind)}; {', '.join(MARKOV)} are computed")
    return {"markov_rank": rank, "markov": kind if rank else MARKOV[0]}


def _markov_weights(tensors: HeadTensors, target: TargetSizes, words: dict[str, Any], rows: int) -> dict[str, Array]:
    """The weights of the Markov head; its second matrix has a row for each of the `rows` ids that the head names."""
    rank, hidden = words["markov_rank"], target.hidden_size
    state = {PREVIOUS: tensors.take(PREVIOUS, (target.vocab_size, rank)), BIAS: tensors.take(BIAS, (rows, rank))}
    reason = f"markov_head_type is {words['markov']}"
    if words["markov"] == "gated":
        state |= tensors.linear(f"{MARKOV_PREFIX}.gate_proj", rank, hidden + rank, True, reason)
    if words["markov"] == "rnn":
        state |= tensors.linear(f"{MARKOV_PREFIX}.joint_proj", 3 * rank, 2 * rank + hidden, True, reason)
    return state


def _confidence_weights(fields: Fields, tensors: HeadTensors, hidden: int, rank: int) -> tuple[str, dict[str, Array]]:
    """The input of the confidence head, one of CONFIDENCE, and its tensors; an empty word where the file has none."""
    if f"{CONFIDENCE_HEAD}.weight" not in tensors:
        if fields.flag("enable_confidence_head"):
            tensor = f"{CONFIDENCE_HEAD}.weight"
            raise fields.refuse(f"enable_confidence_head is true, and tensor {tensor} is missing; correct it")
        return "", {}
    reads_token = rank > 0 and fields.flag("confidence_head_with_markov", _is_speculators(fields))
    width = hidden + rank * reads_token
    return "markov" if reads_token else "state", tensors.linear(CONFIDENCE_HEAD, 1, width, True, "a confidence head")


def _is_speculators(fields: Fields) -> bool:
    """Whether the file is one of speculators, in which the confidence head reads the token before by default."""
    return fields.get("speculators_model_type") is not None
