"""The state of a request that leaves, and its return into other caches.

Keys and values travel, and the hidden states that a head reads. The rows of a head do not: the receiver runs them again
on those states, as after every verification. Stop rules and the grammar follow from the text, so that the receiver
makes them anew, and the packet says how far the grammar had read.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specverify.backends.engine.kv.base import KvCache
from specverify.backends.engine.kv.recurrent import states_of
from specverify.backends.engine.kv.state_slots import LayerStates


@dataclass(frozen=True)
class Columns:
    """The committed columns of one cache.

    Attributes:
        length: The number of committed columns.
        first: The first column that each layer still holds.
        keys: For each layer [kv_heads, length - first, width].
        values: The same for values, whose width may be another.
        recurrent: The recurrent state of each layer after these columns; None beside a model without any.
    """

    length: int
    first: tuple[int, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    recurrent: LayerStates | None = None


@dataclass(frozen=True)
class RequestState:
    """The state of a request between two of its steps.

    Attributes:
        tokens: Prompt and output so far; the last one is the pending root.
        position: The rotary position of that root.
        lengths: The number of accepted drafted tokens of each step so far; every step has used up its coins.
        proposed: Number of drafted tokens so far.
        draft_calls: Number of forwards of the draft so far.
        draft_steps: Number of steps that the request has taken with its draft.
        prefill_calls: Number of the target's prefills for the request so far.
        decode_calls: Number of its decodes.
        verify_calls: Number of its verifications.
        matched: Number of output tokens that its grammar has read; None without a grammar.
        logprob: The log-probability of the last output token; None where there is no output.
        target: The columns of the target's cache, one for each token but the root.
        draft: The columns of a draft model's cache; None for other drafts.
        hidden: Hidden states of all tokens but the root, [len(tokens) - 1, width]; None if the draft reads none.
    """

    tokens: tuple[int, ...]
    position: int
    lengths: tuple[int, ...]
    proposed: int
    draft_calls: int
    draft_steps: int
    prefill_calls: int
    decode_calls: int
    verify_calls: int
    matched: int | None
    logprob: float | None
    target: Columns
    draft: Columns | None
    hidden: Tensor | None


def committed_columns_of(cache: KvCache, most: int) -> Columns:
    """The committed columns of `cache`, at most the first `most`; it is rewound to those.

    A layer with a window still has the columns that it sees from one position further back, and shows them then.
    """
    if cache.length > most:
        cache.crop(most)
    length = cache.length
    columns_by_layer = [cache.committed_columns(layer) for layer in range(cache.layers)]
    first = tuple(min(begin, length) for begin, _, _ in columns_by_layer)
    counts = [length - begin for begin in first]
    states = states_of(cache)
    return Columns(
        length,
        first,
        tuple(keys[..., :count, :] for (_, keys, _), count in zip(columns_by_layer, counts, strict=True)),
        tuple(values[..., :count, :] for (_, _, values), count in zip(columns_by_layer, counts, strict=True)),
        None if states is None else dict(states.states_by_length[length]),
    )


def fill(cache: KvCache, columns: Columns) -> None:
    """Commit `columns` in an empty cache, in blocks that the cache admits.

    A layer with a window may have dropped its first columns. Zeros stand for them, which no later row can see.
    """
    width = cache.most_rows or max(columns.length, 1)
    for begin in range(0, columns.length, width):
        end = min(begin + width, columns.length)
        cache.open(end - begin)
        for layer, first in enumerate(columns.first):
            pair = (columns.keys[layer], columns.values[layer])
            cache.write(layer, *(_columns_between(tensor, first, begin, end) for tensor in pair))
        cache.commit(list(range(end - begin)))
    states = states_of(cache)
    if states is not None and columns.recurrent is not None:
        states.begin(columns.length, dict(columns.recurrent))


def _columns_between(columns: Tensor, first: int, begin: int, end: int) -> Tensor:
    """The columns `begin` to `end` of `columns` [heads, columns, width], which begins with column `first`."""
    dropped = columns.new_zeros(columns.shape[0], max(0, min(first, end) - begin), columns.shape[2])
    return torch.cat([dropped, columns[:, max(begin - first, 0) : max(end - first, 0)]], 1)
