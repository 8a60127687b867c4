"""The forms in which a black box returns tokens and what it tells of them.

The forms are tokens alone, a pair of tokens and log-probabilities, and a `Generated`. A function that yields such
values instead shows its blocks, and is closed where a caller wants no more of them. Counts of drafted tokens that an
engine does not tell are read from the forwards of a target of transformers' classes.
"""

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any, cast

import numpy as np
import torch

from specverify.backends.base import BrokenContract
from specverify.reference.trace import Emitted, Speculated, Step


class WrongKind(BrokenContract, TypeError):
    """An answer holds something else than token ids and numbers."""


class WrongCount(BrokenContract, ValueError):
    """An answer holds too many or too few values, or counts that make no sense."""


@dataclass(frozen=True)
class Generated:
    """The result of a call, with what the engine tells of it beside the tokens.

    Attributes:
        tokens: The generated token ids, without the prompt.
        logprobs: The natural log-probability of each of them; `blackbox` takes the law that they are of.
        proposed: Drafted tokens that the target verified during the call.
        accepted: Those of them that it accepted.
        by_position: Of all drafted chains, how many accepted their first token, their second, and so on.
    """

    tokens: Any
    logprobs: Any = None
    proposed: int | None = None
    accepted: int | None = None
    by_position: Any = None


@dataclass(frozen=True)
class Block:
    """A checked `Generated`: ints, floats, and both counts or none."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    speculated: Speculated | None = None


def blocks_of(result: Any, most: int = 0) -> Iterator[Block]:
    """The blocks of a call: one for each value of a generator, else the whole result as one.

    Args:
        result: What the function returned.
        most: Blocks after which a generator is closed; 0 for no limit.

    Raises:
        TypeError, ValueError: A value is none of the forms that `Generated` and this file name.
    """
    if not isinstance(result, Generator):
        yield block_of(result)
        return
    try:
        for value in islice(result, most or None):
            # A stream may also give one token at a time.
            yield block_of([value] if hasattr(value, "__index__") and not isinstance(value, np.ndarray) else value)
    finally:
        result.close()


def block_of(result: Any) -> Block:
    """A result as a block.

    Raises:
        TypeError: It holds no token ids, or its log-probabilities are no numbers.
        ValueError: Numbers of log-probabilities and tokens differ, or counts make no sense.
    """
    # A tuple of two whole numbers is two tokens, and a tuple of two sequences is tokens and log-probabilities.
    if isinstance(result, tuple) and len(result) == 2 and all(map(_is_sequence, result)):
        result = Generated(*result)
    if not isinstance(result, Generated):
        return Block(tokens_of(result))
    tokens = tokens_of(result.tokens)
    return Block(tokens, _checked_logprobs(result.logprobs, len(tokens)), _checked_counts(result))


def tokens_of(result: Any) -> tuple[int, ...]:
    """The token ids that a function returned.

    Raises:
        TypeError: They are no sequence of whole numbers.
    """
    values = result.tolist() if isinstance(result, (np.ndarray, torch.Tensor)) else result
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, dict)):
        raise WrongKind(f"generate returned {type(result).__name__}, expected the generated token ids, such as [3, 1]")
    tokens = list(values)
    for index, entry in enumerate(tokens):
        if isinstance(entry, (list, tuple)):
            raise WrongKind("generate returned token ids for a batch, expected those of one request: take row 0")
        if isinstance(entry, bool) or not hasattr(entry, "__index__"):
            raise WrongKind(f"generate returned {entry!r} at place {index}, expected a token id")
    return tuple(int(token) for token in tokens)


def steps_of(blocks: list[Block], prefix: tuple[int, ...], root: int) -> tuple[Step, ...]:
    """A step for each block; `prefix` and then `root` are the prompt."""
    steps = []
    context = (*prefix, root)
    for block in blocks:
        # The committed tokens are all but the last.
        steps.append(Step(context[:-1], emitted=Emitted(block.tokens, logprobs=block.logprobs)))
        context += block.tokens
    return tuple(steps)


def total(blocks: list[Block]) -> Speculated | None:
    """The counts of all blocks together; None where no block tells any."""
    counts = [block.speculated for block in blocks if block.speculated is not None]
    if not counts:
        return None
    by_position = tuple(map(sum, zip_longest(*(count.by_position for count in counts), fillvalue=0)))
    return Speculated(sum(count.proposed for count in counts), sum(count.accepted for count in counts), by_position)


def _is_sequence(value: Any) -> bool:
    """Whether the value holds several numbers: a list, a tuple, or an array with an axis."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return value.ndim > 0
    return isinstance(value, (list, tuple))


def _checked_logprobs(logprobs: Any, count: int) -> tuple[float, ...] | None:
    if logprobs is None:
        return None
    values = logprobs.tolist() if isinstance(logprobs, (np.ndarray, torch.Tensor)) else logprobs
    if not isinstance(values, (list, tuple)):
        raise WrongKind(f"generate returned log-probabilities as {type(logprobs).__name__}, expected a list of numbers")
    for index, value in enumerate(values):
        if isinstance(value, bool) or not hasattr(value, "__float__"):
            raise WrongKind(f"generate returned log-probability {value!r} at place {index}, expected a number")
    if len(values) != count:
        raise WrongCount(f"generate returned {len(values)} log-probabilities for {count} tokens, expected one for each")
    return tuple(float(value) for value in values)


def _checked_counts(result: Generated) -> Speculated | None:
    if result.proposed is None and result.accepted is None:
        return None
    for name in ("proposed", "accepted"):
        count = getattr(result, name)
        if isinstance(count, bool) or not hasattr(count, "__index__") or int(count) < 0:
            raise WrongCount(f"generate returned {name}={count!r}, expected both counts: proposed and accepted")
    proposed, accepted = int(cast(Any, result.proposed)), int(cast(Any, result.accepted))
    if accepted > proposed:
        raise WrongCount(f"generate returned accepted={accepted}, more than the {proposed} proposed")
    if result.by_position is None:
        return Speculated(proposed, accepted)
    by_position = tokens_of(result.by_position)
    if sum(by_position) != accepted or list(by_position) != sorted(by_position, reverse=True) or min(by_position) < 0:
        raise WrongCount(
            f"generate returned by_position={list(by_position)}, expected falling counts that add up to the {accepted} "
            "accepted"
        )
    return Speculated(proposed, accepted, by_position)


@contextmanager
def rows_of_forwards(model: Any) -> Iterator[list[int]]:
    """The number of rows (tokens) of each forward of `model` inside the block, filled as the forwards come.

    Forwards with fewer layers than `model` has at the beginning are left out: in an early exit the target drafts so.
    """
    num_layers = model.config.num_hidden_layers
    rows: list[int] = []

    def note(network: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if network.config.num_hidden_layers == num_layers:
            tokens = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            rows.append(tokens.shape[1])

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield rows
    finally:
        hook.remove()


def generated_with_counts(tokens: Any, rows: list[int], prompt: int) -> Generated:
    """The generated `tokens` of a chain engine, with counts from the `rows` of its forwards after `prompt` tokens.

    Each forward has a row for the last token so far, the first one a row for each token of the prompt; all other rows
    are of drafted tokens. Each forward chooses one token itself.
    """
    num_chosen = len(rows)
    return Generated(tokens, proposed=sum(rows) - prompt - (num_chosen - 1), accepted=len(tokens) - num_chosen)
