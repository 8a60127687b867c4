"""Hugging Face checkpoint directories, read into float64 and known by a digest.

config.json and the safetensors files are read. Pickle is never opened, nor is any file that is not a regular file.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np

from specverify.reference.architecture import Architecture, Checkpoint
from specverify.reference.draft_files import mtp
from specverify.reference.files.block_scales import FACTORS, NUMBERS, block_size
from specverify.reference.files.fields import Fields, UnreadableCheckpoint, read_json, unreadable
from specverify.reference.files.mxfp4 import BYTES, is_mxfp4
from specverify.reference.files.regular import irregular
from specverify.reference.files.stored import EIGHT_BITS, FLOATS, StoredTensor, cut
from specverify.reference.files.text_model import is_composite, text_content, text_tensor
from specverify.reference.files.weight_files import digest, weight_files
from specverify.reference.oracle.configuration import read_architecture, read_sizes
from specverify.reference.oracle.family import FAMILIES
from specverify.reference.oracle.family.base import Place, as_stored
from specverify.reference.oracle.packed_weights import PackedStack, unpack_stacks
from specverify.reference.trace import Array
from specverify.reference.weights import shapes

__all__ = ["UnreadableCheckpoint", "identify", "read_checkpoint"]

Stored: TypeAlias = StoredTensor | PackedStack
"""A stored tensor, in one piece or in numbers and scales."""

IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Buffers that old checkpoints store and that every reader computes anew."""

EXPERTS = re.compile(r"\.experts\.")
"""Names of the weights of a mixture of experts; each row uses some of the experts only."""

INDEXER = re.compile(r"\.indexer\.")
"""Names of the weights of an indexer, which chooses the columns that each row attends to."""

LARGEST_BESIDE = 2**29
"""Largest size in bytes of any other file from which a tokenizer or a configuration is read."""

READ_BESIDE = (".json", ".jinja", ".model", ".txt")
"""Endings of the files, beside the weights, that transformers may read from a checkpoint."""

ADAPTER = "adapter_config.json"
"""The file with which peft adds an adapter to a base model; the file says where the base model lies."""


def read_checkpoint(directory: str | Path) -> tuple[Architecture, dict[str, Array]]:
    """The architecture and the state dict, float64, of the checkpoint in `directory`.

    The dict holds exactly the names of `weights.shapes`; a tied head is not among them.

    Raises:
        UnreadableCheckpoint: with one line that says what is wrong.
    """
    architecture, stored_weights = open_weights(directory)
    return architecture, read_weights(directory, stored_weights)


def read_weights(directory: str | Path, stored_weights: "StoredWeights") -> dict[str, Array]:
    """All weights of the checkpoint in `directory`, float64.

    Raises:
        UnreadableCheckpoint: with one line that says what is wrong.
    """
    try:
        return dict(stored_weights)
    except MemoryError:
        raise UnreadableCheckpoint(f"{directory}: its weights in float64 exceed the memory of this machine") from None


def open_weights(directory: str | Path) -> tuple[Architecture, "StoredWeights"]:
    """The architecture of the checkpoint in `directory`, and its state dict, of which no weight is read yet.

    Raises:
        UnreadableCheckpoint: with one line that says what is wrong.
    """
    architecture, stored, files = _open(Path(directory))
    return architecture, StoredWeights(architecture, stored, files, _block_size(Path(directory)))


class StoredWeights(Mapping[str, Array]):
    """The state dict of a checkpoint, float64, in which a weight is read from its file when it is asked for.

    It holds exactly the names of `weights.shapes`; a tied head is not among them.

    Attributes:
        files: The weight files.
        shapes: The shape of each weight.
    """

    def __init__(
        self,
        architecture: Architecture,
        stored: dict[str, Stored],
        files: list[Path],
        block: tuple[int, int] | None,
    ) -> None:
        self.files = tuple(files)
        self.shapes = shapes(architecture)
        self._stored = stored
        self._places = places(architecture, stored)
        self._block = block
        self._read_values: dict[str, Array] = {}  # a stored tensor that holds several weights is read once

    def __getitem__(self, name: str) -> Array:
        place = self._places[name]
        if place.name not in self._read_values:
            self._read_values.clear()
            values = _values(self._stored, place.name, self._block)
            if sum(other.name == place.name for other in self._places.values()) == 1:
                return place.take(values)
            self._read_values[place.name] = values
        return place.take(self._read_values[place.name])

    def stored_dtype(self, name: str) -> str:
        """The stored dtype of the tensor in which the weight called `name` lies."""
        return self._stored[self._places[name].name].dtype

    def whole_tensor(self, name: str) -> StoredTensor | None:
        """The stored tensor of floats that is the weight called `name`; None where a weight is computed from others."""
        place = self._places[name]
        stored = self._stored[place.name]
        if place.take is not as_stored or not isinstance(stored, StoredTensor) or stored.dtype not in FLOATS:
            return None
        return stored

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def places(architecture: Architecture, stored: Mapping[str, Stored]) -> dict[str, Place]:
    """The place of every tensor of `weights.shapes` in a checkpoint that holds `stored`."""
    family = FAMILIES[architecture.family]
    table: dict[str, Place] = {}
    for name, shape in shapes(architecture).items():
        place = family.place(architecture, name, shape)
        stack = None if family.stacked is None else family.stacked(architecture, name, shape)
        # A tensor that is stored in no form is missed by its name in `place`.
        is_stacked = stack is not None and place.name not in stored and stack.name in stored
        table[name] = stack if stack is not None and is_stacked else place
    return table


