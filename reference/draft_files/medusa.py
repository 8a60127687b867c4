"""Medusa heads under the names of FasterDecoding and of vLLM.

FasterDecoding: `{head}.{layer}.linear`, then `{head}.{layers}`; with several layers each head has one block that is run
several times, and a file may store it once. vLLM: `blocks.{head}.layers.{layer}` and `lm_heads.{head}`.
"""

import re
from typing import Any

import numpy as np

from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.medusa import HEADS_PREFIX
from specverify.reference.draft_files.layer_fields import check_plain
from specverify.reference.draft_files.target_sizes import TargetSizes
from specverify.reference.draft_files.tensors import HeadTensors
from specverify.reference.files.fields import Fields
from specverify.reference.trace import Array

BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
"""A residual block in vLLM."""

SCORES = re.compile(r"lm_heads\.(\d+)\.weight")
"""The matrix of a head in vLLM."""

MEDUSA_NAME = re.compile(r"(medusa_heads?\.)?(\d+\.\d+\.|blocks\.\d+\.|lm_heads\.\d+\.)")
"""The beginning of a tensor's name in either scheme."""

MOST_HEADS = 64
"""Most heads, and most blocks of a head: the bounds of a case file."""


def place(name: str) -> str:
    """The name of a tensor in FasterDecoding's scheme, behind `medusa_head.`; vLLM's matrices keep `lm_heads.`."""
    name = name.removeprefix("medusa_heads.").removeprefix(f"{HEADS_PREFIX}.")
    if block := BLOCK.fullmatch(name):
        return f"{HEADS_PREFIX}.{block[1]}.{block[2]}.linear.{block[3]}"
    if name[:1].isdigit():
        return f"{HEADS_PREFIX}.{name}"
    return name


def read(fields: Fields, tensors: HeadTensors, target: TargetSizes) -> tuple[dict[str, Any], dict[str, Array]]:
    """The fields of `Medusa` and the weights of Medusa heads.

    Raises:
        UnreadableCheckpoint: with one line that says what is wrong.
    """
    check_plain(fields)
    is_vllm = any(name.startswith("lm_head") for name in tensors.names)
    target.check_equal(fields, "hidden_size", target.hidden_size)
    target.check_equal(fields, "vocab_size", target.vocab_size)
    if "token_map" in tensors or fields.number("truncated_vocab_size", target.vocab_size) != target.vocab_size:
        raise fields.refuse(
            "a token map reduces the vocabulary: Medusa heads are read with the target's whole vocabulary"
        )
    heads = _count(fields, "num_heads" if is_vllm else "medusa_num_heads", None)
    layers = _count(fields, "num_hidden_layers" if is_vllm else "medusa_num_layers", 1)
    # FasterDecoding's blocks have a bias; vLLM's have none unless asked for.
    bias = fields.flag("medusa_fc_bias", not is_vllm)
    bias_words = f"medusa_fc_bias {str(bias).lower()}" if is_vllm else "the bias of FasterDecoding's blocks"
    hidden, state = target.hidden_size, dict[str, Array]()
    shares_head = fields.flag("original_lm_head")
    for head in range(heads):
        for layer in range(layers):
            name = f"{HEADS_PREFIX}.{head}.{layer}.linear"
            if layer and not is_vllm and f"{name}.weight" not in tensors:
                first = f"{HEADS_PREFIX}.{head}.0.linear"  # stored once, and run again
                state |= {
                    f"{name}.{part}": state[f"{first}.{part}"] for part in ("weight", "bias") if bias or part != "bias"
                }
                continue
            state |= tensors.linear(name, hidden, hidden, bias, bias_words)
            _check_same_block(fields, state, name, head, is_vllm)
        state[f"{HEADS_PREFIX}.{head}.{layers}.weight"] = _matrix(
            tensors, state, head, layers, is_vllm, shares_head, target
        )
    words = {"reads": HiddenStates(place="normed"), "heads": heads, "bias": bias, "layers": layers}
    return words, state


def _count(fields: Fields, name: str, default: int | None) -> int:
    count = fields.integer(name, default)
    if not 1 <= count <= MOST_HEADS:
        raise fields.refuse(f"field {name} is {count}, not a number from 1 to {MOST_HEADS}; correct it")
    return count


def _check_same_block(fields: Fields, state: dict[str, Array], name: str, head: int, is_vllm: bool) -> None:
    """Refuse different blocks of one head under FasterDecoding's names, which stand for one block run again."""
    first = f"{HEADS_PREFIX}.{head}.0.linear.weight"
    if not is_vllm and not np.array_equal(state[first], state[f"{name}.weight"]):
        raise fields.refuse(
            f"head {head} has different blocks: FasterDecoding runs one block medusa_num_layers times; use vLLM's names"
        )


def _matrix(
    tensors: HeadTensors,
    state: dict[str, Array],
    head: int,
    layers: int,
    is_vllm: bool,
    shares_head: bool,
    target: TargetSizes,
) -> Array:
    """The matrix of a head; `original_lm_head` of vLLM gives all heads that of head 0."""
    shape = (target.vocab_size, target.hidden_size)
    if not is_vllm:
        return tensors.take(f"{HEADS_PREFIX}.{head}.{layers}.weight", shape)
    if shares_head and head:
        return state[f"{HEADS_PREFIX}.0.{layers}.weight"]
    name = "lm_head.weight" if shares_head and "lm_head.weight" in tensors else f"lm_heads.{head}.weight"
    return tensors.take(name, shape)
