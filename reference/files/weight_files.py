"""The safetensors files of a directory: their tensors, and a digest.

One file, or the shards that an index names. Pickle is never opened.
"""

import hashlib
import os
from collections.abc import Collection, Iterable
from pathlib import Path

from specverify.reference.files.fields import LARGEST_INDEX, UnreadableCheckpoint, quote_value, read_json, unreadable
from specverify.reference.files.regular import open_regular
from specverify.reference.files.stored import FLOATS, MOST_TENSORS, StoredTensor, cut, read_header

MOST_SHARDS = 10_000
"""Most weight files that an index may name; the largest published checkpoints have some hundreds."""

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Endings of files that are written by pickle."""


def digest(files: Iterable[Path]) -> str:
    """`sha256:` over `files` in the order of their names, each with its name and size before it.

    Raises:
        UnreadableCheckpoint: a file cannot be read.
    """
    sha256 = hashlib.sha256()
    for file in sorted(files, key=lambda path: path.name):
        _feed(sha256, file)
    return f"sha256:{sha256.hexdigest()}"


def _feed(sha256: "hashlib._Hash", file: Path) -> None:
    """Feed `file` to the digest: its name, a zero byte, its size in decimal, a zero byte, its content."""
    try:
        with open_regular(file) as stream:
            # Name and size come first, so that no two different sets of files feed the same bytes.
            sha256.update(f"{file.name}\0{os.fstat(stream.fileno()).st_size}\0".encode())
            while block := stream.read(1 << 20):
                sha256.update(block)
    except OSError as error:
        raise unreadable(file, error) from None


def weight_files(
    root: Path, dtypes: Collection[str] = FLOATS, names: tuple[str, ...] = ("model.safetensors",), todo: str = ""
) -> tuple[dict[str, StoredTensor], list[Path]]:
    """Every stored tensor of the directory `root`, and the files they came from.

    Args:
        root: The directory.
        dtypes: The dtypes that a tensor may have.
        names: Names of a single weight file; one of them wins over an index, as in transformers.
        todo: How to convert pickled weights, where more can be said than that they must be converted.

    Raises:
        UnreadableCheckpoint: no safetensors file, or one that is damaged or holds another dtype.
    """
    for single in (root / name for name in names):
        if single.exists():
            return read_header(single, dtypes), [single]
    index = root / "model.safetensors.index.json"
    if not index.exists():
        pickled_names = sorted(name for name in os.listdir(root) if name.endswith(PICKLED))
        if pickled_names:
            raise UnreadableCheckpoint(
                f"{root}: weights only as pickle ({cut(pickled_names[0])}); pickle is never loaded; "
                f"convert to safetensors{todo}"
            )
        raise UnreadableCheckpoint(f"{root}: model.safetensors is missing; download the weights as safetensors")
    shard_of = read_json(index, LARGEST_INDEX).get("weight_map")
    if not isinstance(shard_of, dict) or not all(isinstance(shard, str) for shard in shard_of.values()):
        raise UnreadableCheckpoint(f"{index}: weight_map is missing or damaged; download the file again")
    shards = sorted(set(shard_of.values()))
    if len(shards) > MOST_SHARDS or len(shard_of) > MOST_TENSORS:
        raise UnreadableCheckpoint(
            f"{index}: {len(shard_of)} tensors in {len(shards)} files; at most {MOST_TENSORS} in {MOST_SHARDS} are "
            "read; save the checkpoint in larger shards"
        )
    headers: dict[str, dict[str, StoredTensor]] = {}
    for shard in shards:
        # The index may come from a stranger: a name such as `../x` must not leave the directory.
        if Path(shard).name != shard:
            raise UnreadableCheckpoint(
                f"{index}: shard {quote_value(shard)} lies outside the directory; correct weight_map"
            )
        if not os.path.exists(root / shard):
            raise UnreadableCheckpoint(f"{root}: shard {cut(shard)} is missing; download it (the index names it)")
        headers[shard] = read_header(root / shard, dtypes)
    for name, shard in shard_of.items():
        if name not in headers[shard]:
            raise UnreadableCheckpoint(
                f"{root / shard}: tensor {cut(name)} is missing, though the index places it there; download both again"
            )
    return {name: headers[shard][name] for name, shard in shard_of.items()}, [root / shard for shard in headers]
