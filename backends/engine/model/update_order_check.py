"""Shows by small forwards that a cache is updated before attention reads it, or refuses position-overwrite."""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from backends.base import Unsupported
from backends.engine.columns import Attend
from backends.engine.kv.lanes import BatchCache
from backends.engine.kv.overwrite import Overwrite, updated_before_read
from backends.engine.model.causal_lm import CausalLm, Rows, causal

COMMITTED, BLOCK = 3, 3
"""Columns before the probe's block, and its rows."""

_shown: WeakKeyDictionary[CausalLm, dict[tuple[Attend, type[BatchCache]], bool]] = WeakKeyDictionary()


def require_update_first(model: CausalLm, attend: Attend, lanes: type[BatchCache]) -> None:
    """Refuse layout `overwrite` unless logits keep their bits whatever stale rows lie where a block is written.

    A model is probed once for each attention and batching that it runs with.

    Raises:
        Unsupported: where it cannot be shown.
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
    tokens = [(7 * at + 1) % vocabulary for at in range(COMMITTED + BLOCK)]
    rows = torch.arange(COMMITTED, COMMITTED + BLOCK)

    def verify(cache: Overwrite) -> Tensor:
        model.prefill(tuple(tokens[:COMMITTED]), cache, attend, 0)
        block = Rows(torch.tensor(tokens[COMMITTED:]), rows, causal(rows, model.reaches), cache)
        return model.forward([block], attend, lanes=lanes)[0]

    try:
        return updated_before_read(verify, model.room(COMMITTED + BLOCK, BLOCK), COMMITTED)
    except Exception:  # whatever breaks here shows nothing; under another layout it is a finding of its own
        return False
