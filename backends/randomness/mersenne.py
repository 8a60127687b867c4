"""Offsets on sequences of MT19937, the generator behind torch on CPUs.

`random.Random` and `numpy.random.RandomState` are the same generator. A state is a block of 624 words and a number of
words read. Blocks follow from each other. A block that follows from a known one is on its stream; any other begins a
stream of its own.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from specverify.backends.randomness.places import Position

Block = NDArray[np.uint32]

LENGTH = 624
"""Words in a block."""

MOST_BLOCKS = 4096
"""Most blocks, 2.5 million words, that one draw is followed through."""


def next_block(block: Block) -> Block:
    """The block behind `block`."""
    new = np.concatenate([block, block[:1]])

    # Each word needs the word 397 behind it, which from number 227 on is a new one.
    def twist(begin: int, end: int, words_behind: Block) -> None:
        mixed_words = (new[begin:end] & np.uint32(0x80000000)) | (new[begin + 1 : end + 1] & np.uint32(0x7FFFFFFF))
        odd = (mixed_words & np.uint32(1)).astype(bool)
        new[begin:end] = (
            words_behind ^ (mixed_words >> np.uint32(1)) ^ np.where(odd, np.uint32(0x9908B0DF), np.uint32(0))
        )

    twist(0, 227, block[397:624])
    twist(227, 454, new[0:227].copy())
    twist(454, 623, new[227:396].copy())
    new[624] = new[0]
    twist(623, 624, new[396:397].copy())
    return new[:LENGTH]


class Blocks:
    """The blocks known so far: the stream of each, and its number there."""

    def __init__(self) -> None:
        self._places: dict[bytes, tuple[str, int]] = {}

    def position(self, block: Block, words_read: int, last: Block | None = None, most: int = MOST_BLOCKS) -> Position:
        """The position of a state; `last` is a block from which a draw may have led to it through `most` blocks."""
        key = block.tobytes()
        if key not in self._places and last is not None and last.tobytes() in self._places:
            self._follow(last, key, most)
        if key not in self._places:
            name = hashlib.sha256(key).hexdigest()[:8]
            # The words of a seeded block are never read: the first that is read begins the next one.
            self._places[key] = (f"mt19937 {name}", -1 if words_read == LENGTH else 0)
        stream, number = self._places[key]
        return Position(stream, LENGTH * number + words_read)

    def _follow(self, block: Block, target_bytes: bytes, most_blocks: int) -> None:
        """Note the blocks from `block` up to the block of bytes `target_bytes`, where it is one of the next."""
        stream, number = self._places[block.tobytes()]
        steps: dict[bytes, tuple[str, int]] = {}
        for step in range(1, most_blocks + 1):
            block = next_block(block)
            key = block.tobytes()
            steps[key] = (stream, number + step)
            if key == target_bytes:
                self._places.update({key: place for key, place in steps.items() if key not in self._places})
                return
