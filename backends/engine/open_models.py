"""The models that one server has opened, and their counters since then.

A target is a causal model. A draft runs another causal model, or a head that is made for the target. A model must show
that it updates its cache before attention reads it, where the layout is position-overwrite: two small forwards over
different stale rows must return the same bits.
"""

from collections import Counter
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specverify.backends.base import Unsupported
from specverify.backends.engine.columns import Attend
from specverify.backends.engine.draft import HEADS
from specverify.backends.engine.kv.contiguous import Overwrite, updated_before_read
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.model.absent import AbsentModel
from specverify.backends.engine.model.causal_lm import CausalLm, Rows, causal
from specverify.backends.engine.model.head import HeadModel
from specverify.backends.engine.model.models import IMAGES, TOKENS, ModelCache, refuse_long
from specverify.backends.engine.model.quantised import Dequantise, dequantise
from specverify.backends.engine.seams import Seams
from specverify.backends.engine.step_seams import DraftPart
from specverify.reference.case import Case
from specverify.reference.trace import Trace


class OpenModels:
    """Opens models from a `ModelCache`, and counts their forwards from that moment on."""

    def __init__(self, cached: ModelCache) -> None:
        self._cached = cached
        # Models outlive servers, so their counters are noted when they are opened, and subtracted later.
        self._counters_before: dict[CausalLm | HeadModel, tuple[float, Counter[str], int]] = {}

    def target(self, case: Case, seams: Seams) -> CausalLm:
        """The target of `case`.

        Raises:
            Unsupported: if the engine cannot run the model, in this layout or to this length.
        """
        model = seams.network(self._causal(case, seams.attend, seams.kv.lanes))
        self._note(model, case, seams.attend, seams.kv.lanes)
        return model

    def draft(self, case: Case, seams: Seams) -> DraftPart | None:
        """The model that the draft of `case` runs, or this rank's part of it; None for a draft without a model.

        Raises:
            Unsupported: as `target`.
        """
        make = HEADS.get(case.draft.TAG)
        model: CausalLm | HeadModel
        if make is not None:
            model = self._cached.head(case, make, seams.dequantise)
        elif case.draft.model is None:
            return None
        else:
            # A draft model stores its columns as they are.
            layout = replace(case.layout, kv_dtype="")
            draft_case = replace(case, model=case.draft.model, layout=layout, draft_ranks=0)
            prompts = IMAGES if case.draft.sees_images else TOKENS
            opened = self._causal(draft_case, seams.draft_attend, seams.kv.single, seams.dequantise, prompts)
            model = seams.draft_network(opened)
            case = draft_case
        part = seams.draft_part(model)
        if not isinstance(part, AbsentModel):
            self._note(part, case, seams.draft_attend, seams.kv.single)
        return part

    def with_counters(self, trace: Trace) -> Trace:
        """`trace` with the seconds, the layers and the fallbacks of this server's forwards."""
        fallbacks: Counter[str] = Counter()
        for model, (_, fallbacks_before, _) in self._counters_before.items():
            fallbacks.update(model.fallbacks - fallbacks_before)
        return replace(
            trace,
            forward_s=sum(
                model.forward_s - seconds_before for model, (seconds_before, *_) in self._counters_before.items()
            ),
            fallbacks=dict(fallbacks),
            attention_calls=sum(
                model.attention_calls - calls_before for model, (*_, calls_before) in self._counters_before.items()
            ),
        )

    def _causal(
        self,
        case: Case,
        attend: Attend,
        lanes: type[BatchCache],
        product: Dequantise = dequantise,
        prompts: str = TOKENS,
    ) -> CausalLm:
        refuse_long(case.model, case.longest)
        model = self._cached.open(case.model, case.dtype, product, prompts)
        self._note(model, case, attend, lanes)
        return model

    def _note(self, model: CausalLm | HeadModel, case: Case, attend: Attend, lanes: type[BatchCache]) -> None:
        if case.layout.traits.in_place:
            require_update_first(model, attend, lanes)
        self._counters_before.setdefault(model, (model.forward_s, model.fallbacks.copy(), model.attention_calls))


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