def _block_size(root: Path) -> tuple[int, int] | None:
    return block_size(root / "config.json", text_content(root / "config.json", read_json(root / "config.json")))


def _values(stored: dict[str, Stored], name: str, block: tuple[int, int] | None) -> Array:
    """The values of a stored tensor, float64; those of 8-bit floats multiplied by their factors."""
    values = stored[name].values(name)
    if block is None or stored[name].dtype != NUMBERS:
        return values
    return apply_scales(values, stored[f"{name}{FACTORS}"].values(f"{name}{FACTORS}"), block)


def identify(directory: str | Path, understood: bool = True) -> Checkpoint:
    """The checkpoint in `directory` as cases name it.

    The digest runs over config.json and the safetensors files that `read_checkpoint` reads, in the order of their
    names, each with its name and size before it.

    Args:
        directory: The checkpoint's folder.
        understood: Whether this oracle will run the checkpoint; False reads the sizes alone, for a run against another
            backend.

    Raises:
        UnreadableCheckpoint: with one line that says what is wrong.
    """
    root = Path(directory)
    if understood:
        architecture, stored, files = _open(root)
        vocab_size, max_positions = architecture.vocab_size, architecture.max_positions
    else:
        _check_folder(root)
        vocab_size, max_positions = read_sizes(root / "config.json")
        stored, files = _weights(root)
    mixes_rows, indexed = (any(part.search(name) for name in stored) for part in (EXPERTS, INDEXER))
    checkpoint_digest = digest([root / "config.json", *files])
    return Checkpoint(str(root), checkpoint_digest, vocab_size, max_positions, mixes_rows, indexed)


def _weights(root: Path) -> tuple[dict[str, Stored], list[Path]]:
    """The stored tensors and their files; 8-bit floats are among them where config.json says how they are scaled.

    Of a model of several modalities they are the text model's, by their names in a checkpoint of it alone.

    Raises:
        UnreadableCheckpoint: as `weight_files`, or factors of 8-bit floats are missing or have another shape.
    """
    content = text_content(root / "config.json", read_json(root / "config.json"))
    block, is_packed = _block_size(root), is_mxfp4(content)
    further_dtypes = {**(EIGHT_BITS if block else {}), **({BYTES: 1} if is_packed else {})}
    read_tensors, files = weight_files(root, {**FLOATS, **further_dtypes})
    stored = unpack_stacks(read_tensors) if is_packed else dict[str, Stored](read_tensors)
    if is_composite(read_json(root / "config.json")):
        named_tensors = ((text_tensor(name), tensor) for name, tensor in stored.items())
        stored = {name: tensor for name, tensor in named_tensors if name is not None}
    if block is not None:
        _check_factors(stored, block)
    return stored, files


def _check_factors(stored: dict[str, Stored], block: tuple[int, int]) -> None:
    complaint = f"quantization_config.weight_block_size {list(block)} asks for"
    for name, tensor in stored.items():
        if tensor.dtype != NUMBERS:
            continue
        factors = stored.get(f"{name}{FACTORS}")
        if len(tensor.shape) != 2:
            raise UnreadableCheckpoint(
                f"{tensor.file}: tensor {cut(name)} of 8-bit floats has shape {list(tensor.shape)}; "
                f"{complaint} a matrix"
            )
        if factors is None:
            raise UnreadableCheckpoint(
                f"{tensor.file}: tensor {cut(name)}{FACTORS} is missing; {complaint} it beside 8-bit floats"
            )
        expected_shape = factors_shape(tensor.shape, block)
        if factors.shape != expected_shape or factors.dtype not in FLOATS:
            raise UnreadableCheckpoint(
                f"{factors.file}: tensor {cut(name)}{FACTORS} has shape {list(factors.shape)} of {factors.dtype}; "
                f"{complaint} {list(expected_shape)} of {', '.join(FLOATS)}"
            )


