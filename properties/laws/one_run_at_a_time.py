"""Laws by run: a backend that takes a tape but no tables, asked one step at a time what each tape makes it emit."""

from dataclasses import dataclass, replace

import numpy as np

from properties.laws import enumeration
from properties.laws.draw_by_draw import ROUNDING, logit_bound
from properties.laws.worlds import deterministic, pruned
from properties.tolerance.closeness import noise
from properties.verdict.invariant import NotApplicable, Oracle
from properties.verdict.subject import Subject
from reference import tape
from reference.case import Case
from reference.oracle import law, processing
from reference.probability_world import Blocks
from reference.sampling import Stops
from reference.trace import Array
from reference.tree import Shape, Tree

MOST_RUNS = 1000
"""Runs of one law; a case that needs more is left to another."""

MOST_ENDS = 18
"""Vocabulary times the places where a walk may end, above which no law is begun: each is a cell of some 50 runs."""

NODES = {True: 3, False: 2}
"""Nodes of a tree whose tokens are sure, or drawn: each draft coin multiplies the cells."""

AUDIT = (64, 4)
"""Tapes that check all cells, and each, once more: a wrong mass of .07 escapes the first with probability .01."""


@dataclass(frozen=True)
class ByRun:
    """The law of one step.

    Attributes:
        case: The step, as a case of its own.
        found: What the backend emits, and how often.
        off: Total variation between that, completed, and the target's own law.
        allowed: How far the noise of the logits may put it off.
        worst: The emitted prefix after which it is furthest off.
    """

    case: Case
    found: enumeration.Law
    off: float
    allowed: float
    worst: law.Bias | None


def one_step(case: Case) -> Case:
    """The first step of `case` on a small tree, so long that nothing cuts its block.

    Raises:
        NotApplicable: Its draft or its vocabulary makes too many cells, or its law has no bound under noise.
    """
    sure, sampling = deterministic(case), replace(case.sampling, tape=())
    if sampling.processors:
        raise NotApplicable("what custom processors make of noise has no bound")
    draft = case.draft
    if draft.trees is not None:
        first = draft.trees[0] if draft.trees else Tree((0,), case.prompt[-1:])
        kept = sorted(sorted(range(len(first)), key=lambda node: (first.depth[node], node))[: NODES[True]])
        shape: Shape = first.part(kept)
    elif draft.has_law:
        shape = pruned(Shape(draft.shapes[0].parent), NODES[sure])
    else:
        raise NotApplicable("a draft that looks at the text keeps its tree")
    draft = draft.with_shapes((shape,))
    vocab = case.model.vocab_size
    ends = vocab * len(shape) * (1 if sure else vocab ** (len(shape) - 1))
    if ends > MOST_ENDS:
        raise NotApplicable(f"a law of some {ends} cells is too large to be found by single runs")
    small = replace(case, draft=draft, sampling=replace(sampling, min_tokens=0), steps=1)
    return replace(small, stops=Stops(max_new_tokens=shape.height + 1))


def by_run(case: Case, oracle: Oracle, subject: Subject) -> ByRun:
    """The exact law of one step of a lossless rule, found by running the step on one tape after the other.

    Only coins that the rule may use are varied; the others lie still, and acceptance.coins-once says that they may.
    The noise of the logits moves each probability by a factor within exp(+-2e), so each token's law, given those
    before it, by a total variation of exp(2e) - 1 at most, and the completed law of height + 1 tokens by the sum
    over its levels. Coins are multiples of 2^-24 in every dtype but float64, which moves each edge by as much.

    Raises:
        NotApplicable: As `one_step`; more than MOST_RUNS runs; or noise may keep another set of tokens.
        NoTrace: A run broke, or was declined.
    """
    step = one_step(case)
    shape = step.draft.shapes[0]
    rows = _rows(step, oracle, subject, shape)
    found = _law(step, shape, subject)
    height = shape.height + 1
    emitted: law.Law = dict(found.outcomes)
    off = float(law.total_variation(emitted, rows, height))
    edges = found.cells * 2.0**-24
    allowed = height * float(np.expm1(2 * rows.margin)) + edges
    biases = law.where_from(emitted, rows, height)
    return ByRun(step, found, off, allowed, biases[0] if biases else None)


class _Rows:
    """The target's law after each path of tokens, of one step."""

    def __init__(self, case: Case, oracle: Oracle, margin: float) -> None:
        self._case, self._oracle, self.margin = case, oracle, margin
        self._known: dict[tuple[int, ...], list[float]] = {}

    def __call__(self, path: tuple[int, ...]) -> list[float]:
        """The law [V] after `path`, by the oracle's logits.

        Raises:
            NotApplicable: Noise may keep another set of tokens.
        """
        if path not in self._known:
            case = self._case
            line = Tree((0, *range(len(path))), (case.prompt[-1], *path))
            scored = self._oracle(case.rebased(case.prefix, line)).steps[0].scored
            assert scored is not None
            row, settings = scored.logits[-1], (case.sampling, case.stops, case.prompt, path)
            if processing.margin(row, *settings) <= 4 * self.margin:
                raise NotApplicable("noise may keep another set of tokens")
            self._known[path] = processing.law(row, *settings).tolist()
        return self._known[path]


def _rows(step: Case, oracle: Oracle, subject: Subject, shape: Shape) -> _Rows:
    sampling = step.sampling
    stretch = max(sampling.repetition_penalty, 1.0 / sampling.repetition_penalty)
    bound = logit_bound(step, noise(step, oracle, subject)) * stretch / sampling.temperature
    return _Rows(step, oracle, bound + ROUNDING[step.dtype])


def _law(step: Case, shape: Shape, subject: Subject) -> enumeration.Law:
    """The law of `step` over the coins that its rule may use."""
    nodes, wide = len(shape), tape.stride(len(shape))
    kinds = ("accept",) if deterministic(step) else ("draft", "accept")
    kinds = (*kinds, "order") if step.sampling.rule.name == "specinfer" else kinds
    varied = [
        place
        for place in enumeration.decisions(shape)
        if place == wide - 1
        or any(place == tape.place(kind, node, nodes) for kind in kinds for node in range(_first(step), nodes))
    ]
    still = tape.coins(step.sampling, 0, nodes)
    memory: dict[bytes, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def ask(coins: Array) -> Blocks:
        path = np.full((len(coins), shape.height + 1), -1, dtype=np.int64)
        tokens = path.copy()
        for at, row in enumerate(coins):
            key = row.tobytes()
            if key not in memory:
                if len(memory) >= MOST_RUNS:
                    raise NotApplicable(f"more than {MOST_RUNS} runs for one law")
                whole = still.copy()
                whole[varied] = row
                run = subject(replace(step, sampling=replace(step.sampling, tape=tuple(whole.tolist()))))
                accepted = run.steps[0].accepted
                memory[key] = (accepted.path if accepted is not None else (), run.output)
            walked, output = memory[key]
            path[at, : len(walked)], tokens[at, : len(output)] = walked, output
        return Blocks(path, tokens)

    grid = 2**53 if step.dtype == "float64" else 2**24
    audit, each = AUDIT
    return enumeration.law(ask, len(varied), grid=grid, probes=1, alone=True, audit=audit, each=each)


def _first(step: Case) -> int:
    """The first node whose coin may decide: target-only looks at those of parents, the root's among them."""
    return 0 if step.sampling.rule.name == "target-only" else 1
