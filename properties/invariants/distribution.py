"""Distribution: on the backend's own random numbers, what comes out is from the law, with a stated error rate."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from properties.chance.blackbox import judge_blocks
from properties.chance.gate import log_bar
from properties.chance.links import Links
from properties.closeness import noise
from properties.conditional import logit_bound, trials, walked
from properties.finding import Evidence, Finding
from properties.invariant import TURNS, Fact, Invariant, NotApplicable, Oracle, Unobserved, needing
from properties.invariants.processing import sampled
from properties.subject import Subject, Tables
from properties.variants import dice
from properties.worlds import promised, world_of
from reference import law
from reference.architecture import Checkpoint
from reference.case import Case
from reference.trace import Array, Stage

RUN_TESTS = 10_000
"""Tests that one run may hold: a single law is a finding of its own once its evidence would condemn so large a run."""

TV = 0.05
"""Total variation that a test is planned to see with probability .99."""

MOST_ROUNDS = 60_000
"""Rounds of one world at most."""

MATES = 64
"""Requests of a batch whose order is changed."""


MOST_RUNS = 24
"""Generations of one case at most, where the law is tested on generations: fewer than a subject remembers."""

ENOUGH_TOKENS = 300
"""Tokens of those generations, after which no other is begun."""


def doors(subject: Subject) -> Tables:
    """The backend's tables, which need no tape here."""
    if subject.tables is None:
        raise Unobserved("the backend's sampling cannot be run on tables")
    return subject.tables


def distribution(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """On tables where the backend has them; on whole generations without them, and on real checkpoints."""
    if subject.tables is None or isinstance(case.model, Checkpoint):
        yield from _by_generations(case, oracle, subject)
    else:
        yield from _by_rounds(case, subject)


def _by_rounds(case: Case, subject: Subject) -> Iterator[Fact]:
    """Screen, then bet: joint cells over two tokens and more, given rejection at each depth, given full acceptance."""
    tables, world = doors(subject), world_of(case, "distribution")
    wanted = law.world_law(world, whole_tree_first=False)
    expected = {block: float(mass) for block, mass in wanted.items()}
    rng = dice(case, "rounds")

    def draw(rounds: int) -> Array:
        return tables.samples(world, rng.integers(0, 2**62, size=rounds)).tokens

    height = world.shape.height
    for judged in judge_blocks(draw, expected, height, TV, RUN_TESTS, most=MOST_ROUNDS):
        outcome = judged.outcome
        yield Evidence("lossless.distribution", outcome.log_e, outcome.n, outcome.smallest_tv, outcome.p_screen)
        if outcome.log_e >= log_bar(RUN_TESTS):
            where: dict[str, int | str] = {"draws": outcome.n, "side": judged.partition.name}
            name = "lossless.distribution"
            yield Finding(name, Stage.ACCEPTED, 0, where, "evidence below e^23", round(min(outcome.log_e, 1e6), 1))
            return


def _by_generations(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """One e-process over the draws of several generations, each draw given all before it (`properties.conditional`).

    A case on a small model is run with seeds of its own, until ENOUGH_TOKENS, MOST_RUNS or enough evidence; on a
    checkpoint it is run as it is, unless a tape, which somebody chose, holds its coins. A backend that takes no seed
    just runs again.
    """
    if not promised(case):
        raise NotApplicable("the rule does not promise the target's law here")
    name, links, tokens, first = "lossless.distribution", Links(), 0, None
    bound = logit_bound(case, noise(case, oracle, subject))
    for run in _runs(case):
        trace = subject(run)
        first = trace if first is None else first
        for trial in trials(run, oracle, trace, bound):
            links.add(trial)
        tokens += len(trace.output)
        if links.log_e >= log_bar(RUN_TESTS) or tokens >= ENOUGH_TOKENS:
            break
    assert first is not None
    yield Evidence(name, links.log_e, links.trials)
    if links.log_e >= log_bar(RUN_TESTS):
        worst = max(links.log_es, key=lambda link: links.log_es[link])
        where: dict[str, int | str] = {"draws": links.trials, "tokens": tokens, "side": f"link {worst}"}
        stage = Stage.EMITTED if walked(case, first) is None else Stage.DRAFTED if worst == "draft" else Stage.ACCEPTED
        yield Finding(name, stage, 0, where, "evidence below e^23", round(min(links.log_e, 1e6), 1))


def _runs(case: Case) -> Iterator[Case]:
    """The case on coins that nobody chose: its own if they come from a seed and its model is a real one."""
    if isinstance(case.model, Checkpoint) and not case.sampling.tape:
        yield case
        return
    seeds = dice(case, "generations").integers(0, 2**62, size=1 if isinstance(case.model, Checkpoint) else MOST_RUNS)
    for seed in seeds.tolist():
        yield replace(case, sampling=replace(case.sampling, tape=(), seed=seed))


def own_seed(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """A request's output follows its own seed, whatever place it has in the batch and whoever its neighbours are."""
    tables, world = doors(subject), world_of(case, "seeds")
    rng = dice(case, "mates")
    seeds, order = rng.integers(0, 2**62, size=MATES), rng.permutation(MATES)
    one, other = tables.samples(world, seeds), tables.samples(world, seeds[order])
    alone = tables.samples(world, seeds[:1])
    for at, (wanted, seen) in enumerate(zip(one.tokens[order], other.tokens, strict=True)):
        if not np.array_equal(wanted, seen):
            yield _unlike(at, wanted, seen)
            return
    if not np.array_equal(alone.tokens[0], one.tokens[0]):
        yield _unlike(0, alone.tokens[0], one.tokens[0])


def _unlike(at: int, wanted: Array, seen: Array) -> Finding:
    where: dict[str, int | str] = {"request": at, "side": "seed"}
    expected, observed = (tuple(int(token) for token in block if token >= 0) for block in (wanted, seen))
    return Finding("lossless.seeded", Stage.ACCEPTED, 0, where, expected, observed)


INVARIANTS = (
    Invariant(
        "lossless.distribution",
        "On the backend's own random numbers, emitted blocks are from the law, by e-values with a stated error rate.",
        needing(),
        distribution,
        sampled,
        every=2 * TURNS,
    ),
    Invariant(
        "lossless.seeded",
        "A request's output follows its own seed, whatever its place in the batch and its neighbours.",
        needing(),
        own_seed,
        sampled,
    ),
)
