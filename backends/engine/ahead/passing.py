"""The server that hands requests over, to itself or by way of another process.

Each request leaves as bytes and enters again from them. What is sent, and what is refused, is what two servers would
send and refuse; `backends.engine.handover` knows nothing of either.
"""

from backends.engine.handover.packet import ExpectedRequest
from backends.engine.request import Request
from backends.engine.server import Server
from backends.engine.step.naming import naming_stage
from reference.session import Action
from reference.trace import Stage


class HandOverServer(Server):
    """A server that knows the action `hand-over`."""

    def _apply_to(self, action: Action, number: int) -> None:
        if action.kind == "hand-over":
            self._hand_over(number)
        else:
            super()._apply_to(action, number)

    def _hand_over(self, number: int) -> None:
        """Send the request as a packet, from which it enters again; it stays where no page is free for it twice."""
        old, hand_over = self.requests[number], self._seams.hand_over
        lease = self._lease(old.case, ())
        if not self._room(lease, len(old.tokens)):
            self._arena.give_back(lease)
            return
        with naming_stage(old):
            old.stage = Stage.COMMITTED
            arrived = hand_over.unpack(self._deliver(old, number), self._expected(old, number))
            draft = self._draft(old.case, lease, arrived.draft_steps)
            new = self._seams.request(old.case, self._target, lease, draft, self._seams)
            new.bare = old.bare
            new.prompt_logprobs = old.prompt_logprobs
            new.carry_on(arrived, old.steps, hand_over)
        new.hops = old.hops + 1
        self._arena.give_back(old.lease)
        self.requests[number] = new

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
