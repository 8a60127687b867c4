"""The test whether a model updates its cache before attention reads it.

Two small forwards over different stale rows must return the same bits. Otherwise position-overwrite is refused.
"""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from backends.base import Unsupported
from backends.engine.columns import Attend
from backends.engine.kv.lanes import BatchCache
from backends.engine.kv.overwrite import Overwrite, updated_before_read
from backends.engine.model.causal_lm import CausalLm, Rows, causal

COMMITTED, BLOCK = 3, 3
"""The committed columns before the block of the test, and the rows of the block."""

_shown: WeakKeyDictionary[CausalLm, dict[tuple[Attend, type[BatchCache]], bool]] = WeakKeyDictionary()
"""The results so far; held weakly by model, so that a model that is dropped takes its results along."""


def require_update_first(model: CausalLm, attend: Attend, lanes: type[BatchCache]) -> None:
    """Refuse layout `overwrite` unless stale rows at the place of a new block change no bit of the logits.

    A model is tested once for each pair of attention and batch cache with which it runs.

    Raises:
        Unsupported: if the test fails or cannot be run.
    """
    known = _shown.setdefault(model, {})
    if (attend, lanes) not in known:
        known[attend, lanes] = _probe(model, attend, lanes)
    if not known[attend, lanes]:
        raise Unsupported(
            "layout overwrite: it could not be shown that the cache is updated before attention reads it, "
            "so stale rows may be attended to; use layout static or scratch"
        )


def _probe(model: CausalLm, attend: Attend, lanes: type[BatchCache]) -> bool:
    vocabulary = model.model.config.vocab_size
    tokens = [(7 * at + 1) % vocabulary for at in range(COMMITTED + BLOCK)]  # any tokens, not all the same
    rows = torch.arange(COMMITTED, COMMITTED + BLOCK)

    def verify(cache: Overwrite) -> Tensor:
        model.prefill(tuple(tokens[:COMMITTED]), cache, attend, 0)
        block = Rows(torch.tensor(tokens[COMMITTED:]), rows, causal(rows, model.reaches), cache)
        return model.forward([block], attend, lanes=lanes)[0]

    try:
        return updated_before_read(verify, model.room(COMMITTED + BLOCK, BLOCK), COMMITTED)
    except Exception:  # a forward that breaks proves nothing; under another layout the same error is a finding
        return False
