"""Prompts that step together in one session, timed by size of the batch.

A block holds as many prompts as the largest batch, and runs once in batches of every size: each size has the same
prompts. In an overlapped run a step is launched before the results of the last one are taken, as a scheduler that runs
ahead of its host does; on a CPU nothing runs meanwhile, so that such times show its bookkeeping alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from specverify.backends.engine.backend import EngineBackend
from specverify.backends.engine.batch_server import BatchServer
from specverify.backends.engine.two_modes import in_mode
from specverify.bench.agreement import compare_turn, first_difference, noise_between
from specverify.bench.contexts import draft_window
from specverify.bench.decode_run import WARM_TOKENS, Run, clocked, shown_by, step_at
from specverify.bench.memory import MB
from specverify.bench.tensor_peak import peak_bytes
from specverify.bench.turn import TARGET, Turn, Way
from specverify.reference.case import Case
from specverify.reference.draft import Draft
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Array, Trace

IN_FLIGHT = 2
"""Launched steps of which the host may know no result (`specverify.reference.session.ACTIONS`)."""


@dataclass
class Lane:
    """The progress of one request of a batch.

    Attributes:
        times_s: Seconds from the call to the moment at which the host knew the tokens of each step.
        stages: For each of these steps, the seconds by stage of the whole batch.
        rows: For each emitted token the logits [vocabulary] from which it was chosen.
    """

    times_s: list[float] = field(default_factory=list)
    stages: list[dict[str, float]] = field(default_factory=list)
    rows: list[Array] = field(default_factory=list)


@dataclass
class Texts:
    """The texts of one prompt in a block.

    Attributes:
        target: The turn of the target alone in the smallest batch.
        rows: The logits [vocabulary] behind each of its tokens.
        others: The turns that are compared with it.
        noise: The largest root mean square of the differences of logits on the same tokens.
    """

    target: Turn
    rows: list[Array]
    others: list[Turn] = field(default_factory=list)
    noise: float = 0.0


class BatchRun(Run):
    """The open models and the ways of one bench in batches.

    Args:
        backend: The engine.
        bases: For each prompt the case of the target alone; a multiple of the largest batch of them.
        drafts: The ways with a draft.
        batches: The sizes, ascending.
        overlapped: Whether steps are launched ahead of their results.
    """

    def __init__(
        self,
        backend: EngineBackend,
        bases: list[Case],
        drafts: dict[str, tuple[Way, Draft]],
        batches: Sequence[int],
        overlapped: bool = False,
    ) -> None:
        super().__init__(backend, bases, drafts, [TARGET, *drafts])
        self._batches = tuple(batches)
        self._overlapped = overlapped
        self._clock.by_request = False
        self.facts |= {"batches": list(batches), "overlapped": overlapped}

    def blocks(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """See `Run`; as many prompts as the largest batch."""
        most = self._batches[-1]
        wanted_blocks = dict.fromkeys(number // most for number in numbers)
        return [tuple(range(block * most, (block + 1) * most)) for block in wanted_blocks]

    def turns_of(self, number: int) -> int:
        """See `Run`; a turn in each size of batch."""
        return len(self._batches)

    def warm_up(self) -> None:
        """See `Run`; the first block in batches of every size."""
        for way in self.ways:
            for batch in self._batches:
                longest = sorted(self._bases, key=lambda base: len(base.prompt))[-batch:]
                stops = replace(longest[0].stops, max_new_tokens=WARM_TOKENS)
                self.play(way, [replace(base, stops=stops) for base in self._bases[:batch]])
                allocated = peak_bytes(self._backend.declaration.device, partial(self.play, way, longest))
                self._peaks_mb[way, batch] = allocated / MB

    def run_block(self, block: Sequence[int], repeats: int) -> Iterator[Turn]:
        """See `Run`."""
        texts = dict[int, Texts]()
        for repeat in range(repeats):
            other_ways = self.ways[1:]
            turning = (block[0] // self._batches[-1] + repeat) % max(1, len(other_ways))
            for way in (TARGET, *other_ways[turning:], *other_ways[:turning]):
                for batch in self._batches:
                    for first in range(0, len(block), batch):
                        group = block[first : first + batch]
                        for turn, rows, trace in self._turns(way, group, repeat):
                            if repeat == 0 and self.compares:
                                self._take_text(texts, turn, rows, trace)
                            yield self.with_peak(turn)
        for number in block:
            prompt_texts = texts.get(number)
            self.agreements[number] = (
                []
                if prompt_texts is None
                else [
                    compare_turn(prompt_texts.target, prompt_texts.rows, turn, prompt_texts.noise)
                    for turn in prompt_texts.others
                ]
            )

    def _turns(self, way: str, group: Sequence[int], repeat: int) -> Iterator[tuple[Turn, list[Array], Trace]]:
        """The turns of the prompts `group` in one batch, each with the logits behind its tokens and its trace."""
        trace, lanes = self.play(way, [self.base(number, repeat) for number in group])
        assert trace.shared is not None
        shared = clocked(self._clock)
        for lane_number, (number, lane) in enumerate(zip(group, lanes, strict=True)):
            lane_trace = trace.shared.requests[lane_number]
            assert lane_trace is not None
            names = list(dict.fromkeys(name for step in lane.stages for name in step))
            stage_steps = {name: tuple(step.get(name, 0.0) for step in lane.stages) for name in names}
            stages = {"prefill": shared["stages"].get("prefill", 0.0)}
            stages |= {name: sum(seconds) for name, seconds in stage_steps.items()}
            # What the host spent before the first step belongs to no step.
            stages["host"] = stages.get("host", 0.0) + lane.times_s[-1] - sum(stages.values())
            turn = Turn(
                number,
                repeat,
                way,
                lane_trace.output,
                lane.times_s[-1],
                tuple(lane.times_s),
                context=len(self._bases[number].prompt),
                # Counted once for the batch.
                fallbacks=dict(trace.fallbacks) if lane_number == 0 else {},
                batch=len(group),
                **shown_by(lane_trace),
                **shared | {"stages": stages, "stage_steps": stage_steps},
            )
            yield turn, lane.rows, lane_trace

    def play(self, way: str, cases: Sequence[Case]) -> tuple[Trace, list[Lane]]:
        """Generate the texts of `cases` side by side, in one session on the clock."""
        if way in self._drafts:
            cases = [replace(case, draft=self._drafts[way]) for case in cases]
        head, *others = cases
        mates = tuple(Mate(case.prompt, case.draft, case.sampling, case.stops) for case in others)
        together = replace(head, session=Session(mates))
        lanes = [Lane() for _ in cases]
        clock = self._clock
        with draft_window(self._backend, head, self._windows.get(way)):
            clock.start()
            seams = in_mode(self._backend.seams, self._backend.mode)
            server = BatchServer(together, self._backend.models, seams)
            for number in range(len(cases)):
                server.do(Action("add", (number,)))
            clock.end_prefill()
            for step in self._launches(server) if self._overlapped else _steps(server):
                server.do(step)
                if step.kind != "launch":  # a launch belongs to the step of its results
                    clock.end_step()
                    self._take_steps(server, lanes)
        return server.trace, lanes

    def _launches(self, server: BatchServer) -> Iterator[Action]:
        """Launches ahead of the results, and the taking of these, until every request has ended."""
        in_flight = list[tuple[int, ...]]()
        while server.living or in_flight:
            living = tuple(sorted(server.living))
            if living and len(in_flight) < IN_FLIGHT:
                launched = len(server.events)
                yield Action("launch", living)
                numbers = tuple(event.request for event in server.events[launched:] if event.kind == "launched")
                if numbers:
                    in_flight.append(numbers)
                    continue
            if in_flight:
                yield Action("resolve", in_flight.pop(0)[:1])

    def _take_steps(self, server: BatchServer, lanes: Sequence[Lane]) -> None:
        """Note the steps whose results the host has just learnt, and let go of the logits of their other nodes."""
        clock = self._clock
        with clock.paused():
            for number, lane in enumerate(lanes):
                request = server.requests[number]
                for place in range(len(lane.times_s), len(request.steps)):
                    step = request.steps[place]
                    assert step.scored is not None
                    assert step.accepted is not None
                    assert step.emitted is not None
                    lane.times_s.append(clock.steps[-1])
                    lane.stages.append(clock.step_stages[-1])
                    if self.compares:
                        accepted_rows = step.accepted.path[: len(step.emitted.tokens)]
                        lane.rows += [step.scored.logits[row].copy() for row in accepted_rows]
                    request.steps[place] = replace(step, scored=None)
        requests = [server.requests[number] for number in sorted(server.living)] or [server.requests[0]]
        first = requests[0]
        clock.weigh(first.target, [request.lease for request in requests], first.lease.owner or first.draft)

    def _take_text(self, texts: dict[int, Texts], turn: Turn, rows: list[Array], trace: Trace) -> None:
        """Take the target's own text, or compare another one with it."""
        if turn.prompt not in texts:
            texts[turn.prompt] = Texts(turn, rows)
            return
        prompt_texts = texts[turn.prompt]
        position = first_difference(prompt_texts.target.tokens, turn.tokens)
        if position is not None:
            self.strays[turn.prompt, turn.way, 0, turn.batch] = step_at(trace, position)
        num_equal = min(len(rows), len(prompt_texts.rows)) if position is None else position
        prompt_texts.noise = max(prompt_texts.noise, noise_between(prompt_texts.rows, rows, num_equal))
        prompt_texts.others.append(turn)


def _steps(server: BatchServer) -> Iterator[Action]:
    """Steps of all living requests, until every request has ended."""
    while server.living:
        yield Action("step", tuple(sorted(server.living)))
