"""The command `bench decode`: ways to generate a text, timed side by side.

The ways are our engine with the target alone, our engine with each draft and each tree, and transformers' own
generation. Every prompt is run in every way before the next prompt begins, in an order that turns from prompt to
prompt, so that a machine that slows down slows all ways. One untimed generation of each way comes first.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from backends.engine.backend import EngineBackend
from reference.case import Case
from reference.draft import Draft, Ngram
from reference.malformed import Malformed
from reference.trace import Array, Trace
from reports import writing
from reports.progress import Progress
from reports.record import Lines
from specverify.bench.agreement import Agreement, compared, first_difference, noise_between, rows_of
from specverify.bench.budgets import Way, ways_of
from specverify.bench.hugging_face import ASSISTED, LOOKUP, PLAIN, generated, weights
from specverify.bench.memory import MB, Peak, resident_bytes
from specverify.bench.stage_clock import StageClock
from specverify.bench.turn import Turn
from specverify.checkpoints.cases import base_case, ends_of
from specverify.checkpoints.given_draft import given_draft
from specverify.checkpoints.opening import open_checkpoint
from specverify.checkpoints.prompts import prompts_of
from specverify.plan import Plan
from specverify.setup.errors import UnusableInput
from specverify.setup.subjects import manifest, open_planted

TARGET = "target-only"
"""The way that every other one is compared with: our engine without a draft."""

WARM_TOKENS = 8
"""Tokens of the untimed generation that comes first in each way."""


@dataclass(frozen=True)
class Asked:
    """What a bench is to time.

    Attributes:
        plan: Backend, model, prompts, new tokens, dtype, layout and seed.
        drafts: Arguments of `--draft`; each is a way, or several with `nodes` and `depths`.
        nodes: Budgets of drafted nodes; empty for the draft's own.
        depths: Levels below the root; empty for the draft's own.
        repeats: How often each way runs each prompt.
        folder: Where the manifest and a JSON line for each turn are written; None writes neither.
    """

    plan: Plan
    drafts: tuple[str, ...] = (Ngram.TAG,)
    nodes: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    repeats: int = 1
    folder: Path | None = None


@dataclass
class Measured:
    """What a bench has measured.

    Attributes:
        ways: Names of the ways, the target alone first.
        ours: Those of the ways that our engine runs with a draft.
        turns: All timed generations, in the order in which they ran.
        agreements: Comparisons of the texts with those of the target alone.
        facts: Device, dtype, sizes and versions.
        weights: For each way the MiB of the weights of its target and of its draft.
        drafted: Those of the ways that our engine runs with a draft, each with its tree.
    """

    ways: list[str]
    ours: list[str]
    turns: list[Turn]
    agreements: list[Agreement]
    facts: dict[str, Any]
    weights: dict[str, tuple[float, float]] = field(default_factory=dict)
    drafted: list[Way] = field(default_factory=list)


def measure(asked: Asked) -> Measured:
    """Time every way on every prompt.

    Raises:
        UnusableInput: The backend is no engine of ours, or model, prompts or drafts cannot be used.
        MissingInput: This machine lacks something.
    """
    plan = asked.plan
    backend = open_planted(plan.backend, None, plan.mode)
    if not isinstance(backend, EngineBackend):
        raise UnusableInput(
            f"bench decode --backend {plan.backend}: it times the stages of our engine, and this is another"
        )
    assert plan.model is not None
    checkpoint = open_checkpoint(plan.model)
    ends = ends_of(checkpoint)
    prompts = prompts_of(plan, checkpoint)
    bases = [base_case(checkpoint, prompt, number, plan, ends).plain_decode() for number, prompt in enumerate(prompts)]
    made = [
        way
        for given in asked.drafts
        for way in ways_of(given, given_draft(given, checkpoint, backend.declaration), asked.nodes, asked.depths)
    ]
    drafts = {way.name: way.draft for way in made}
    for number, base in enumerate(bases):
        for name, draft in drafts.items():
            _check_fits(name, base, draft, number)
    theirs = [PLAIN, LOOKUP] if backend.declaration.device == "cpu" else []
    if theirs and any(one.model is not None for one in drafts.values()):
        theirs.append(ASSISTED)
    run = _Run(backend, bases, drafts, [TARGET, *drafts, *theirs])
    measured = Measured(run.ways, list(drafts), [], [], run.facts | manifest(backend), drafted=made)
    run.warm_up()
    with ExitStack() as stack:
        lines = None
        if asked.folder is not None:
            asked.folder.mkdir(parents=True, exist_ok=True)
            writing.write_json(asked.folder / "manifest.json", measured.facts | {"asked": _told(asked)})
            lines = stack.enter_context(Lines(asked.folder / "turns.jsonl"))
        progress = stack.enter_context(Progress(len(bases) * asked.repeats * len(run.ways)))
        for number in range(len(bases)):
            for turn in run.prompt(number, asked.repeats, measured.agreements):
                measured.turns.append(turn)
                if lines is not None:
                    lines.append(asdict(turn))
                progress.advance()
    peaks = [resident_bytes() / MB, *(one.peak_mb for one in measured.turns if one.peak_mb is not None)]
    measured.facts["peak_resident_mb"] = max(peaks)
    measured.weights = run.weights
    return measured


class _Run:
    """The open models and the ways of one bench."""

    def __init__(self, backend: EngineBackend, bases: list[Case], drafts: dict[str, Draft], ways: list[str]) -> None:
        self.ways = ways
        self._bases, self._drafts = bases, drafts
        self._clock, self._peak = StageClock(backend.declaration.device), Peak(backend.declaration.device)
        self.weights: dict[str, tuple[float, float]] = {}
        self._backend = backend
        backend.seams = self._clock.planted(backend.seams)
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

    def prompt(self, number: int, repeats: int, agreements: list[Agreement]) -> Iterator[Turn]:
        """Every way on one prompt, `repeats` times; the texts of the first time are compared."""
        texts, rows = dict[str, Turn](), list[Array]()
        noise = 0.0
        for repeat in range(repeats):
            others = self.ways[1:]
            turning = (number + repeat) % max(1, len(others))
            # The target alone comes first: its logits are what the others are compared with.
            for way in (TARGET, *others[turning:], *others[:turning]):
                turn, trace = self._turn(way, self._bases[number], number, repeat)
                if repeat == 0:
                    texts[way] = turn
                    if way == TARGET and trace is not None:
                        rows = rows_of(trace)
                    elif trace is not None:
                        at = first_difference(texts[TARGET].tokens, turn.tokens)
                        same = min(len(turn.tokens), len(rows)) if at is None else at
                        noise = max(noise, noise_between(rows, rows_of(trace), same))
                yield turn
        agreements += [compared(texts[TARGET], rows, turn, noise) for way, turn in texts.items() if way != TARGET]

    def _turn(self, way: str, base: Case, number: int, repeat: int) -> tuple[Turn, Trace | None]:
        if way in (PLAIN, LOOKUP, ASSISTED):
            model = next((one for one in self._drafts.values() if one.model is not None), base.draft)
            theirs = replace(base, draft=model) if way == ASSISTED else base
            self._note(way, weights(way, theirs))
            return generated(way, theirs, number, repeat), None
        case = base if way == TARGET else replace(base, draft=self._drafts[way])
        self._peak.start()
        self._clock.start()
        trace = self._backend.run(case)
        seconds = self._clock.stop()
        self._note(way, self._clock.weights)
        assert trace.accounting is not None
        trees = [step.drafted.tree for step in trace.steps if step.drafted is not None]
        turn = Turn(
            number, repeat, way, trace.output, seconds, tuple(self._clock.steps),
            tuple(len(step.emitted.tokens) for step in trace.steps if step.emitted is not None),
            self._clock.prefilled, dict(self._clock.stages), trace.accounting.accept_lengths,
            tuple(len(tree) - 1 for tree in trees), tuple(tree.height for tree in trees),
            trace.accounting.draft_calls, dict(trace.fallbacks),
            tuple(step.accepted.path for step in trace.steps if step.accepted is not None),
            self._clock.kv_bytes / MB, self._peak.mb(),
        )  # fmt: skip
        return turn, trace

    def _note(self, way: str, held: tuple[int, int]) -> None:
        self.weights[way] = held[0] / MB, held[1] / MB


def _check_fits(name: str, base: Case, draft: Draft, number: int) -> None:
    try:
        replace(base, draft=draft)
    except Malformed as why:
        raise UnusableInput(f"bench decode --draft {name}: prompt {number + 1}: {why}") from None


def _told(asked: Asked) -> dict[str, Any]:
    plan = asked.plan
    return {
        "model": plan.model, "prompts": plan.prompts, "cases": plan.cases, "new_tokens": plan.new_tokens,
        "drafts": asked.drafts, "nodes": asked.nodes, "depths": asked.depths, "repeats": asked.repeats,
        "seed": plan.seed, "layout": plan.layout,
    }  # fmt: skip
