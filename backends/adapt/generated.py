"""The forms in which a black box returns tokens and what it tells of them.

The forms are tokens alone, a pair of tokens and log-probabilities, and a `Generated`. A function that yields such
values instead shows its blocks, and is closed where a caller wants no more of them.
"""

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from reference.trace import Emitted, Speculated, Step


@dataclass(frozen=True)
class Generated:
    """The result of a call, with what the engine tells of it beside the tokens.

    Attributes:
        tokens: The generated token ids, without the prompt.
        logprobs: The natural log-probability of each of them; `blackbox` takes the law that they are of.
        proposed: Drafted tokens that the target verified during the call.
        accepted: Those of them that it accepted.
    """

    tokens: Any
    logprobs: Any = None
    proposed: int | None = None
    accepted: int | None = None


@dataclass(frozen=True)
class Block:
    """A checked `Generated`: ints, floats, and both counts or none."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    speculated: Speculated | None = None


def blocks_of(returned: Any, most: int = 0) -> Iterator[Block]:
    """The blocks of a call: one for each value of a generator, else the whole result as one.

    Args:
        returned: What the function returned.
        most: Blocks after which a generator is closed; 0 for no limit.

    Raises:
        TypeError, ValueError: A value is none of the forms that `Generated` and this file name.
    """
    if not isinstance(returned, Generator):
        yield block_of(returned)
        return
    try:
        for one in islice(returned, most or None):
            # A stream may also give one token at a time.
            yield block_of([one] if hasattr(one, "__index__") and not isinstance(one, np.ndarray) else one)
    finally:
        returned.close()


def block_of(returned: Any) -> Block:
    """A result as a block.

    Raises:
        TypeError: It holds no token ids, or its log-probabilities are no numbers.
        ValueError: Numbers of log-probabilities and tokens differ, or counts make no sense.
    """
    # A tuple of two whole numbers is two tokens, and a tuple of two sequences is tokens and log-probabilities.
    if isinstance(returned, tuple) and len(returned) == 2 and all(map(_is_sequence, returned)):
        returned = Generated(*returned)
    if not isinstance(returned, Generated):
        return Block(tokens_of(returned))
    tokens = tokens_of(returned.tokens)
    return Block(tokens, _logprobs(returned.logprobs, len(tokens)), _speculated(returned.proposed, returned.accepted))


def tokens_of(returned: Any) -> tuple[int, ...]:
    """The token ids that a function returned.

    Raises:
        TypeError: They are no sequence of whole numbers.
    """
    told = returned.tolist() if isinstance(returned, (np.ndarray, torch.Tensor)) else returned
    if not isinstance(told, Iterable) or isinstance(told, (str, bytes, dict)):
        raise TypeError(
            f"generate returned {type(returned).__name__}, expected the generated token ids, such as [3, 1]"
        )
    tokens = list(told)
    for at, one in enumerate(tokens):
        if isinstance(one, (list, tuple)):
            raise TypeError("generate returned token ids for a batch, expected those of one request: take row 0")
        if isinstance(one, bool) or not hasattr(one, "__index__"):
            raise TypeError(f"generate returned {one!r} at place {at}, expected a token id")
    return tuple(int(one) for one in tokens)


def steps_of(blocks: list[Block], prefix: tuple[int, ...], root: int) -> tuple[Step, ...]:
    """A step for each block; `prefix` and then `root` are the prompt."""
    steps, context = [], (*prefix, root)
    for one in blocks:
        # The committed tokens are all but the last.
        steps.append(Step(context[:-1], emitted=Emitted(one.tokens, logprobs=one.logprobs)))
        context += one.tokens
    return tuple(steps)


def total(blocks: list[Block]) -> Speculated | None:
    """The counts of all blocks together; None where no block tells any."""
    told = [one.speculated for one in blocks if one.speculated is not None]
    return Speculated(sum(one.proposed for one in told), sum(one.accepted for one in told)) if told else None


def _is_sequence(value: Any) -> bool:
    """Whether the value holds several numbers: a list, a tuple, or an array with an axis."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return value.ndim > 0
    return isinstance(value, (list, tuple))


def _logprobs(given: Any, count: int) -> tuple[float, ...] | None:
    if given is None:
        return None
    told = given.tolist() if isinstance(given, (np.ndarray, torch.Tensor)) else given
    if not isinstance(told, (list, tuple)):
        raise TypeError(f"generate returned log-probabilities as {type(given).__name__}, expected a list of numbers")
    for at, one in enumerate(told):
        if isinstance(one, bool) or not hasattr(one, "__float__"):
            raise TypeError(f"generate returned log-probability {one!r} at place {at}, expected a number")
    if len(told) != count:
        raise ValueError(f"generate returned {len(told)} log-probabilities for {count} tokens, expected one for each")
    return tuple(float(one) for one in told)


def _speculated(proposed: Any, accepted: Any) -> Speculated | None:
    if proposed is None and accepted is None:
        return None
    for name, count in (("proposed", proposed), ("accepted", accepted)):
        if isinstance(count, bool) or not hasattr(count, "__index__") or int(count) < 0:
            raise ValueError(f"generate returned {name}={count!r}, expected both counts: proposed and accepted")
    if int(accepted) > int(proposed):
        raise ValueError(f"generate returned accepted={accepted}, more than the {proposed} proposed")
    return Speculated(int(proposed), int(accepted))
