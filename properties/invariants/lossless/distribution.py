"""Invariants of the output's distribution, tested on the backend's random numbers.

The tests are e-values with a stated error rate: a clean run is condemned with probability 1e-6 at most. Whole
generations test any backend, and rounds on tables of probabilities test a backend that has that entry point.
"""

from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from specverify.properties.generations import (
    FULL_EFFORT,
    RUN_TESTS,
    SMALL_EFFORT,
    Effort,
    GenerationEvidence,
    generation_evidence,
    session_evidence,
)
from specverify.properties.invariants.applies import is_sampled, tables_of
from specverify.properties.laws.draw_by_draw import tried_siblings
from specverify.properties.laws.sampled.cells import judge_blocks
from specverify.properties.laws.sampled.gate import log_bar
from specverify.properties.laws.worlds import world_of
from specverify.properties.streams import stream_of
from specverify.properties.verdict.finding import Comparisons, Evidence, Finding
from specverify.properties.verdict.invariant import AGAIN, Fact, Invariant, NotApplicable, Oracle, needing
from specverify.properties.verdict.subject import Subject
from specverify.properties.verdict.variants import dice
from specverify.reference.architecture import Checkpoint
from specverify.reference.case import Case
from specverify.reference.oracle import law
from specverify.reference.trace import Array, Stage, Step

TV = 0.05
"""Smallest total variation that a test is planned to detect with probability .99."""

MOST_ROUNDS = 60_000
"""Largest number of rounds drawn in one world."""

EVERY = 6
"""One case in this many is tested; if fewer were, a request decoded by arg-max would stay undetected too long."""

MATES = 64
"""Requests of the batch on which `own_seed` changes the order."""