def _open(root: Path) -> tuple[Architecture, dict[str, Stored], list[Path]]:
    """Architecture, tensors and weight files; every header is checked, and no weight is read yet."""
    _check_folder(root)
    architecture = read_architecture(root / "config.json")
    stored, files = _weights(root)
    expected = {place.name: place.shape for place in places(architecture, stored).values()}
    for name, shape in expected.items():
        if name not in stored:
            raise UnreadableCheckpoint(
                f"{root}: tensor {name} is missing; config.json and weights do not belong together"
            )
        if stored[name].shape != shape:
            raise UnreadableCheckpoint(
                f"{stored[name].file}: tensor {name} has shape {list(stored[name].shape)}, config.json asks for "
                f"{list(shape)}; config.json and weights do not belong together"
            )
    if architecture.tied and "lm_head.weight" in stored:
        _check_tied(stored)
        # The tied head may be stored; the empty shape only marks the name as known.
        expected["lm_head.weight"] = ()
    config = root / "config.json"
    modules = mtp.count(Fields(config, text_content(config, read_json(config)), {}))
    expected |= {f"{name}{FACTORS}": () for name in stored if stored[name].dtype == NUMBERS}
    for name, tensor in stored.items():
        # MTP modules behind the last layer are a draft's; a run without them leaves them alone.
        is_known = (
            name in expected
            or IGNORED.fullmatch(name)
            or mtp.belongs_to_module(name, architecture.layers, modules)
            or name.startswith(FAMILIES[architecture.family].module_prefixes)
            or FAMILIES[architecture.family].idle(architecture, name)
        )
        if not is_known:
            raise UnreadableCheckpoint(
                f"{tensor.file}: tensor {cut(name)} has no place in the architecture config.json describes; "
                "compare with plain transformers instead: --against transformers"
            )
    return architecture, stored, files


def _check_folder(root: Path) -> None:
    """Refuse a folder in which transformers would read an irregular file, a very large one or an adapter."""
    if not os.path.isdir(root):
        problem = "not a directory" if os.path.lexists(root) else "no such directory"
        raise UnreadableCheckpoint(f"{root}: {problem}; give the path of a Hugging Face checkpoint directory")
    try:
        entries = [*os.scandir(root)]
        templates = root / "additional_chat_templates"
        entries += os.scandir(templates) if templates.is_dir() else ()
        for entry in entries:
            if not os.path.exists(entry.path):  # a link to nowhere
                continue
            status = entry.stat()
            kind = irregular(status.st_mode)
            if kind is not None:
                raise UnreadableCheckpoint(f"{entry.path}: it is {kind}, not a regular file; remove it")
            if status.st_size > LARGEST_BESIDE and entry.name.endswith(READ_BESIDE):
                raise UnreadableCheckpoint(f"{entry.path}: larger than {LARGEST_BESIDE // 2**20} MiB; remove it")
            if entry.name == ADAPTER:
                raise UnreadableCheckpoint(
                    f"{entry.path}: asks for an adapter and for the weights of another model; merge it into the "
                    "weights, or remove the file"
                )
    except OSError as error:
        raise unreadable(root, error) from None


def _check_tied(stored: dict[str, Stored]) -> None:
    """Refuse a stored head that is declared tied and differs from the embedding.

    transformers 4 would tie the two, transformers 5 would not.
    """
    head, embedding = stored["lm_head.weight"], stored["model.embed_tokens.weight"]
    if head.shape != embedding.shape or not np.array_equal(
        head.values("lm_head.weight"), embedding.values("model.embed_tokens.weight")
    ):
        raise UnreadableCheckpoint(
            f"{head.file}: tensor lm_head.weight differs from the embedding although tie_word_embeddings is true; "
            "set it to false or remove the tensor"
        )


def apply_scales(numbers: Array, factors: Array, block: tuple[int, int]) -> Array:
    """The weights of a matrix [out, in] with a factor for each block: exact in float64 where factors are float32."""
    rows, columns = (np.arange(count) // size for count, size in zip(numbers.shape, block, strict=True))
    weights: Array = numbers * factors[rows[:, None], columns]
    return weights


def factors_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """The shape of the factors of a matrix of this shape."""
    return tuple(-(-count // size) for count, size in zip(shape, block, strict=True))
