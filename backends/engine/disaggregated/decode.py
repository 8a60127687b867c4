"""The decode side: a process that plays cases.

The other side prefills their requests. A request whose first pages are known here is prefilled here, as forks are,
and requests that were evicted.
"""

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from backends.engine.ahead.server import OverlapServer
from backends.engine.disaggregated.terms import FAILURES, Terms, failure
from backends.engine.handover.by_gloo import SIDES
from backends.engine.handover.mailbox import Lost, Mailbox, received, sent_as
from backends.engine.kv.arena import CacheLease
from backends.engine.model.models import ModelCache
from backends.engine.request import Request
from backends.engine.seams import Seams
from backends.engine.step.naming import naming
from reference.case import Case
from reference.session import Action
from reference.trace import Stage, Step, Trace

SIDE, OTHER = "decode", "prefill"


class Prefiller:
    """The prefill side, as the decode side sees it."""

    def __init__(self, terms: Terms, wire: Connection, mailbox: Mailbox) -> None:
        self._terms, self._wire, self._mailbox = terms, wire, mailbox
        self._run = 0

    def open(self, run: int, case: Case) -> None:
        """Begin the case of that number on the other side."""
        self._run = run
        self._ask("open", run, case)

    def prefilled(self, number: int, case: Case, first: bool) -> tuple[bytes, list[Step]]:
        """See `PrefillServer.prefilled`."""
        letters, steps = self._ask("prefill", number, case, first)
        return self._packet(number, 0, letters), steps

    def passed(self, number: int, case: Case, hop: int, packet: bytes) -> bytes:
        """The packet that comes back from the other side, after one more hand-over."""
        letters = sent_as(packet, self._run, self._terms.seams.hand_over)
        self._send("pass", number, case, hop, len(letters))
        for letter in letters:
            self._mailbox.post(letter)
            self._terms.beat(SIDE)
        count, _ = self._answer()
        return self._packet(number, hop + 1, count)

    def counted(self, trace: Trace) -> Trace:
        """`trace` with the seconds, the layers and the fallbacks of the other side's forwards."""
        there: Trace = self._ask("count")
        return replace(
            trace,
            forward_s=(trace.forward_s or 0) + (there.forward_s or 0),
            fallbacks=dict(Counter(trace.fallbacks or {}) + Counter(there.fallbacks or {})),
            attention_calls=(trace.attention_calls or 0) + (there.attention_calls or 0),
        )

    def _packet(self, number: int, hop: int, letters: int) -> bytes:
        of, over = (self._run, number, hop), self._terms.seams.hand_over
        return received(self._mailbox, of, letters, self._terms.patience, over, lambda: self._terms.beat(SIDE))

    def _ask(self, *told: Any) -> Any:
        self._send(*told)
        return self._answer()

    def _send(self, *told: Any) -> None:
        try:
            self._wire.send(told)
        except OSError as why:
            raise Lost(f"the {OTHER} side takes no requests") from why

    def _answer(self) -> Any:
        """The other side's answer.

        Raises:
            Exception: One of FAILURES, as the other side told it.
            Lost: The other side is gone, or gives no sign.
        """
        at = SIDES.index(OTHER)
        seen = self._terms.beats[at]
        self._terms.beats[len(SIDES)] = 1
        try:
            while not self._wire.poll(self._terms.patience):
                if self._terms.beats[at] == seen:
                    raise Lost(f"the {OTHER} side lags: it gave no sign for {self._terms.patience:g} seconds")
                seen = self._terms.beats[at]
            word, made = self._wire.recv()
        except (EOFError, OSError) as why:
            raise Lost(f"the {OTHER} side is gone") from why
        finally:
            self._terms.beats[len(SIDES)] = 0
        if word in FAILURES:
            raise FAILURES[word](made)
        return made


class DecodeServer(OverlapServer):
    """The server of one case on the decode side."""

    def __init__(self, case: Case, shelf: ModelCache, seams: Seams, prefiller: Prefiller) -> None:
        super().__init__(case, shelf, seams)
        self._prefiller = prefiller

    def _enter(self, number: int, case: Case, lease: CacheLease) -> None:
        if lease.target.length:
            super()._enter(number, case, lease)
            return
        request = self._seams.request(case, self._target, lease, self._draft(case, lease), self._seams)
        if not self._room(lease, len(case.prompt)):
            self._arena.give_back(lease)
            return
        self.requests[number] = request
        self._tries.learn(number, case.draft, request.tokens)
        over = self._seams.hand_over
        with naming(request):
            request.at = Stage.COMMITTED
            # In a session, actions say when a request takes its first step.
            packet, steps = self._prefiller.prefilled(number, case, self.case.session is None)
            sent = over.unpacked(packet, self._expected(request, number))
            self._room(lease, len(sent.tokens))
            if sent.draft_steps:
                request.draft = self._draft(case, lease, sent.draft_steps)
            request.carry_on(sent, steps, over)
        request.hops = 1
        self._tries.learn(number, case.draft, request.tokens)
        emitted = steps[-1].emitted if steps else None
        if emitted is not None and emitted.finish is not None:
            request.finish = emitted.finish
            self._end(number)

    def _travelled(self, request: Request, number: int) -> bytes:
        packet = self._prefiller.passed(number, request.case, request.hops, super()._travelled(request, number))
        request.hops += 1
        return packet


def decode_side(terms: Terms, asked: Connection, wire: Connection, life: Connection, foreign: list[Connection]) -> None:
    """Be the decode side until the backend is gone; `foreign` are ends of wires that a fork has brought along."""
    for one in foreign:
        one.close()
    torch.set_num_threads(1)  # a fork must not use threads of a pool that its parent began
    shelf = ModelCache("cpu")
    with suppress(EOFError, OSError):  # the backend is gone
        try:
            prefiller = Prefiller(terms, wire, terms.mailbox(SIDE, life))
        except Lost as why:
            asked.send(failure(why))
            return
        while True:
            run, case = asked.recv()
            try:
                prefiller.open(run, case)
                answer: tuple[str, Any] = ("told", _played(terms, case, shelf, prefiller))
            except Exception as why:
                answer = failure(why)
            asked.send(answer)


def _played(terms: Terms, case: Case, shelf: ModelCache, prefiller: Prefiller) -> Trace:
    server = DecodeServer(case, shelf, terms.seams, prefiller)
    if case.session is not None:
        for action in case.session.actions:
            server.do(action)
            terms.beat(SIDE)
    else:
        server.do(Action("add", (0,)))
        while 0 in server.living and (not case.steps or len(server.requests[0].steps) < case.steps):
            server.do(Action("step", (0,)))
            terms.beat(SIDE)
    return prefiller.counted(server.trace)
