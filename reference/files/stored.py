"""The tensors of one safetensors file, checked and widened to float64.

The header is checked against the data. The format is read here by hand (8 bytes little-endian header size, JSON header,
raw data; https://huggingface.co/docs/safetensors): NumPy has no bfloat16, and the message about a damaged file should
say what is wrong with it.
"""

import json
import math
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specverify.reference.files.fields import MOST_LETTERS, UnreadableCheckpoint, quote_value, unreadable
from specverify.reference.files.regular import open_regular

FLOATS = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
"""Bytes of one number, for each dtype that weights may have."""

INTEGERS = {"BOOL": 1, "U8": 1, "I32": 4, "I64": 8}
"""Bytes of one number, for each dtype that maps of a vocabulary may have."""

EIGHT_BITS = {"F8_E4M3": 1}
"""Bytes of one number, for each dtype of 8-bit floats that quantised weights may have."""

LARGEST_HEADER = 100_000_000
"""Largest header in bytes; the limit of the safetensors library itself."""

MOST_TENSORS = 1_000_000
"""Most tensors of one file; the largest published checkpoints have some 100,000 in all their files."""

MOST_AXES = 8
"""Most axes of a tensor; weights have one or two, weights of experts three."""


BLOCK = 2**18
"""Numbers that are widened at a time, so that what lies between stored and wide numbers takes little memory."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: file, dtype, shape, offset of its first byte in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int

    def values(self, name: str) -> NDArray[Any]:
        """The tensor called `name`, widened to float64; whole numbers and truth values to int64."""
        count = math.prod(self.shape)
        # NumPy has no bfloat16: its bits are read as integers.
        kind = {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "F64": "<f8", "I32": "<i4", "I64": "<i8"}.get(
            self.dtype, "u1"
        )
        if self.dtype in INTEGERS:
            return next(self._blocks(kind, max(1, count))).astype(np.int64).reshape(self.shape)
        widened = np.empty(count)
        for number, raw in enumerate(self._blocks(kind, BLOCK)):
            block = widened[number * BLOCK : number * BLOCK + len(raw)]
            block[:] = self._numbers_of(raw)
            if not np.isfinite(block).all():
                raise not_finite(self.file, name)
        return widened.reshape(self.shape)

    def _blocks(self, kind: str, size: int) -> Iterator[NDArray[Any]]:
        """The stored numbers as NumPy's `kind`, `size` at a time."""
        count = math.prod(self.shape)
        try:
            with self.file.open("rb") as stream:
                stream.seek(self.begin)
                for first in range(0, max(1, count), size):
                    expected = min(size, count - first)
                    raw = np.fromfile(stream, dtype=kind, count=expected)
                    if len(raw) != expected:
                        raise damaged(self.file, "it ends within a tensor")
                    yield raw
        except OSError as error:
            raise unreadable(self.file, error) from None

    def _numbers_of(self, raw: NDArray[Any]) -> NDArray[Any]:
        """The numbers for which stored floats stand, in any dtype that holds them."""
        if self.dtype in EIGHT_BITS:
            return numbers_of_e4m3(raw)
        if self.dtype == "BF16":
            # bfloat16 is the upper half of a float32.
            singles: NDArray[Any] = (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
            return singles
        return raw


def not_finite(file: Path, name: str) -> UnreadableCheckpoint:
    """The complaint about a tensor with a number that is none."""
    return UnreadableCheckpoint(
        f"{file}: tensor {cut(name)} holds NaN or infinity, so no output is defined; download the file again"
    )


def numbers_of_e4m3(bits: NDArray[Any]) -> NDArray[Any]:
    """The numbers for which bytes of the 8-bit float e4m3 stand: a sign, 4 bits of exponent, 3 of mantissa.

    There is no infinity; the largest exponent and mantissa stand for NaN.

    >>> numbers_of_e4m3(np.array([0x38, 0xB9, 0x01, 0x7E])).tolist()
    [1.0, -1.125, 0.001953125, 448.0]
    """
    integers = bits.astype(np.int64)
    exponent, mantissa = (integers >> 3) & 15, integers & 7
    size = np.where(exponent, np.ldexp(1 + mantissa / 8, exponent - 7), np.ldexp(mantissa / 8, -6))
    size = np.where(integers & 127 == 127, np.nan, size)
    signed: NDArray[Any] = np.where(integers >> 7, -size, size)
    return signed


def read_header(file: Path, dtypes: Collection[str] = FLOATS) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, after checking that its data fills the file as the header says.

    Args:
        file: The file.
        dtypes: The dtypes that a tensor may have, of FLOATS, WHOLE and EIGHT_BITS.

    Raises:
        UnreadableCheckpoint: the file is damaged, or a tensor has another dtype.
    """
    try:
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, LARGEST_HEADER):
                raise damaged(file, "it ends within its header")
            raw = stream.read(length)
    except OSError as error:
        raise unreadable(file, error) from None
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        raise damaged(file, "its header is not JSON") from None
    except MemoryError:
        raise damaged(file, "its header exceeds the memory of this machine") from None
    if not isinstance(content, dict):
        raise damaged(file, "its header is not a JSON object")
    content.pop("__metadata__", None)
    if len(content) > MOST_TENSORS:
        raise UnreadableCheckpoint(f"{file}: {len(content)} tensors; at most {MOST_TENSORS} are read from one file")
    stored: dict[str, StoredTensor] = {}
    spans: list[tuple[int, int]] = []
    for name, entry in content.items():
        dtype, shape, begin, end = _entry(file, name, entry, dtypes)
        stored[name] = StoredTensor(file, dtype, shape, 8 + length + begin)
        spans.append((begin, end))
    # The data must be tiled without holes: the format demands it, and a file cut short shows here.
    position = 0
    for begin, end in sorted(spans):
        if begin != position:
            raise damaged(file, "its tensors overlap or leave holes")
        position = end
    if position != size - 8 - length:
        raise damaged(file, f"its header promises {position} bytes of weights, it holds {size - 8 - length}")
    return stored


def _entry(file: Path, name: str, entry: Any, dtypes: Collection[str]) -> tuple[str, tuple[int, ...], int, int]:
    """One header entry, checked: dtype, shape, begin and end of its bytes."""
    refusal = damaged(file, f"its header entry for {cut(name)} is broken")
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise refusal from None
    counts = (*shape, begin, end)
    # `type(...) is not int` refuses JSON's true and false, which Python counts as ints.
    if len(shape) > MOST_AXES or any(type(count) is not int or not 0 <= count < 2**63 for count in counts):
        raise refusal
    if not isinstance(dtype, str) or dtype not in dtypes:
        raise UnreadableCheckpoint(
            f"{file}: tensor {cut(name)} has dtype {cut(dtype) if isinstance(dtype, str) else quote_value(dtype)}, "
            f"not {', '.join(dtypes)}; save the checkpoint unquantized"
        )
    if end - begin != math.prod(shape) * {**FLOATS, **INTEGERS, **EIGHT_BITS}[dtype]:
        raise damaged(file, f"tensor {cut(name)} has {end - begin} bytes for shape {list(shape)} of {dtype}")
    return dtype, shape, begin, end


def cut(name: str) -> str:
    """A name from a file for a message: at most SHOWN letters, without line breaks or control characters."""
    clean = "".join(letter if letter.isprintable() else "?" for letter in name[:MOST_LETTERS])
    return clean if len(name) <= MOST_LETTERS else f"{clean}…"


def damaged(file: Path, evidence: str) -> UnreadableCheckpoint:
    """The complaint that `file` is not what its publisher wrote; `evidence` says how this shows."""
    return UnreadableCheckpoint(f"{file}: truncated or corrupt ({evidence}); download the file again")
