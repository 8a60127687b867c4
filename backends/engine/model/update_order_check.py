"""The test whether a model updates its cache before attention reads it.

Two small forwards over different stale rows must return the same bits. Otherwise position-overwrite is refused.
"""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specverify.backends.base import Unsupported
from specverify.backends.engine.columns import Attend
from specverify.backends.engine.kv.contiguous import Overwrite, updated_before_read
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.model.causal_lm import CausalLm, Rows, causal
from specverify.backends.engine.model.head import HeadModel

COMMITTED, BLOCK = 3, 3
"""The committed columns before the block of the test, and the rows of the block."""

_results: WeakKeyDictionary[CausalLm | HeadModel, dict[tuple[Attend, type[BatchCache]], bool]] = WeakKeyDictionary()
"""The results so far; held weakly by model, so that a model that is dropped takes its results along."""


def require_update_first(model: CausalLm | HeadModel, attend: Attend, lanes: type[BatchCache]) -> None:
    """Refuse layout `overwrite` unless stale rows at the place of a new block change no bit of the logits.

    A model is tested once for each pair of attention and batch cache with which it runs.

    Raises:
        Unsupported: if the test fails or cannot be run.
    """
    results = _results.setdefault(model, {})
    if (attend, lanes) not in results:
        results[attend, lanes] = _probe(model, attend, lanes)
    if not results[attend, lanes]:
        raise Unsupported(
            "layout overwrite: it could not be shown that the cache is updated before attention reads it, "
            "so stale rows may be attended to; use layout static or scratch"
        )


def _probe(model: CausalLm | HeadModel, attend: Attend, lanes: type[BatchCache]) -> bool:
    def verify(cache: Overwrite) -> Tensor:
        forward = _of_head if isinstance(model, HeadModel) else _of_model
        return forward(model, cache, attend, lanes)  # type: ignore[arg-type]  # each with its own class

    try:
        return updated_before_read(verify, model.room(COMMITTED + BLOCK, BLOCK), COMMITTED)
    except Exception:  # a forward that breaks proves nothing; under another layout the same error is a finding
        return False


def _of_model(model: CausalLm, cache: Overwrite, attend: Attend, lanes: type[BatchCache]) -> Tensor:
    """The logits of a block below a prefill."""
    vocabulary = model.model.config.vocab_size
    tokens = [(7 * i + 1) % vocabulary for i in range(COMMITTED + BLOCK)]  # any tokens, not all the same
    rows = torch.arange(COMMITTED, COMMITTED + BLOCK)
    model.prefill(tuple(tokens[:COMMITTED]), cache, attend, 0)
    block = Rows(torch.tensor(tokens[COMMITTED:]), rows, causal(rows, model.reaches), cache)
    return model.forward([block], attend, lanes=lanes)[0]


def _of_head(head: HeadModel, cache: Overwrite, attend: Attend, lanes: type[BatchCache]) -> Tensor:
    """The outputs of a block below committed rows, all beside the same states."""
    tokens = [(7 * i + 1) % head.vocab_size for i in range(COMMITTED + BLOCK)]
    state = torch.linspace(-1, 1, head.hidden_size, dtype=head.dtype, device=head.device)
    head.append(tokens[:COMMITTED], state.expand(COMMITTED, -1), cache, attend)
    rows = torch.arange(COMMITTED, COMMITTED + BLOCK)
    block = torch.tensor(tokens[COMMITTED:])
    states = state.expand(BLOCK, -1)
    return head.forward(block, states, rows, causal(rows, head.reaches)[0], cache, attend, lanes)
