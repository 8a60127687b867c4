"""DeepSeek-style MTP modules inside a target's own checkpoint.

Module k lies under `model.layers.{N + k}`, N being the number of the target's layers. Each may repeat the target's
embedding and head, which must then be the same.
"""

import re
from typing import Any

import numpy as np

from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.mtp import NORMS, Mtp, module_prefix
from specverify.reference.draft_files.layer_fields import head_layer, layer_weights
from specverify.reference.draft_files.target_sizes import TargetSizes
from specverify.reference.draft_files.tensors import HeadTensors
from specverify.reference.files.fields import Fields, UnreadableCheckpoint
from specverify.reference.files.stored import StoredTensor
from specverify.reference.trace import Array

COUNT = "num_nextn_predict_layers"

LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")
"""The beginning of the name of a layer's tensor."""

MOST_MODULES = 16
"""Most modules: the bound of a case file."""


def count(fields: Fields) -> int:
    """The number of modules that config.json states.

    Raises:
        UnreadableCheckpoint: more modules than a case can hold, or no number.
    """
    modules = fields.integer(COUNT, 0)
    if not 0 <= modules <= MOST_MODULES:
        raise fields.refuse(f"{COUNT} is {modules}, not a number from 0 to {MOST_MODULES}; correct it")
    return modules


def belongs_to_module(name: str, layers: int, modules: int) -> bool:
    """Whether a tensor of a target of `layers` layers belongs to one of its MTP modules."""
    match = LAYER.match(name)
    return match is not None and layers <= int(match[1]) < layers + modules


def read(
    fields: Fields, tensors: HeadTensors, target: TargetSizes, target_tensors: dict[str, StoredTensor]
) -> tuple[dict[str, Any], dict[str, Array]]:
    """The fields of `Mtp` and the weights of the modules, in the convention of transformers.

    Each output is fed back after its norm, and no embedding is zeroed.

    Args:
        fields: The target's config.json.
        tensors: The tensors of the modules.
        target: The target.
        target_tensors: The target's own tensors.

    Raises:
        UnreadableCheckpoint: with one line that says what is wrong.
    """
    layer, hidden, state = head_layer(fields, target, Mtp.WORD), target.hidden_size, dict[str, Array]()
    modules = count(fields)
    for module in range(modules):
        prefix = module_prefix(target.layers, module)
        state |= tensors.linear(f"{prefix}.eh_proj", hidden, 2 * hidden, False, "no bias of eh_proj")
        for name in NORMS:
            state[f"{prefix}.{name}.weight"] = tensors.take(f"{prefix}.{name}.weight", (hidden,))
        state |= layer_weights(tensors, prefix, layer, hidden, hidden, fields)
        is_tied = "lm_head.weight" not in target_tensors
        for name, target_name in (
            ("embed_tokens", "model.embed_tokens.weight"),
            ("shared_head.head", "model.embed_tokens.weight" if is_tied else "lm_head.weight"),
        ):
            _check_shared(tensors, f"{prefix}.{name}.weight", target_name, target_tensors, target)
    words = {"reads": HiddenStates(place="normed", shift=1), "layer": layer, "count": modules, "normed_back": True}
    return words, state


def _check_shared(
    tensors: HeadTensors, name: str, target_name: str, target_tensors: dict[str, StoredTensor], target: TargetSizes
) -> None:
    """Refuse a matrix of a module that differs from the target's, which is used in its place."""
    if name not in tensors:
        return
    matrix = tensors.take(name, (target.vocab_size, target.hidden_size))
    if target_name not in target_tensors or not np.array_equal(matrix, target_tensors[target_name].values(target_name)):
        raise UnreadableCheckpoint(
            f"{tensors.root}: tensor {name} differs from {target_name}: modules with an embedding or a head of their "
            "own are not computed"
        )
