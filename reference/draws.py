"""Draws: the random numbers that a run read, each draw at its place in a stream.

A stream is the sequence of numbers that follows one seed, or one state, of a generator. Two generators with equal seeds
are one stream: they give the same numbers.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Draw:
    """Consecutive numbers of one stream, read by one call.

    Attributes:
        stream: The stream by name: its library, and the seed or state from which its offsets count.
        offset: The number of the first number that was read, from 0.
        size: How many numbers were read.
        site: The frames of the call, the innermost last, each `file:line in function: source line`.
        call: The function that was called and its generator, in words.
        step: Index of the speculative step, where it is known.
    """

    stream: str
    offset: int
    size: int
    site: tuple[str, ...]
    call: str = ""
    step: int = 0

    @property
    def end(self) -> int:
        """The number behind the last one that was read."""
        return self.offset + self.size

    @property
    def numbers(self) -> str:
        """The place in words: `number 3 of torch, seed 7`, or `numbers 3 to 5 of torch, seed 7`."""
        span = f"number {self.offset}" if self.size == 1 else f"numbers {self.offset} to {self.end - 1}"
        return f"{span} of {self.stream}"
