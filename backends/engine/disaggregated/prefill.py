"""The prefill side: a process that prefills requests and sends them on.

Of some it also takes the first step. A request also passes through it in the middle of its text: it is taken, made
anew, and sent back.
"""

from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from backends.engine.ahead.passing import HandOverServer
from backends.engine.disaggregated.terms import Terms, failure
from backends.engine.handover.mailbox import Mailbox, received, sent_as
from backends.engine.model.models import ModelCache
from backends.engine.request import Request
from backends.engine.step.naming import naming
from reference.case import Case
from reference.trace import Stage, Step, Trace

SIDE = "prefill"


class PrefillServer(HandOverServer):
    """The server of one case on the prefill side; it holds no request for longer than one command."""

    def prefilled(self, number: int, case: Case, first: bool) -> tuple[bytes, list[Step]]:
        """The packet of a new request after its prefill, or after its first step, and the steps taken."""
        request = self._opened(number, case)
        with naming(request):
            request.prefill()
        if first:
            self._step((number,))
        return self._leaving(number, request), request.steps

    def passed(self, number: int, case: Case, hop: int, packet: bytes) -> bytes:
        """The packet of a request that has been taken over from `packet`, after one more hand-over."""
        request, over = self._opened(number, case), self._seams.hand_over
        request.hops = hop
        with naming(request):
            request.at = Stage.COMMITTED
            sent = over.unpacked(packet, self._expected(request, number))
            self._room(request.lease, len(sent.tokens))
            request.draft = self._draft(case, request.lease, sent.draft_steps)
            request.carry_on(sent, [], over)
        request.hops = hop + 1
        # The step that told the log-probability is on the other side.
        return self._leaving(number, request, sent.logprob)

    def _opened(self, number: int, case: Case) -> Request:
        lease = self._lease(case, ())
        request = self._seams.request(case, self._target, lease, self._draft(case, lease), self._seams)
        self._room(lease, len(case.prompt))
        self.requests[number] = request
        self._tries.learn(number, case.draft, request.tokens)
        return request

    def _leaving(self, number: int, request: Request, logprob: float | None = None) -> bytes:
        over = self._seams.hand_over
        with naming(request):
            request.at = Stage.COMMITTED
            carried = over.leaves(request.carried())
            carried = carried if logprob is None else replace(carried, logprob=logprob)
            packet = over.packed(carried, request.case, number, request.hops)
        self._arena.give_back(request.lease)
        del self.requests[number]
        return packet

    @property
    def counted(self) -> Trace:
        """An empty trace with the seconds, the layers and the fallbacks of this side's forwards."""
        return self._models.counted(Trace((), (), None))

    def _end(self, number: int) -> None:
        """Leave the pages of a request that has ended in its first step: it is sent as all others are."""


def prefill_side(terms: Terms, wire: Connection, life: Connection, foreign: list[Connection]) -> None:
    """Be the prefill side until the decode side is gone; `foreign` are ends of wires that a fork has brought along."""
    for one in foreign:
        one.close()
    torch.set_num_threads(1)  # a fork must not use threads of a pool that its parent began
    shelf = ModelCache("cpu")
    with suppress(Exception):  # the other side tells of it
        mailbox = terms.mailbox(SIDE, life)
        run, server = 0, None
        while True:
            word, *told = wire.recv()
            terms.beat(SIDE)
            try:
                if word == "open":
                    run, case = told
                    server = None
                    server = PrefillServer(case, shelf, terms.seams)
                    wire.send(("done", None))
                    continue
                assert server is not None
                if word == "count":
                    wire.send(("done", server.counted))
                    continue
                letters, steps = _made(terms, server, mailbox, run, word, told)
            except Exception as why:
                wire.send(failure(why))
                continue
            wire.send(("letters", (len(letters), steps)))
            for letter in letters:
                mailbox.post(letter)
                terms.beat(SIDE)


def _made(
    terms: Terms, server: PrefillServer, mailbox: Mailbox, run: int, word: str, told: list[Any]
) -> tuple[list[bytes], list[Step]]:
    """The letters that answer a command, and the steps that were taken for it."""
    over = terms.seams.hand_over
    if word == "prefill":
        packet, steps = server.prefilled(*told)
    else:
        number, case, hop, letters = told
        of = (run, number, hop)
        packet = received(mailbox, of, letters, terms.patience, over, lambda: terms.beat(SIDE))
        packet, steps = server.passed(number, case, hop, packet), []
    return sent_as(packet, run, over), steps
