"""Hugging Face checkpoint directories: config.json and safetensors read into float64, and known by their digest.

The safetensors format is read here by hand (8 bytes little-endian header size, JSON header, raw data;
https://huggingface.co/docs/safetensors): NumPy has no bfloat16, and a damaged file should say what is wrong with it.
Pickle is never opened.
"""

import hashlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reference.architecture import Architecture, Checkpoint
from reference.configuration import UnreadableCheckpoint, configured, read_json, sizes
from reference.trace import Array
from reference.weights import shapes

__all__ = ["UnreadableCheckpoint", "identify", "read"]

WIDTH = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
"""Bytes of one number in each dtype that weights may have."""

LARGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library itself."""

IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Buffers that old checkpoints store and every reader computes anew."""

EXPERTS = re.compile(r"\.experts\.")
"""Names of weights of which each row uses some: the layers of a mixture of experts."""

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class _Stored:
    """Where a tensor lies: file, dtype, shape, first byte."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int

    def values(self, name: str) -> Array:
        """The tensor called `name`, widened to float64."""
        count = math.prod(self.shape)
        kind = {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "F64": "<f8"}[self.dtype]
        raw = np.fromfile(self.file, dtype=kind, count=count, offset=self.begin)
        if len(raw) != count:
            raise _damaged(self.file, "it ends within a tensor")
        if self.dtype == "BF16":
            # bfloat16 is the upper half of a float32.
            raw = (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
        if not np.isfinite(raw).all():
            raise UnreadableCheckpoint(
                f"{self.file}: tensor {name} holds NaN or infinity, so no output is defined; download the file again"
            )
        return raw.astype(np.float64).reshape(self.shape)


def read(directory: str | Path) -> tuple[Architecture, dict[str, Array]]:
    """The architecture and the state dict, float64, of the checkpoint in `directory`.

    The dict holds exactly the names of `weights.shapes`; a tied head is not among them.

    Raises:
        UnreadableCheckpoint: with one line, whatever is wrong.
    """
    architecture, stored, _ = _opened(Path(directory))
    return architecture, {name: stored[name].values(name) for name in shapes(architecture)}


def identify(directory: str | Path, understood: bool = True) -> Checkpoint:
    """The checkpoint in `directory` as cases name it.

    The digest runs over config.json and the safetensors files that `read` reads, in the order of their names, each
    with its name and size before it.

    Args:
        directory: Where it lies.
        understood: Whether this oracle will run it; False looks at sizes only, for a run against another backend.

    Raises:
        UnreadableCheckpoint: with one line, whatever is wrong.
    """
    root = Path(directory)
    if understood:
        architecture, stored, files = _opened(root)
        vocab_size, max_positions = architecture.vocab_size, architecture.max_positions
    else:
        vocab_size, max_positions = sizes(root / "config.json")
        stored, files = _weights(root)
    digest = hashlib.sha256()
    for file in sorted([root / "config.json", *files], key=lambda each: each.name):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    mixes_rows = any(EXPERTS.search(name) for name in stored)
    return Checkpoint(str(root), f"sha256:{digest.hexdigest()}", vocab_size, max_positions, mixes_rows)


def _opened(root: Path) -> tuple[Architecture, dict[str, _Stored], list[Path]]:
    """Architecture, tensors and weight files, with every header checked and no weight read yet."""
    if not root.is_dir():
        what = "not a directory" if root.exists() else "no such directory"
        raise UnreadableCheckpoint(f"{root}: {what}; give the path of a Hugging Face checkpoint directory")
    architecture = configured(root / "config.json")
    stored, files = _weights(root)
    expected = shapes(architecture)
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
        expected["lm_head.weight"] = ()
    for name, tensor in stored.items():
        if name not in expected and not IGNORED.fullmatch(name):
            raise UnreadableCheckpoint(
                f"{tensor.file}: tensor {name} has no place in the architecture config.json describes; "
                "compare with plain transformers instead: --against transformers"
            )
    return architecture, stored, files


def _check_tied(stored: dict[str, _Stored]) -> None:
    """A head stored although tied must equal the embedding: transformers 4 would tie them, 5 would not."""
    head, embedding = stored["lm_head.weight"], stored["model.embed_tokens.weight"]
    if head.shape != embedding.shape or not np.array_equal(
        head.values("lm_head.weight"), embedding.values("model.embed_tokens.weight")
    ):
        raise UnreadableCheckpoint(
            f"{head.file}: tensor lm_head.weight differs from the embedding although tie_word_embeddings is true; "
            "set it to false or remove the tensor"
        )


def _weights(root: Path) -> tuple[dict[str, _Stored], list[Path]]:
    """Every stored tensor, and the files they came from; one file wins over an index, as in transformers."""
    single, index = root / "model.safetensors", root / "model.safetensors.index.json"
    if single.is_file():
        return _header(single), [single]
    if not index.is_file():
        pickled = sorted(path.name for path in root.iterdir() if path.suffix in PICKLED)
        if pickled:
            raise UnreadableCheckpoint(
                f"{root}: weights only as pickle ({pickled[0]}); pickle is never loaded; convert to safetensors"
            )
        raise UnreadableCheckpoint(f"{root}: model.safetensors is missing; download the weights as safetensors")
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(shard, str) for shard in placed.values()):
        raise UnreadableCheckpoint(f"{index}: weight_map is missing or damaged; download the file again")
    headers: dict[str, dict[str, _Stored]] = {}
    for shard in sorted(set(placed.values())):
        if Path(shard).name != shard:
            raise UnreadableCheckpoint(f"{index}: shard {shard!r} lies outside the directory; correct weight_map")
        if not (root / shard).is_file():
            raise UnreadableCheckpoint(f"{root}: shard {shard} is missing; download it (the index names it)")
        headers[shard] = _header(root / shard)
    for name, shard in placed.items():
        if name not in headers[shard]:
            raise UnreadableCheckpoint(
                f"{root / shard}: tensor {name} is missing, though the index places it there; download both again"
            )
    return {name: headers[shard][name] for name, shard in placed.items()}, [root / shard for shard in headers]


def _header(file: Path) -> dict[str, _Stored]:
    """The tensors of one safetensors file, after checking that its data lies where and as long as it says."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, LARGEST_HEADER):
                raise _damaged(file, "it ends within its header")
            content = json.loads(stream.read(length))
    except OSError as error:
        raise UnreadableCheckpoint(f"{file}: cannot be read ({error.strerror}); check its permissions") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise _damaged(file, "its header is not JSON") from None
    if not isinstance(content, dict):
        raise _damaged(file, "its header is not a JSON object")
    content.pop("__metadata__", None)
    stored: dict[str, _Stored] = {}
    spans: list[tuple[int, int]] = []
    for name, entry in content.items():
        dtype, shape, begin, end = _entry(file, name, entry)
        stored[name] = _Stored(file, dtype, shape, 8 + length + begin)
        spans.append((begin, end))
    # The data must be tiled without holes: the format demands it, and a file cut short shows here.
    at = 0
    for begin, end in sorted(spans):
        if begin != at:
            raise _damaged(file, "its tensors overlap or leave holes")
        at = end
    if at != size - 8 - length:
        raise _damaged(file, f"its header promises {at} bytes of weights, it holds {size - 8 - length}")
    return stored


def _entry(file: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """One header entry, checked: dtype, shape, begin and end of its bytes."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        sizes = (*shape, begin, end)
    except (TypeError, KeyError, ValueError):
        raise _damaged(file, f"its header entry for {name} is broken") from None
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in sizes):
        raise _damaged(file, f"its header entry for {name} is broken")
    if dtype not in WIDTH:
        raise UnreadableCheckpoint(
            f"{file}: tensor {name} has dtype {dtype}, not {', '.join(WIDTH)}; save the checkpoint unquantized"
        )
    if end - begin != math.prod(shape) * WIDTH[dtype]:
        raise _damaged(file, f"tensor {name} has {end - begin} bytes for shape {list(shape)} of {dtype}")
    return dtype, shape, begin, end


def _damaged(file: Path, how: str) -> UnreadableCheckpoint:
    return UnreadableCheckpoint(f"{file}: truncated or corrupt ({how}); download the file again")
