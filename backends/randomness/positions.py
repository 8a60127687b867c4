"""The position of a generator of torch, NumPy or `random`, read from its state."""

import hashlib
import random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specverify.backends.randomness.places import Place, Position, place_between

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


_WORD = 1 << 128
_MULTIPLIERS = {"PCG64": 0x2360ED051FC65DA44385DF649FCCF645, "PCG64DXSM": 0xDA942042E4DD58B5}


class Positions:
    """Positions of generators, with the blocks of MT19937 and the other states met so far.

    All positions that are to be compared come from one `Positions`.
    """

    def __init__(self) -> None:
        self._blocks = Blocks()
        self._states: dict[bytes, Position] = {}

    def position(self, generator: Any, before: "StreamPosition | None" = None) -> "StreamPosition":
        """Where a `torch.Generator`, `numpy.random.Generator`, `RandomState`, bit generator or `Random` stands.

        Args:
            generator: The generator.
            before: Where it stood before its last draw; so a position behind a draw is on the stream of the draw.

        Raises:
            TypeError: The generator has no state.
        """
        if isinstance(generator, torch.Generator):
            return self._position_of_torch(generator, before)
        if isinstance(generator, random.Random):
            if isinstance(generator, random.SystemRandom):
                raise TypeError("a SystemRandom has no state")
            state = generator.getstate()[1]
            return self._position_of_block(np.array(state[:-1], dtype=np.uint32), state[-1], before)
        if isinstance(generator, np.random.Generator):
            generator = generator.bit_generator
        if isinstance(generator, np.random.RandomState):
            return self._position_of_numpy(generator.get_state(legacy=False), before)
        return self._position_of_numpy(generator.state, before)

    def place(self, before: "StreamPosition", generator: Any) -> Place:
        """The place of the draw that `generator` has made since it stood at `before`."""
        return place_between(before.position, self.position(generator, before).position)

    def _position_of_block(self, block: Block, words_read: int, before: "StreamPosition | None") -> "StreamPosition":
        last = None if before is None else before.block
        most = MOST_BLOCKS if before is None else before.most_blocks
        return StreamPosition(self._blocks.position(block, words_read, last, most), block)

    def _position_of_torch(self, generator: torch.Generator, before: "StreamPosition | None") -> "StreamPosition":
        if generator.device.type != "cpu":
            return self._position_of_device(generator, before)
        # The layout of THGeneratorState: seed, left, seeded, next, 624 words of 8 bytes, then cached normal numbers.
        state = generator.get_state().numpy()
        words_left = int(state[8:12].view(np.int32)[0])
        block = state[24 : 24 + 8 * 624].view(np.uint64).astype(np.uint32)
        return self._position_of_block(block, 625 - words_left, before)

    def _position_of_device(self, generator: torch.Generator, before: "StreamPosition | None") -> "StreamPosition":
        kind = generator.device
        if hasattr(generator, "get_offset") and kind.type in ("cuda", "npu", "xpu"):
            return StreamPosition(Position(f"philox {kind.type} {generator.initial_seed()}", generator.get_offset()))
        return self._opaque(bytes(generator.get_state().cpu().numpy().tobytes()), 0, before)

    def _position_of_numpy(self, state: dict[str, Any], before: "StreamPosition | None") -> "StreamPosition":
        kind, inner = state["bit_generator"], state["state"]
        # A half of the last word may wait for the next draw of 32 bits.
        waiting = state.get("has_uint32", 0)
        if kind == "MT19937":
            return self._position_of_block(inner["key"], inner["pos"], before)
        if kind in _MULTIPLIERS:
            steps = _steps_to(inner["state"], inner["inc"], _MULTIPLIERS[kind])
            return StreamPosition(Position(f"{kind.lower()} {inner['inc']:x}", 2 * steps - waiting))
        if kind == "Philox":
            counter = sum(int(part) << (64 * number) for number, part in enumerate(inner["counter"]))
            key = "".join(f"{int(part):016x}" for part in inner["key"])
            return StreamPosition(Position(f"philox {key}", 2 * (4 * counter + state["buffer_pos"]) - waiting))
        if kind == "SFC64":
            count = int(inner["state"][3])
            return self._opaque(inner["state"].tobytes(), 2 * count - waiting, before, bytes([waiting]))
        return self._opaque(repr(state).encode(), 0, before)

    def _opaque(self, state: bytes, count: int, before: "StreamPosition | None", half: bytes = b"") -> "StreamPosition":
        """The position of a state that tells no stream: the position of the state before it, or of equal bytes."""
        key = state + half
        if key not in self._states:
            if before is not None:
                self._states[key] = Position(before.position.stream, max(count, before.position.offset + 1))
            else:
                self._states[key] = Position(f"state {hashlib.sha256(key).hexdigest()[:8]}", count)
        return StreamPosition(self._states[key])


class StreamPosition:
    """A position together with what is needed to follow the stream from it.

    Attributes:
        position: The position.
        block: The block of MT19937, or None for other generators.
        most_blocks: How many blocks a search for a later position may go through.
    """

    def __init__(self, position: Position, block: Block | None = None, most_blocks: int = MOST_BLOCKS) -> None:
        self.position = position
        self.block = block
        self.most_blocks = most_blocks


def default_generator(library: str) -> Any:
    """The generator of a library that draws where none is named: of `torch`, `numpy` or `random`."""
    if library == "torch":
        return torch.default_generator
    # The hidden generators whose methods are the module-level functions.
    return np.random.mtrand._rand if library == "numpy" else random._inst


def generator_in_words(generator: Any) -> str:
    """The generator, for a person: its library and, where it tells, its seed."""
    for library in ("torch", "numpy", "random"):
        if generator is default_generator(library):
            return f"{library}'s default generator"
    kind = type(generator)
    names = [parent for parent in kind.__mro__ if not parent.__module__.startswith("backends.")]
    module = names[0].__module__.split(".")[0]
    name = f"{'numpy.random' if module == 'numpy' else module}.{names[0].__name__}"
    if isinstance(generator, torch.Generator):
        return f"a torch.Generator seeded {generator.initial_seed()}"
    return f"a {name}"


def _steps_to(state: int, increment: int, multiplier: int) -> int:
    """How many steps of `x -> multiplier * x + increment` modulo 2^128 lead from 0 to `state`."""
    current = 0
    steps = 0
    bit = 1
    plus = increment
    while current != state:
        if (current ^ state) & bit:
            current = (current * multiplier + plus) % _WORD
            steps |= bit
        bit <<= 1
        plus = (multiplier + 1) * plus % _WORD
        multiplier = multiplier * multiplier % _WORD
    return steps
