"""Faults of a host that learns a step late what the device did.

A draft reads numbers that stand for tokens, and a request that has ended is planned again.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from specverify.backends.engine.request import Request
from specverify.backends.engine.seams import Seams
from specverify.backends.engine.step.state import Emission, Verification
from specverify.backends.faults.fault import emitted_fault, faults_in, in_place_of, lowered_fault
from specverify.reference.trace import Committed


@lowered_fault(
    "placeholders-in-lookup",
    "vllm-project/vllm PR #40768: -1 placeholders survive on the way to the model; PR #24799: n-grams need the tokens",
    "a request whose draft looks text up, launched while a step of it with an accepted token is in flight",
)
def placeholders_in_lookup(seams: Seams) -> Seams:
    """The lookup of a step that is launched ahead reads placeholders; only the newest is replaced, by the root.

    The other tokens of the block in flight stay numbers below 0, in the text that the draft reads.
    """

    class UnfilledRequest(seams.request):  # type: ignore[misc,name-defined]
        fill: Callable[[list[int]], list[int]]

        def propose(self) -> None:
            if self.draft.cache is None and self.draft.reads is None:
                self.fill = partial(root_alone, self.fill)
            super().propose()

    def root_alone(fill: Callable[[list[int]], list[int]], tokens: list[int]) -> list[int]:
        read_tokens: list[int] = []
        for token in tokens:
            block = fill([token])
            read_tokens += [token] * (len(block) - 1) + block[-1:]
        return read_tokens

    return replace(seams, request=UnfilledRequest)


@emitted_fault(
    "end-told-a-step-late",
    "sgl-project/sglang-omni PR #590, #758: a request that ended in the frame before stays in the planned batch",
    "a request that ends in a session with launched steps, and takes part in a later action",
)
@in_place_of("request")
class Late(Request):
    """The end of a request reaches the scheduler a step late: in between the request is planned once more.

    The output is cut rightly where it ends; what the next step emits comes behind the end.
    """

    silent = False

    def record(self, verdict: Verification, emission: Emission, committed: Committed) -> None:
        Request.record(self, verdict, emission, committed)
        # A request that was never launched has `list` there.
        if emission.finish is not None and self.fill is not list and not self.silent:
            self.silent = True
            self.finish = None


FAULTS = faults_in(globals())
