"""The server that hands requests over, to itself or by way of another process.

Each request leaves as bytes and enters again from them. What is sent, and what is refused, is what two servers would
send and refuse; `specverify.backends.engine.handover` knows nothing of either.
"""

from specverify.backends.engine.handover.packet import ExpectedRequest
from specverify.backends.engine.request import Request
from specverify.backends.engine.server import Server
from specverify.backends.engine.step.naming import naming_stage
from specverify.reference.session import Action
from specverify.reference.trace import Stage


class HandOverServer(Server):
    """A server that knows the action `hand-over`."""

    def _apply_to(self, action: Action, number: int) -> None:
        if action.kind == "hand-over":
            self._hand_over(number)
        else:
            super()._apply_to(action, number)

    def _hand_over(self, number: int) -> None:
        """Send the request as a packet, from which it enters again; it stays where no page is free for it twice."""
        departing = self.requests[number]
        hand_over = self._seams.hand_over
        lease = self._lease(departing.case, ())
        if not self._room(lease, len(departing.tokens)):
            self._arena.give_back(lease)
            return
        with naming_stage(departing):
            departing.stage = Stage.COMMITTED
            arrived = hand_over.unpack(self._deliver(departing, number), self._expected(departing, number))
            draft = self._draft(departing.case, lease, arrived.draft_steps)
            arriving = self._seams.request(departing.case, self._target, lease, draft, self._seams)
            arriving.bare = departing.bare
            arriving.prompt_logprobs = departing.prompt_logprobs
            arriving.carry_on(arrived, departing.steps, hand_over)
        arriving.hops = departing.hops + 1
        self._arena.give_back(departing.lease)
        self.requests[number] = arriving

    def _deliver(self, request: Request, number: int) -> bytes:
        """The packet of the request where it arrives."""
        hand_over = self._seams.hand_over
        return hand_over.pack(hand_over.outgoing(request.carried_state()), request.case, number, request.hops)

    def _expected(self, request: Request, number: int) -> ExpectedRequest:
        """The request as the receiver waits for it."""
        target_and_draft = [
            self._arena.room(model, self._capacity, self._rows) for model in request.sends(self._target)
        ]
        target, draft = (*target_and_draft, None)[:2]
        assert target is not None
        return ExpectedRequest(request.case, number, request.hops, target, draft, request.hidden_width)
