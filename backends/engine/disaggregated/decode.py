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

from specverify.backends.engine.disaggregated.terms import FAILURES, Terms, failure
from specverify.backends.engine.handover.by_gloo import SIDES
from specverify.backends.engine.handover.mailbox import Mailbox, PeerLost
from specverify.backends.engine.kv.arena import CacheLease
from specverify.backends.engine.model.models import ModelCache
from specverify.backends.engine.overlap_server import OverlapServer
from specverify.backends.engine.request import Request
from specverify.backends.engine.seams import Seams
from specverify.backends.engine.step.naming import naming_stage
from specverify.reference.case import Case
from specverify.reference.session import Action
from specverify.reference.trace import Stage, Step, Trace

SIDE, OTHER_SIDE = "decode", "prefill"


class Prefiller:
    """The prefill side, as the decode side sees it."""

    def __init__(self, terms: Terms, wire: Connection, mailbox: Mailbox) -> None:
        self._terms = terms
        self._wire = wire
        self._mailbox = mailbox
        self._run = 0

    def open(self, run: int, case: Case) -> None:
        """Begin the case of that number on the other side."""
        self._run = run
        self._ask("open", run, case)

    def prefill_packet(self, number: int, case: Case, first: bool) -> tuple[bytes, list[Step]]:
        """See `PrefillServer.prefill_packet`."""
        letters, steps = self._ask("prefill", number, case, first)
        return self._packet(number, 0, letters), steps

    def pass_on(self, number: int, case: Case, hop: int, packet: bytes) -> bytes:
        """The packet that comes back from the other side, after one more hand-over."""
        letters = self._terms.seams.hand_over.letters_of(packet, self._run)
        self._send("pass", number, case, hop, len(letters))
        for letter in letters:
            self._mailbox.post(letter)
            self._terms.beat(SIDE)
        count, _ = self._answer()
        return self._packet(number, hop + 1, count)

    def with_counters(self, trace: Trace) -> Trace:
        """`trace` with the seconds, the layers and the fallbacks of the other side's forwards."""
        prefill_trace: Trace = self._ask("count")
        return replace(
            trace,
            forward_s=(trace.forward_s or 0) + (prefill_trace.forward_s or 0),
            fallbacks=dict(Counter(trace.fallbacks or {}) + Counter(prefill_trace.fallbacks or {})),
            attention_calls=(trace.attention_calls or 0) + (prefill_trace.attention_calls or 0),
        )

    def _packet(self, number: int, hop: int, letters: int) -> bytes:
        key = (self._run, number, hop)
        hand_over = self._terms.seams.hand_over
        return hand_over.receive_packet(
            self._mailbox, key, letters, self._terms.patience, lambda: self._terms.beat(SIDE)
        )

    def _ask(self, *message: Any) -> Any:
        self._send(*message)
        return self._answer()

    def _send(self, *message: Any) -> None:
        try:
            self._wire.send(message)
        except OSError as why:
            raise PeerLost(f"the {OTHER_SIDE} side takes no requests") from why

    def _answer(self) -> Any:
        """The other side's answer.

        Raises:
            Exception: One of FAILURES, as the other side told it.
            PeerLost: The other side is gone, or gives no sign.
        """
        side = SIDES.index(OTHER_SIDE)
        beats = self._terms.beats[side]
        self._terms.beats[len(SIDES)] = 1
        try:
            while not self._wire.poll(self._terms.patience):
                if self._terms.beats[side] == beats:
                    raise PeerLost(f"the {OTHER_SIDE} side lags: it gave no sign for {self._terms.patience:g} seconds")
                beats = self._terms.beats[side]
            word, answer = self._wire.recv()
        except (EOFError, OSError) as why:
            raise PeerLost(f"the {OTHER_SIDE} side is gone") from why
        finally:
            self._terms.beats[len(SIDES)] = 0
        if word in FAILURES:
            raise FAILURES[word](answer)
        return answer


class DecodeServer(OverlapServer):
    """The server of one case on the decode side."""

    def __init__(self, case: Case, shelf: ModelCache, seams: Seams, prefiller: Prefiller) -> None:
        super().__init__(case, shelf, seams)
        self._prefiller = prefiller

    def _enter(self, number: int, case: Case, lease: CacheLease, source: Request | None = None) -> None:
        # A draft with pages of its own may begin with known ones where the target does not.
        if any(cache.length for cache in lease.caches):
            super()._enter(number, case, lease, source)
            return
        request = self._request_of(case, lease)
        if not self._room(lease, len(case.prompt)):
            self._arena.give_back(lease)
            return
        self.requests[number] = request
        self._tries.learn(number, case.draft, request.tokens)
        with naming_stage(request):
            request.stage = Stage.COMMITTED
            # In a session, actions say when a request takes its first step.
            packet, steps = self._prefiller.prefill_packet(number, case, self.case.session is None)
            arrived = self._seams.hand_over.unpack(packet, self._expected(request, number))
            self._room(lease, len(arrived.tokens))
            if arrived.draft_steps:
                request.draft = self._draft(case, lease, arrived.draft_steps)
            request.carry_on(arrived, steps)
        request.hops = 1
        self._tries.learn(number, case.draft, request.tokens)
        emitted = steps[-1].emitted if steps else None
        if emitted is not None and emitted.finish is not None:
            request.finish = emitted.finish
            self._end(number)

    def _deliver(self, request: Request, number: int) -> bytes:
        packet = self._prefiller.pass_on(number, request.case, request.hops, super()._deliver(request, number))
        request.hops += 1
        return packet


def decode_side(
    terms: Terms, backend_end: Connection, wire: Connection, life: Connection, foreign: list[Connection]
) -> None:
    """Be the decode side until the backend is gone; `foreign` are ends of wires that a fork has brought along."""
    for connection in foreign:
        connection.close()
    torch.set_num_threads(1)  # a fork must not use threads of a pool that its parent began
    shelf = ModelCache("cpu")
    with suppress(EOFError, OSError):  # the backend is gone
        try:
            prefiller = Prefiller(terms, wire, terms.mailbox(SIDE, life))
        except PeerLost as why:
            backend_end.send(failure(why))
            return
        while True:
            run, case = backend_end.recv()
            try:
                prefiller.open(run, case)
                answer: tuple[str, Any] = ("told", _play_case(terms, case, shelf, prefiller))
            except Exception as why:
                answer = failure(why)
            backend_end.send(answer)


def _play_case(terms: Terms, case: Case, shelf: ModelCache, prefiller: Prefiller) -> Trace:
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
    return prefiller.with_counters(server.trace)
