"""The server of a dialogue, whose turns share their caches."""

from dataclasses import replace

from specverify.backends.engine.kv.arena import CacheLease
from specverify.backends.engine.kv.base import OutOfPages
from specverify.backends.engine.kv.target_calls import calls_over
from specverify.backends.engine.model.models import ModelCache
from specverify.backends.engine.open_models import OpenModels
from specverify.backends.engine.request import Request
from specverify.backends.engine.seams import Seams
from specverify.backends.engine.server import Server
from specverify.reference.case import Case
from specverify.reference.session import Action
from specverify.reference.trace import Trace


class DialogueServer(Server):
    """A server of one request at a time, whose caches stay when it ends.

    The next turn's prompt begins with all tokens of the turn before, so that its prefill runs the others alone. The
    hidden states that a draft reads stay beside the columns. A turn begins with empty caches where the texts part.

    It is made for the case of the first turn, whose stops allow as many tokens as all later prompts and outputs have.

    Attributes:
        num_shared: Columns of the target's cache that the present turn has found there.
    """

    def __init__(self, case: Case, shelf: ModelCache, seams: Seams) -> None:
        super().__init__(replace(case, session=None), shelf, seams)
        self._shelf = shelf
        self._last_turn: Request | None = None
        self.num_shared = 0

    def turn(self, case: Case) -> Trace:
        """Take all steps of the next turn and return its trace; `case` differs from others in prompt and stops alone.

        Raises:
            StageFailure: for every error, with the stage in which it occurred.
            OutOfPages: if the dialogue is longer than the first case said.
        """
        self.case = case
        # Opened once more, so that the trace counts the forwards of this turn alone.
        self._models = OpenModels(self._shelf)
        self._target = self._models.target(case, self._seams)
        lease = self._lease_turn(case)
        self.num_shared = lease.target.length
        self._ended.discard(0)
        self._enter(0, case, lease)
        if 0 not in self.requests:
            raise OutOfPages(f"a dialogue of {len(case.prompt)} tokens before this turn")
        while 0 in self.living:
            self.do(Action("step", (0,)))
        return self.trace

    def _lease_turn(self, case: Case) -> CacheLease:
        """The caches with which the turn `case` begins; the request of the turn before is gone."""
        last_turn = self.requests.pop(0, None)
        self._last_turn = None
        if last_turn is None:
            return self._lease(case, case.prefix)
        tokens = tuple(last_turn.resolved_tokens)
        if case.prompt[: len(tokens)] == tokens and len(case.prompt) > len(tokens):
            self._last_turn = last_turn
            calls_over(last_turn.lease.target).clear()  # the trace counts the forwards of this turn alone
            return last_turn.lease
        self._arena.give_back(last_turn.lease, tokens)
        return self._lease(case, case.prefix)

    def _request_of(self, case: Case, lease: CacheLease) -> Request:
        """The next turn's request, which goes on with the hidden states of the turn before if it has its caches."""
        request = super()._request_of(case, lease)
        if self._last_turn is not None:
            request.follow(self._last_turn)
        return request

    def _end(self, number: int) -> None:
        """Let the request `number` take no further step; its caches stay."""
        self._ended.add(number)
