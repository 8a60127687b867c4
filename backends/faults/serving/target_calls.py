"""Faults of calls of the target that nobody needs."""

from specverify.backends.engine.kv.recurrent import crop_states
from specverify.backends.engine.request import Request
from specverify.backends.engine.step.state import Verification
from specverify.backends.faults.fault import committed_fault, in_place_of
from specverify.reference.trace import Committed


@committed_fault(
    "target-called-again-for-next-draft",
    "pytorch/executorch, EAGLE-3: the states of a verification are those of the next draft, without a further call",
    "a draft that reads hidden states",
)
@in_place_of("request")
class CallingRequest(Request):
    """After each verification the target decodes the token behind the path once more, for a state that nobody reads."""

    def commit(self, verdict: Verification, rows: list[int]) -> Committed:
        committed = super().commit(verdict, rows)
        cache = self.lease.target
        length = cache.length
        if self.case.draft.reads is not None:
            self.target.append((verdict.accepted[-1],), cache, self.seams.attend, 1, self.seams.kv.single)
            cache.crop(length)
            crop_states(cache, length)
        return committed
