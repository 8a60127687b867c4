"""MTP modules inside a target's own checkpoint.

Module k lies under `model.layers.{N + k}`, N being the number of the target's layers (DeepSeek, GLM), or the one module
under `mtp.` (Qwen3-Next, Qwen3.5). Each may repeat the target's embedding and head, or have its own. Of the types in
TARGET_LAYERS the decoder layer is one of the target's family, whose tensors a case's architecture checks.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.mtp import EMBEDDING, HEAD, NORMS, OUTER_NORMS, Mtp, module_prefix
from specverify.reference.draft_files.layer_fields import head_layer, layer_weights
from specverify.reference.draft_files.target_sizes import TargetSizes
from specverify.reference.draft_files.tensors import HeadTensors
from specverify.reference.files.block_scales import FACTORS, NUMBERS, block_size
from specverify.reference.files.fields import Fields, UnreadableCheckpoint
from specverify.reference.files.stored import StoredTensor, cut
from specverify.reference.files.text_model import text_content, text_tensor
from specverify.reference.trace import Array

COUNT = "num_nextn_predict_layers"

LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")
"""The beginning of the name of a layer's tensor."""

MOST_MODULES = 16
"""Most modules: the bound of a case file."""


BESIDE = "mtp."
"""The beginning of the names of a module that lies beside the target's layers."""

BESIDE_COUNT = "mtp_num_hidden_layers"
"""The number of decoder layers of such modules in config.json."""

TARGET_LAYERS = ("deepseek_v3", "kimi_k2", "glm4_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""The values of `model_type` of targets whose modules have layers of the target's family."""

PLACES = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
    "embed_tokens": "embed_tokens",
    "lm_head": "shared_head.head",
}
"""The names of a module's parts under `mtp.`, each with DeepSeek's."""


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


def is_beside(names: Iterable[str]) -> bool:
    """Whether one of the tensors is of a module under `mtp.`."""
    return any(name.startswith(BESIDE) for name in names)


def text_fields(fields: Fields) -> Fields:
    """The fields of the text model that `fields`, of a config.json, describe."""
    return Fields(fields.where, text_content(fields.where, fields.content), {})


