"""The open models of a `bench decode`, and the generations of every way."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from specverify.backends.engine.backend import EngineBackend
from specverify.backends.shipped import ROWS
from specverify.bench.agreement import Agreement, compare_turn, first_difference, logit_rows, noise_between
from specverify.bench.contexts import draft_window
from specverify.bench.host_waits import HostWaits
from specverify.bench.hugging_face import ASSISTED, LOOKUP, PLAIN, generate_turn
from specverify.bench.memory import MB
from specverify.bench.stage_clock import StageClock
from specverify.bench.tensor_peak import peak_bytes
from specverify.bench.turn import TARGET, Turn, Way
from specverify.reference.case import Case
from specverify.reference.draft import Draft
from specverify.reference.sampling import Sampling
from specverify.reference.trace import Array, Step, Trace

WARM_TOKENS = 8
"""Tokens of the untimed generation that comes first in each way."""


class Run:
    """The open models and the ways of one bench.

    Attributes:
        ways: Names of the ways, the target alone first.
        facts: Backend, dtype, threads and sizes of the prompts.
        agreements: For each prompt that has run, the comparisons of its texts with that of the target alone.
        strays: For each prompt, way, turn and size of batch whose text leaves that of the target alone, the step where
            it does.
        prompts: The tokens of each prompt.
        compares: Whether texts are compared with that of the target alone: sampled ones may differ.
    """

    def __init__(
        self, backend: EngineBackend, bases: list[Case], drafts: dict[str, tuple[Way, Draft]], ways: list[str]
    ) -> None:
        self.ways = ways
        self._bases = bases
        self._drafts = {name: draft for name, (_, draft) in drafts.items()}
        self._windows = {name: way.window for name, (way, _) in drafts.items()}
        self._clock = StageClock(backend.declaration.device)
        self._peaks_mb: dict[tuple[str, int], float] = {}
        self._backend = backend
        backend.seams = self._clock.plant_in(backend.seams)
        self.agreements: dict[int, list[Agreement]] = {}
        self.strays: dict[tuple[int, str, int, int], tuple[int, Step]] = {}
        self.compares = bases[0].sampling.greedy
        self.prompts: list[Any] = [base.prompt for base in bases]
        self.facts: dict[str, Any] = {
            "backend": backend.declaration.name,
            "own_attention": any(row.own_kernel for row in ROWS if row.name == backend.declaration.name),
            "dtype": bases[0].dtype,
            "threads": torch.get_num_threads(),
            "prompts": len(bases),
            "longest_prompt": max(len(base.prompt) for base in bases),
            "sampling": sampling_words(bases[0].sampling),
            "compared": self.compares,
        }

    def warm_up(self) -> None:
        """Run each way, untimed: on the first tokens of the first prompt, and whole where its prompt is the longest.

        The second run is the one whose tensors are counted.
        """
        short = replace(self._bases[0], stops=replace(self._bases[0].stops, max_new_tokens=WARM_TOKENS))
        longest = self.longest_case()
        for way in self.ways:
            self._turn(way, short, 0, 0)
            allocated = peak_bytes(self._backend.declaration.device, partial(self._turn, way, longest, 0, 0))
            self._peaks_mb[way, 0] = allocated / MB
            self._count_waits(way, short)

    def _count_waits(self, way: str, case: Case) -> None:
        """Count the waits of a way in a step, untimed, since the counting itself takes time; nothing on a CPU."""
        device = self._backend.declaration.device
        if device == "cpu":
            return
        with HostWaits(device) as waits:
            turn, _ = self._turn(way, case, 0, 0)
        if waits.count is not None:
            self.facts.setdefault("waits_per_step", {})[way] = waits.count / len(turn.steps)

    def longest_case(self) -> Case:
        """The case of the target alone whose prompt is the longest."""
        return max(self._bases, key=lambda base: len(base.prompt))

    def with_peak(self, turn: Turn) -> Turn:
        """`turn` with the most that its way holds at once, once that was measured."""
        allocated = self._peaks_mb.get((turn.way, turn.batch))
        if allocated is None:
            return turn
        return replace(turn, peak_mb=allocated + (turn.target_mb or 0.0) + (turn.draft_mb or 0.0))

    def base(self, number: int, repeat: int) -> Case:
        """The case of the target alone for a prompt in a round; a request that samples has a seed for each round."""
        base = self._bases[number]
        if base.sampling.greedy:
            return base
        return replace(base, sampling=replace(base.sampling, seed=base.sampling.seed + repeat))

    def blocks(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """The prompts `numbers` in parts that run together, and that a record finishes together."""
        return [(number,) for number in numbers]

    def run_block(self, block: Sequence[int], repeats: int) -> Iterator[Turn]:
        """Every way on the prompts of a block, `repeats` times."""
        for number in block:
            yield from self.run_prompt(number, repeats)

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
                turn, trace = self._turn(way, self.base(number, repeat), number, repeat)
                turn = self.with_peak(turn)
                if repeat == 0 and self.compares:
                    texts[way] = turn
                    if way == TARGET and trace is not None:
                        rows = logit_rows(trace)
                    elif trace is not None:
                        position = first_difference(texts[TARGET].tokens, turn.tokens)
                        if position is not None:
                            self.strays[number, way, 0, 0] = step_at(trace, position)
                        num_equal = min(len(turn.tokens), len(rows)) if position is None else position
                        noise = max(noise, noise_between(rows, logit_rows(trace), num_equal))
                yield turn
        other_ways = [way for way in texts if way != TARGET]
        self.agreements[number] = [compare_turn(texts[TARGET], rows, texts[way], noise) for way in other_ways]

    def turns_of(self, number: int) -> int:
        """The turns that a way takes for the prompt `number` in one round."""
        return 1

    def _turn(self, way: str, base: Case, number: int, repeat: int) -> tuple[Turn, Trace | None]:
        if way in (PLAIN, LOOKUP, ASSISTED):
            aligned = self._backend.mode.aligned
            return generate_turn(way, self.transformers_case(way, base), number, repeat, eager=aligned), None
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
            self._clock.start()
            trace = play(case)
            seconds = self._clock.stop()
        assert trace.accounting is not None
        turn = Turn(
            number,
            repeat,
            way,
            trace.output,
            seconds,
            tuple(self._clock.steps),
            context=len(case.prompt),
            fallbacks=dict(trace.fallbacks),
            attention_calls=trace.attention_calls,
            **shown_by(trace),
            **clocked(self._clock),
        )
        return turn, trace


def shown_by(trace: Trace) -> dict[str, Any]:
    """The fields of a turn that its trace shows."""
    assert trace.accounting is not None
    trees = [step.drafted.tree for step in trace.steps if step.drafted is not None]
    return {
        "emitted": tuple(len(step.emitted.tokens) for step in trace.steps if step.emitted is not None),
        "accepted": trace.accounting.accept_lengths,
        "nodes": tuple(len(tree) - 1 for tree in trees),
        "height": tuple(tree.height for tree in trees),
        "draft_calls": trace.accounting.draft_calls,
        "paths": tuple(step.accepted.path for step in trace.steps if step.accepted is not None),
    }


def clocked(clock: StageClock) -> dict[str, Any]:
    """The fields of a turn that the clock holds."""
    names = list(dict.fromkeys(name for step in clock.step_stages for name in step))
    return {
        "prefill_s": clock.prefilled,
        "stages": dict(clock.stages),
        "stage_steps": {name: tuple(step.get(name, 0.0) for step in clock.step_stages) for name in names},
        "target_kv_mb": clock.kv_bytes[0] / MB,
        "draft_kv_mb": clock.kv_bytes[1] / MB,
        "target_mb": clock.weights[0] / MB,
        "draft_mb": clock.weights[1] / MB,
        "draft_parameters": clock.draft_parameters,
    }


def sampling_words(sampling: Sampling) -> str:
    """The sampling of a bench in words: greedy, or temperature, truncation and rule."""
    if sampling.greedy:
        return "greedy"
    parts = [f"temperature {sampling.temperature:g}"]
    parts += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
    parts += [f"top-k {sampling.top_k}"] if sampling.top_k else []
    return ", ".join([*parts, f"rule {sampling.rule.name}"])


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