def distribution(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Whole generations follow the law; where the backend has tables, blocks drawn on tables follow it too.

    Each of the two is a test of its own. The gate of the run counts its evidence
    (`specverify.properties.laws.sampled.gate`). In a session of an engine that batches by itself, the requests that
    sample are tested as they stand beside each other.
    """
    if case.session is not None:
        evidence = session_evidence(case, oracle, subject)
        yield Evidence("lossless.distribution", evidence.log_e, evidence.draws)
        yield Comparisons(evidence.draws)
        yield from _law_finding(case, evidence)
        return
    if subject.tables is None or isinstance(case.model, Checkpoint):
        yield from _by_generations(case, oracle, subject, FULL_EFFORT)
        return
    with suppress(NotApplicable):  # a lossy rule, or processors without a bound: tables can still test it
        yield from _by_generations(case, oracle, subject, SMALL_EFFORT)
    yield from _by_rounds(case, subject)


def _by_rounds(case: Case, subject: Subject) -> Iterator[Fact]:
    """Test blocks of tokens drawn on tables, by a screen and then by a bet, for each partition of the blocks.

    Partitions are joint cells over two and more tokens, given rejection at each depth or given full acceptance.
    """
    tables = tables_of(subject, "on tables")
    world = world_of(case, "distribution")
    exact_law = law.world_law(world, whole_tree_first=False)
    expected = {block: float(mass) for block, mass in exact_law.items()}
    rng = dice(case, "rounds")

    def draw(rounds: int) -> Array:
        return tables.samples(world, rng.integers(0, 2**62, size=rounds)).tokens

    height = world.shape.height
    for law_test in judge_blocks(draw, expected, height, TV, RUN_TESTS, most=MOST_ROUNDS):
        outcome = law_test.outcome
        yield Evidence("lossless.distribution", outcome.log_e, outcome.n, outcome.smallest_tv, outcome.p_screen)
        yield Comparisons(outcome.n)
        if outcome.log_e >= log_bar(RUN_TESTS):
            where: dict[str, int | str] = {"draws": outcome.n, "side": law_test.partition.name}
            name = "lossless.distribution"
            # e^23 is RUN_TESTS / 1e-6, the bar of a single law; log_e is infinite after a token of probability 0.
            yield Finding(name, Stage.ACCEPTED, 0, where, "evidence below e^23", round(min(outcome.log_e, 1e6), 1))
            return


def _by_generations(case: Case, oracle: Oracle, subject: Subject, effort: Effort) -> Iterator[Fact]:
    """Test draws of several generations, and the independence of neighbours (`specverify.properties.generations`)."""
    name = "lossless.distribution"
    evidence = generation_evidence(case, oracle, subject, effort)
    assert evidence.first is not None
    stream = stream_of(name, case)
    resolution = evidence.links.resolution
    yield Evidence(
        name,
        evidence.log_e,
        evidence.draws,
        stream=stream,
        parts=evidence.parts,
        resolution=resolution,
        groups=evidence.links.groups,
    )
    yield Comparisons(evidence.draws)
    yield from _law_finding(case, evidence)


def _law_finding(case: Case, evidence: GenerationEvidence) -> Iterator[Finding]:
    """A finding where the evidence alone would condemn a run."""
    if evidence.log_e >= log_bar(RUN_TESTS):
        where: dict[str, int | str] = {
            "draws": evidence.draws,
            "tokens": evidence.tokens,
            "side": f"link {evidence.worst}",
        }
        stage = Stage.EMITTED if case.session is not None else _stage(case, evidence)
        log_e = round(min(evidence.log_e, 1e6), 1)
        yield Finding("lossless.distribution", stage, 0, where, "evidence below e^23", log_e)


def _stage(case: Case, evidence: GenerationEvidence) -> Stage:
    """The stage to which wrong generations point: emission, unless the trace shows that acceptance chose the tokens."""
    assert evidence.first is not None
    if evidence.worst == "draft" and tried_siblings(case, evidence.first) is not None:
        return Stage.DRAFTED
    # If emission passed on the chosen tokens in every step, the choice itself has the wrong law.
    chosen = all(
        step.drafted is not None and step.accepted is not None and step.emitted is not None and _emits_block(step)
        for step in evidence.first.steps
    )
    return Stage.ACCEPTED if chosen else Stage.EMITTED


def _emits_block(step: Step) -> bool:
    """Whether the emitted tokens are a prefix of the block that acceptance chose."""
    assert step.drafted is not None
    assert step.accepted is not None
    assert step.emitted is not None
    tree = step.drafted.tree
    accepted = step.accepted
    block = (*(tree.token[node] for node in accepted.path[1:] if node < len(tree)), accepted.bonus)
    return block[: len(step.emitted.tokens)] == step.emitted.tokens


def own_seed(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """A request's output depends on its own seed, not on its place in the batch or on its neighbours."""
    tables = tables_of(subject, "on tables")
    world = world_of(case, "seeds")
    rng = dice(case, "mates")
    seeds = rng.integers(0, 2**62, size=MATES)
    order = rng.permutation(MATES)
    # The same seeds in another order of the batch, then one of them in a batch of its own.
    in_order, shuffled, alone = tables.batches(world, (seeds, seeds[order], seeds[:1]))
    yield Comparisons(MATES + 1)
    for index, (expected, observed) in enumerate(zip(in_order.tokens[order], shuffled.tokens, strict=True)):
        if not np.array_equal(expected, observed):
            yield _seed_finding(index, expected, observed)
            return
    if not np.array_equal(alone.tokens[0], in_order.tokens[0]):
        yield _seed_finding(0, alone.tokens[0], in_order.tokens[0])


def _seed_finding(request: int, expected_block: Array, observed_block: Array) -> Finding:
    where: dict[str, int | str] = {"request": request, "side": "seed"}
    expected, observed = (
        tuple(int(token) for token in block if token >= 0) for block in (expected_block, observed_block)
    )
    return Finding("lossless.seeded", Stage.ACCEPTED, 0, where, expected, observed)


def _has_law(case: Case) -> bool:
    """Whether a single request samples, or some request of a session whose engine batches by itself."""
    if case.session is None:
        return is_sampled(case)
    requests = range(1 + len(case.session.mates))
    return case.session.continuous and any(is_sampled(case.alone(number)) for number in requests)


INVARIANTS = (
    Invariant(
        "lossless.distribution",
        "On the backend's own random numbers, emitted blocks are from the law, by e-values with a stated error rate.",
        needing(),
        distribution,
        _has_law,
        every=EVERY,
        speaks_of="both",
    ),
    Invariant(
        "lossless.seeded",
        "A request's output follows its own seed, whatever its place in the batch and its neighbours.",
        needing(),
        own_seed,
        is_sampled,
        every_again=AGAIN,
    ),
)
