"""The prefill side: a process that prefills requests and sends them on.

Of some it also takes the first step. A request also passes through it in the middle of its text: it is taken, made
anew, and sent back.
"""

from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from specverify.backends.engine.disaggregated.terms import Terms, failure
from specverify.backends.engine.handover.mailbox import Mailbox
from specverify.backends.engine.handover.packet import pack
from specverify.backends.engine.model.models import ModelCache
from specverify.backends.engine.request import Request
from specverify.backends.engine.server import Server
from specverify.backends.engine.step.naming import naming_stage
from specverify.reference.case import Case
from specverify.reference.trace import Stage, Step, Trace

SIDE = "prefill"


class PrefillServer(Server):
    """The server of one case on the prefill side; it holds no request for longer than one command."""

    def prefill_packet(self, number: int, case: Case, first: bool) -> tuple[bytes, list[Step]]:
        """The packet of a new request after its prefill, or after its first step, and the steps taken."""
        request = self._open_request(number, case)
        with naming_stage(request):
            request.prefill()
        if first:
            self._step((number,))
        return self._send_off(number, request), request.steps

    def pass_on(self, number: int, case: Case, hop: int, packet: bytes) -> bytes:
        """The packet of a request that has been taken over from `packet`, after one more hand-over."""
        request = self._open_request(number, case)
        request.hops = hop
        with naming_stage(request):
            request.stage = Stage.COMMITTED
            arrived = self._seams.hand_over.unpack(packet, self._expected(request, number))
            self._room(request.lease, len(arrived.tokens))
            request.draft = self._draft(case, request.lease, arrived.draft_steps)
            request.carry_on(arrived, [])
        request.hops = hop + 1
        # The step that told the log-probability is on the other side.
        return self._send_off(number, request, arrived.logprob)

    def _open_request(self, number: int, case: Case) -> Request:
        lease = self._lease(case, ())
        request = self._request_of(case, lease)
        self._room(lease, len(case.prompt))
        self.requests[number] = request
        self._tries.learn(number, case.draft, request.tokens)
        return request

    def _send_off(self, number: int, request: Request, logprob: float | None = None) -> bytes:
        with naming_stage(request):
            request.stage = Stage.COMMITTED
            state = request.carried_state()
            state = state if logprob is None else replace(state, logprob=logprob)
            packet = pack(state, request.case, number, request.hops)
        self._arena.give_back(request.lease)
        del self.requests[number]
        return packet

    @property
    def counters(self) -> Trace:
        """An empty trace with the seconds, the layers and the fallbacks of this side's forwards."""
        return self._models.with_counters(Trace((), (), None))

    def _end(self, number: int) -> None:
        """Leave the pages of a request that has ended in its first step: it is sent as all others are."""


def prefill_side(terms: Terms, wire: Connection, life: Connection, foreign: list[Connection]) -> None:
    """Be the prefill side until the decode side is gone; `foreign` are ends of wires that a fork has brought along."""
    for connection in foreign:
        connection.close()
    torch.set_num_threads(1)  # a fork must not use threads of a pool that its parent began
    shelf = ModelCache("cpu")
    with suppress(Exception):  # the other side tells of it
        mailbox = terms.mailbox(SIDE, life)
        run = 0
        server = None
        while True:
            word, *arguments = wire.recv()
            terms.beat(SIDE)
            try:
                if word == "open":
                    run, case = arguments
                    server = None
                    server = PrefillServer(case, shelf, terms.seams)
                    wire.send(("done", None))
                    continue
                assert server is not None
                if word == "count":
                    wire.send(("done", server.counters))
                    continue
                letters, steps = _answer_command(terms, server, mailbox, run, word, arguments)
            except Exception as why:
                wire.send(failure(why))
                continue
            wire.send(("letters", (len(letters), steps)))
            for letter in letters:
                mailbox.post(letter)
                terms.beat(SIDE)


def _answer_command(
    terms: Terms, server: PrefillServer, mailbox: Mailbox, run: int, word: str, arguments: list[Any]
) -> tuple[list[bytes], list[Step]]:
    """The letters that answer a command, and the steps that were taken for it."""
    hand_over = terms.seams.hand_over
    if word == "prefill":
        packet, steps = server.prefill_packet(*arguments)
    else:
        number, case, hop, letters = arguments
        key = (run, number, hop)
        packet = hand_over.receive_packet(mailbox, key, letters, terms.patience, lambda: terms.beat(SIDE))
        packet = server.pass_on(number, case, hop, packet)
        steps = []
    return hand_over.letters_of(packet, run), steps
