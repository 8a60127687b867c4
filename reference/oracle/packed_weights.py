"""Weights in 4-bit floats as float64, by the rule of `specverify.reference.files.mxfp4`."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.files.mxfp4 import BIAS, BLOCK, BLOCKS, BYTES, NUMBERS, SCALES
from specverify.reference.files.stored import StoredTensor, cut
from specverify.reference.trace import Array

NAN = 255
"""The scale byte that stands for no number."""


@dataclass(frozen=True)
class PackedStack:
    """A stack of matrices [experts, in, out] in 4-bit floats; it is read as a `StoredTensor` is.

    Attributes:
        blocks: Where the numbers lie, [experts, out, in / 32, 16].
        scales: Where the scales lie, [experts, out, in / 32].
    """

    blocks: StoredTensor
    scales: StoredTensor

    @property
    def file(self) -> Path:
        """The file of the numbers."""
        return self.blocks.file

    @property
    def dtype(self) -> str:
        """The stored dtype."""
        return self.blocks.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stack."""
        experts, out, blocks, _ = self.blocks.shape
        return experts, blocks * BLOCK, out

    def values(self, name: str) -> Array:
        """The stack called `name` as float64.

        Raises:
            UnreadableCheckpoint: A scale stands for no number.
        """
        halves, scales = self.blocks.values(name), self.scales.values(name)
        if (scales == NAN).any():
            raise UnreadableCheckpoint(f"{self.file}: tensor {cut(name)}{SCALES} holds NaN; download the file again")
        bits = np.stack([halves & 15, halves >> 4], axis=-1).reshape(*scales.shape, BLOCK)
        weights = np.ldexp(np.array(NUMBERS)[bits], scales[..., None] - BIAS)
        stack: Array = weights.reshape(*scales.shape[:2], -1).swapaxes(1, 2)
        return stack


def unpack_stacks(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor | PackedStack]:
    """`stored` with a `PackedStack` in place of each pair of numbers and scales.

    Raises:
        UnreadableCheckpoint: A tensor of bytes is no half of such a pair.
    """
    tensors: dict[str, StoredTensor | PackedStack] = {}
    for name, tensor in stored.items():
        if tensor.dtype != BYTES:
            tensors[name] = tensor
            continue
        stack_name = name.removesuffix(BLOCKS).removesuffix(SCALES)
        blocks, scales = (stored.get(f"{stack_name}{end}") for end in (BLOCKS, SCALES))
        is_pair = blocks is not None and scales is not None and blocks.dtype == scales.dtype == BYTES
        if not is_pair or blocks.shape != (*scales.shape, BLOCK // 2) or len(scales.shape) != 3:  # type: ignore[union-attr]
            raise UnreadableCheckpoint(
                f"{tensor.file}: tensor {cut(name)} of bytes is no half of 4-bit floats: {cut(stack_name)}{BLOCKS} "
                f"[experts, out, in / {BLOCK}, {BLOCK // 2}] and {SCALES} [experts, out, in / {BLOCK}] belong together"
            )
        assert blocks is not None
        assert scales is not None
        tensors[stack_name] = PackedStack(blocks, scales)
    return tensors