def modules_in(
    fields: Fields, stored: dict[str, StoredTensor], target: TargetSizes
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """The tensors of the modules, under DeepSeek's names, and those of the target.

    Raises:
        UnreadableCheckpoint: config.json says nothing of the modules behind the last layer, or tells of several layers
            under `mtp.`.
    """
    if not is_beside(stored):
        if not count(fields):
            raise fields.refuse(f"tensors of MTP modules are stored, and {COUNT} is missing; add it")
        modules = {
            name: tensor for name, tensor in stored.items() if belongs_to_module(name, target.layers, count(fields))
        }
        others = {name: tensor for name, tensor in stored.items() if name not in modules}
        return with_factors(fields, modules), others
    layers = fields.integer(BESIDE_COUNT, 1)
    if layers != 1:
        raise fields.refuse(f"{BESIDE_COUNT} is {layers}: modules of one layer are read, since fc and norm are shared")
    modules, others = dict[str, StoredTensor](), dict[str, StoredTensor]()
    for name, tensor in stored.items():
        if name.startswith(BESIDE):
            modules[_place_beside(name.removeprefix(BESIDE), target.layers)] = tensor
        elif (text_name := text_tensor(name) or name) not in others:
            others[text_name] = tensor
    return with_factors(fields, modules), others


def is_block_scaled(fields: Fields) -> bool:
    """Whether config.json is that of a target with modules of its layers, whose matrices are 8-bit floats in blocks.

    Raises:
        UnreadableCheckpoint: the weights of such a target are quantised in another way.
    """
    fields = text_fields(fields)
    return fields.get("model_type") in TARGET_LAYERS and block_size(fields.where, fields.content) is not None


@dataclass(frozen=True)
class ScaledTensor(StoredTensor):
    """A matrix of 8-bit floats times the factor of each block.

    Attributes:
        numbers: The matrix as it is stored.
        factors: The factors, [blocks of rows, blocks of columns].
        block: The rows and columns of a block.
    """

    numbers: StoredTensor
    factors: StoredTensor
    block: tuple[int, int]

    def values(self, name: str) -> Array:
        """See `StoredTensor`."""
        rows, columns = (np.arange(count) // size for count, size in zip(self.shape, self.block, strict=True))
        factors = self.factors.values(name + FACTORS)
        weights: Array = self.numbers.values(name) * factors[rows[:, None], columns]
        return weights


def with_factors(fields: Fields, modules: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of modules, each matrix of 8-bit floats with its factors.

    Raises:
        UnreadableCheckpoint: factors are missing, or of another shape.
    """
    block = block_size(fields.where, fields.content)
    scaled = dict[str, StoredTensor]()
    for name, tensor in modules.items():
        if tensor.dtype != NUMBERS or block is None:
            if not name.endswith(FACTORS) or modules[name.removesuffix(FACTORS)].dtype != NUMBERS:
                scaled[name] = tensor
            continue
        factors = modules.get(name + FACTORS)
        expected_shape = tuple(-(-count // size) for count, size in zip(tensor.shape, block, strict=False))
        if factors is None or len(tensor.shape) != 2 or factors.shape != expected_shape:
            raise UnreadableCheckpoint(
                f"{tensor.file}: tensor {cut(name)} of 8-bit floats has no {cut(name)}{FACTORS} of shape "
                f"{list(expected_shape)}, which weight_block_size {list(block)} asks for"
            )
        scaled[name] = ScaledTensor(tensor.file, "F32", tensor.shape, tensor.begin, tensor, factors, block)
    return scaled


def _place_beside(name: str, layers: int) -> str:
    """DeepSeek's name of a tensor `mtp.<name>` beside a target of `layers` layers."""
    prefix = module_prefix(layers, 0)
    if name.startswith("layers.0."):
        return f"{prefix}.{name.removeprefix('layers.0.')}"
    part, _, end = name.rpartition(".")
    return f"{prefix}.{PLACES.get(part, part)}.{end}"


def read_target_layers(
    fields: Fields, tensors: HeadTensors, target: TargetSizes, target_tensors: dict[str, StoredTensor]
) -> tuple[dict[str, Any], dict[str, Array]]:
    """The fields of `Mtp` and the weights of modules with layers of the target's family; see `read`.

    The shapes of the layers' tensors follow from the target's architecture, and are not checked here.
    """
    hidden, state = target.hidden_size, dict[str, Array]()
    modules = count(fields) or 1
    for module in range(modules):
        prefix = module_prefix(target.layers, module)
        state |= tensors.linear(f"{prefix}.eh_proj", hidden, 2 * hidden, False, "no bias of eh_proj")
        for name in OUTER_NORMS:
            state[f"{prefix}.{name}.weight"] = tensors.take(f"{prefix}.{name}.weight", (hidden,))
        matrices = tuple(f"{prefix}.{name}.weight" for name in (EMBEDDING, HEAD))
        for name in tensors.names:
            if name.startswith(f"{prefix}.") and name not in matrices and not IGNORED.search(name):
                state |= _by_expert(name, tensors.take_any(name))
    own, matrices_of_modules = _own_matrices(tensors, target, target_tensors, modules)
    words = {"reads": HiddenStates(place="normed", shift=1), "layer": None, "count": modules, "normed_back": True}
    return words | own, state | matrices_of_modules


IGNORED = re.compile(r"\.rotary_emb\.inv_freq$")
"""Buffers that old checkpoints store and that every reader computes anew."""

STACK = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj")
"""The name of a tensor with the matrices of all experts of a layer, outputs first, gates before ups."""


def _by_expert(name: str, values: Array) -> dict[str, Array]:
    """A stored tensor under the names of single experts, where it holds those of all experts of a layer."""
    stack = STACK.fullmatch(name)
    if stack is None or values.ndim != 3:
        return {name: values}
    parts = {"down": values} if stack[2] == "down" else dict(zip(("gate", "up"), np.split(values, 2, 1), strict=True))
    return {
        f"{stack[1]}.{expert}.{part}_proj.weight": np.ascontiguousarray(matrix)
        for part, matrices in parts.items()
        for expert, matrix in enumerate(matrices)
    }


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
    own, matrices = _own_matrices(tensors, target, target_tensors, modules)
    words = {"reads": HiddenStates(place="normed", shift=1), "layer": layer, "count": modules, "normed_back": True}
    return words | own, state | matrices


def _own_matrices(
    tensors: HeadTensors, target: TargetSizes, target_tensors: dict[str, StoredTensor], modules: int
) -> tuple[dict[str, bool], dict[str, Array]]:
    """The fields `own_embedding` and `own_head` of `Mtp`, and the matrices that they ask for.

    A stored matrix that equals the target's is the target's, as every DeepSeek checkpoint repeats it. Where one module
    has a matrix of its own, a module without one takes the target's as its own.

    Raises:
        UnreadableCheckpoint: a matrix has another shape, or neither a module nor the target has it.
    """
    is_tied = "lm_head.weight" not in target_tensors
    shape, state, flags = (target.vocab_size, target.hidden_size), dict[str, Array](), dict[str, bool]()
    for field_name, part, target_name in (
        ("own_embedding", EMBEDDING, "model.embed_tokens.weight"),
        ("own_head", HEAD, "model.embed_tokens.weight" if is_tied else "lm_head.weight"),
    ):
        stored = target_tensors.get(target_name)
        shared = None if stored is None else stored.values(target_name)
        names = [f"{module_prefix(target.layers, module)}.{part}.weight" for module in range(modules)]
        matrices = {name: tensors.take(name, shape) for name in names if name in tensors}
        flags[field_name] = any(shared is None or not np.array_equal(own, shared) for own in matrices.values())
        if not flags[field_name]:
            continue
        for name in names:
            matrix = matrices.get(name, shared)
            if matrix is None:
                raise UnreadableCheckpoint(f"{tensors.root}: tensor {name} is missing, and {target_name} beside it too")
            state[name] = matrix
    return flags, state
