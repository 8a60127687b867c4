"""The models that one server has opened, and their counters since then.

A target is a causal model. A draft runs another causal model, or a head that is made for the target.
"""

from collections import Counter
from dataclasses import replace

from specverify.backends.engine.columns import Attend
from specverify.backends.engine.draft import HEADS
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.model.causal_lm import CausalLm
from specverify.backends.engine.model.head import HeadModel
from specverify.backends.engine.model.models import ModelCache, refuse_long
from specverify.backends.engine.model.quantised import Dequantise, dequantise
from specverify.backends.engine.model.update_order_check import require_update_first
from specverify.backends.engine.seams import Seams
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

    def draft(self, case: Case, seams: Seams) -> CausalLm | HeadModel | None:
        """The model that the draft of `case` runs; None for a draft without a model.

        Raises:
            Unsupported: as `target`.
        """
        make = HEADS.get(case.draft.TAG)
        if make is not None:
            head = self._cached.head(case, make, seams.dequantise)
            self._note(head, case, seams.draft_attend, seams.kv.single)
            return head
        if case.draft.model is None:
            return None
        draft_case = replace(case, model=case.draft.model)
        model = seams.draft_network(self._causal(draft_case, seams.draft_attend, seams.kv.single, seams.dequantise))
        self._note(model, draft_case, seams.draft_attend, seams.kv.single)
        return model

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
        self, case: Case, attend: Attend, lanes: type[BatchCache], product: Dequantise = dequantise
    ) -> CausalLm:
        refuse_long(case.model, case.longest)
        model = self._cached.open(case.model, case.dtype, product)
        self._note(model, case, attend, lanes)
        return model

    def _note(self, model: CausalLm | HeadModel, case: Case, attend: Attend, lanes: type[BatchCache]) -> None:
        if case.layout.traits.in_place:
            require_update_first(model, attend, lanes)
        self._counters_before.setdefault(model, (model.forward_s, model.fallbacks.copy(), model.attention_calls))
