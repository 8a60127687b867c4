"""The open models of a `bench decode`, and the generations of every way."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from specverify.backends.engine.backend import EngineBackend
from specverify.bench.agreement import Agreement, compare_turn, first_difference, logit_rows, noise_between
from specverify.bench.contexts import draft_window
from specverify.bench.hugging_face import ASSISTED, LOOKUP, PLAIN, generate_turn
from specverify.bench.memory import MB, Peak
from specverify.bench.stage_clock import StageClock
from specverify.bench.turn import TARGET, Turn, Way
from specverify.reference.case import Case
from specverify.reference.draft import Draft
from specverify.reference.trace import Array, Step, Trace

WARM_TOKENS = 8
"""Tokens of the untimed generation that comes first in each way."""


class Run:
    """The open models and the ways of one bench.

    Attributes:
        ways: Names of the ways, the target alone first.
        facts: Backend, dtype, threads and sizes of the prompts.
        agreements: For each prompt that has run, the comparisons of its texts with that of the target alone.
        strays: For each prompt, way and turn whose text leaves that of the target alone, the step where it does.
        prompts: The tokens of each prompt.
    """

    def __init__(
        self, backend: EngineBackend, bases: list[Case], drafts: dict[str, tuple[Way, Draft]], ways: list[str]
    ) -> None:
        self.ways = ways
        self._bases = bases
        self._drafts = {name: draft for name, (_, draft) in drafts.items()}
        self._windows = {name: way.window for name, (way, _) in drafts.items()}
        self._clock = StageClock(backend.declaration.device)
        self._peak = Peak(backend.declaration.device)
        self._backend = backend
        backend.seams = self._clock.plant_in(backend.seams)
        self.agreements: dict[int, list[Agreement]] = {}
        self.strays: dict[tuple[int, str, int], tuple[int, Step]] = {}
        self.prompts: list[Any] = [base.prompt for base in bases]
        self.facts: dict[str, Any] = {
            "backend": backend.declaration.name,
            "dtype": bases[0].dtype,
            "threads": torch.get_num_threads(),
            "prompts": len(bases),
            "longest_prompt": max(len(base.prompt) for base in bases),
        }

    def warm_up(self) -> None:
        """Run each way once, on the first tokens of the first prompt, untimed."""
        short = replace(self._bases[0], stops=replace(self._bases[0].stops, max_new_tokens=WARM_TOKENS))
        for way in self.ways:
            self._turn(way, short, 0, 0)

    def run_prompt(self, number: int, repeats: int) -> Iterator[Turn]:
        """Every way on one prompt, `repeats` times; the texts of the first time are compared."""
        texts = dict[str, Turn]()
        rows = list[Array]()
        noise = 0.0
        for repeat in range(repeats):
            other_ways = self.ways[1:]
            turning = (number + repeat) % max(1, len(other_ways))
            # The target alone comes first: its logits are what the others are compared with.
            for way in (TARGET, *other_ways[turning:], *other_ways[:turning]):
                turn, trace = self._turn(way, self._bases[number], number, repeat)
                if repeat == 0:
                    texts[way] = turn
                    if way == TARGET and trace is not None:
                        rows = logit_rows(trace)
                    elif trace is not None:
                        position = first_difference(texts[TARGET].tokens, turn.tokens)
                        if position is not None:
                            self.strays[number, way, 0] = step_at(trace, position)
                        num_equal = min(len(turn.tokens), len(rows)) if position is None else position
                        noise = max(noise, noise_between(rows, logit_rows(trace), num_equal))
                yield turn
        other_ways = [way for way in texts if way != TARGET]
        self.agreements[number] = [compare_turn(texts[TARGET], rows, texts[way], noise) for way in other_ways]

    def turns_of(self, number: int) -> int:
        """The turns that a way takes for the prompt `number`."""
        return 1

    def _turn(self, way: str, base: Case, number: int, repeat: int) -> tuple[Turn, Trace | None]:
        if way in (PLAIN, LOOKUP, ASSISTED):
            return generate_turn(way, self.transformers_case(way, base), number, repeat), None
        case = replace(base, draft=self._drafts[way]) if way in self._drafts else base
        return self.time_turn(way, case, self._backend.run, number, repeat)

    def transformers_case(self, way: str, base: Case) -> Case:
        """The case of a way of transformers; its assistant is the first of our drafts that is a model."""
        model = next((draft for draft in self._drafts.values() if draft.model is not None), base.draft)
        return replace(base, draft=model) if way == ASSISTED else base

    def time_turn(
        self, way: str, case: Case, play: Callable[[Case], Trace], number: int, repeat: int
    ) -> tuple[Turn, Trace]:
        """The turn and the trace of `play` on `case`, within the window of the way."""
        with draft_window(self._backend, case, self._windows.get(way)):
            self._peak.start()
            self._clock.start()
            trace = play(case)
            seconds = self._clock.stop()
        assert trace.accounting is not None
        trees = [step.drafted.tree for step in trace.steps if step.drafted is not None]
        target, drafting = self._clock.weights
        turn = Turn(
            number, repeat, way, trace.output, seconds, tuple(self._clock.steps),
            tuple(len(step.emitted.tokens) for step in trace.steps if step.emitted is not None),
            self._clock.prefilled, dict(self._clock.stages), trace.accounting.accept_lengths,
            tuple(len(tree) - 1 for tree in trees), tuple(tree.height for tree in trees),
            trace.accounting.draft_calls, dict(trace.fallbacks),
            tuple(step.accepted.path for step in trace.steps if step.accepted is not None),
            self._clock.kv_bytes / MB, self._peak.mb(), target / MB, drafting / MB,
            len(case.prompt),
        )  # fmt: skip
        return turn, trace


def step_at(trace: Trace, position: int) -> tuple[int, Step]:
    """The number of the step that emitted the output's token `position`, or of the last step; and its light part."""
    num_emitted = 0
    for number, step in enumerate(trace.steps):
        assert step.emitted is not None
        num_emitted += len(step.emitted.tokens)
        if position < num_emitted or number == len(trace.steps) - 1:
            # Logits of all nodes over a large vocabulary are not kept.
            return number, replace(step, attended=None, scored=None, committed=None)
    raise ValueError("a run without a step has no text that could differ")
