"""No invariant raises, whatever trace an engine gives: a table over all invariants and traces that fall short."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from specverify.backends.base import Declaration, Unsupported
from specverify.backends.compositions import open_cpu
from specverify.properties.invariants import ALL
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import NoTrace, Subject
from specverify.reference.case import Case
from specverify.reference.parallel import RankRun
from specverify.reference.trace import Drafted, Shared, Stage, Step, Trace
from specverify.reference.tree import Tree
from specverify.reports import bundle
from specverify.setup.subjects import subject_of
from tests.cases import CORPUS
from tests.corruption import ORACLE
from tests.tiers import each

KINDS = (
    "kv-truncated-not-gathered",
    "draft-claimed-without-grammar",
    "accepted-state-of-wrong-sibling",
    "frontier-of-first-candidates",
    "dispatch-by-batch-before",
    "trie-shared-unasked",
    "rank-greedy-not-broadcast",
    "stale-frame-kept",
    "recurrent-state-lost-by-eviction",
    "pages-published-unwritten",
    "handed-over-hidden-state-late",
    "prompt-logprobs-of-the-token-itself",
    "sibling-not-removed-from-q",
    "vocabulary-map-skipped",
    "expert-router-fed-sibling-row",
    "matcher-kept-behind-rejected-branch",
    "tier-forgets-draft",
    "rope-delta-forgotten",
)
"""Faults of the corpus, whose smallest cases have between them every kind of draft, layout, session and model."""


def steps_of(change: Callable[[tuple[Step, ...]], tuple[Step, ...]]) -> Callable[[Trace], Trace]:
    """The steps of every request, changed."""

    def corrupt_steps(trace: Trace) -> Trace:
        trace = replace(trace, steps=change(trace.steps))
        if trace.shared is None:
            return trace
        requests = tuple(request and replace(request, steps=change(request.steps)) for request in trace.shared.requests)
        return replace(trace, shared=replace(trace.shared, requests=requests))

    return corrupt_steps


def each_step(change: Callable[[Step], Step]) -> Callable[[Trace], Trace]:
    return steps_of(lambda steps: tuple(change(step) for step in steps))


def without(stage: Stage) -> Callable[[Trace], Trace]:
    return each_step(lambda step: replace(step, **{stage.word: None}))  # type: ignore[arg-type]


def in_session(change: Callable[[Shared], Shared]) -> Callable[[Trace], Trace]:
    return lambda trace: trace if trace.shared is None else replace(trace, shared=change(trace.shared))


def bare(step: Step) -> Step:
    """The step with the root alone drafted, and accepted; its other stages follow, or are not shown."""
    if step.drafted is None or step.accepted is None or step.scored is None:
        return step
    scored = replace(step.scored, logits=step.scored.logits[:1], hidden=None, legal=None, refused=None, law=None)
    drafted = Drafted(Tree((0,), step.drafted.tree.token[:1]))
    accepted = replace(step.accepted, path=(0,))
    return replace(step, drafted=drafted, lowered=None, attended=None, scored=scored, accepted=accepted)


def accepting(path: Callable[[Step], tuple[int, ...]]) -> Callable[[Trace], Trace]:
    def change(step: Step) -> Step:
        return step if step.accepted is None else replace(step, accepted=replace(step.accepted, path=path(step)))

    return each_step(change)


def nodes(step: Step) -> int:
    return 0 if step.drafted is None else len(step.drafted.tree)


def emitting(change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Callable[[Trace], Trace]:
    def of_step(step: Step) -> Step:
        if step.emitted is None:
            return step
        return replace(step, emitted=replace(step.emitted, tokens=change(step.emitted.tokens), logprobs=None))

    return each_step(of_step)


def with_ranks(change: Callable[[tuple[RankRun, ...]], tuple[RankRun, ...]]) -> Callable[[Trace], Trace]:
    return lambda trace: trace if trace.ranks is None else replace(trace, ranks=change(trace.ranks))


NO_STEP = RankRun((), (), ())

CORRUPTIONS: dict[str, Callable[[Trace], Trace]] = {
    "no step and no token": lambda trace: replace(steps_of(lambda steps: ())(trace), output=()),
    "tokens and no step": steps_of(lambda steps: ()),
    "one step alone": steps_of(lambda steps: steps[:1]),
    "all steps but the last": steps_of(lambda steps: steps[:-1]),
    "every step twice": steps_of(lambda steps: tuple(step for step in steps for _ in range(2))),
    "bare roots": each_step(bare),
    **{f"no stage {stage.word}": without(stage) for stage in Stage},
    "an empty path": accepting(lambda step: ()),
    "a path beyond the tree": accepting(lambda step: (0, nodes(step))),
    "an empty context": each_step(lambda step: replace(step, context=())),
    "nothing emitted": emitting(lambda tokens: ()),
    "tokens beyond the vocabulary": emitting(lambda tokens: tuple(10**6 for _ in tokens)),
    "no output": lambda trace: replace(trace, output=()),
    "no record of ranks": with_ranks(lambda ranks: ()),
    "ranks that part at once": lambda trace: with_ranks(lambda ranks: (NO_STEP, *ranks[1:]))(
        replace(steps_of(lambda steps: ())(trace), output=())
    ),
    "no request entered": in_session(lambda shared: replace(shared, requests=(None,) * len(shared.requests))),
    "no requests": in_session(lambda shared: replace(shared, requests=(), prompts=())),
    "no session": lambda trace: replace(trace, shared=None),
    "no prompts": in_session(lambda shared: replace(shared, prompts=((),) * len(shared.prompts))),
    "no accounts": in_session(lambda shared: replace(shared, accounts=())),
    "one account": in_session(lambda shared: replace(shared, accounts=shared.accounts[:1])),
    "accounts of nobody": in_session(
        lambda shared: replace(
            shared,
            accounts=tuple(replace(account, committed={}, tables={}, allocated={}) for account in shared.accounts),
        )
    ),
    "no events": in_session(lambda shared: replace(shared, events=())),
    "events alone": in_session(lambda shared: replace(shared, requests=(None,) * len(shared.requests), accounts=())),
}


@dataclass
class Falling:
    """The clean engine, whose traces all fall short in one way; it has no sampling on tables."""

    declaration: Declaration
    runs: Subject
    corruption: Callable[[Trace], Trace]

    def run(self, case: Case) -> Trace:
        try:
            return self.corruption(self.runs(case))
        except NoTrace as absent:
            raise Unsupported("the clean engine has no run of it") from absent


CLEAN = open_cpu()
RUNS = subject_of(CLEAN, 400)


PAIRS = [(kind, corruption) for kind in KINDS for corruption in CORRUPTIONS]


@pytest.mark.parametrize(("kind", "corruption"), each(PAIRS, 13))
def test_no_invariant_raises(kind: str, corruption: str) -> None:
    case = bundle.load(CORPUS / f"{kind}.json").case
    engine = Falling(CLEAN.declaration, RUNS, CORRUPTIONS[corruption])
    verdict = judge(case, ALL, ORACLE, subject_of(engine))
    assert not verdict.internal, [(error.invariant, error.why, error.said) for error in verdict.internal]


def test_ranks_that_part_in_their_first_step_are_a_finding() -> None:
    case = bundle.load(CORPUS / "rank-greedy-not-broadcast.json").case
    engine = Falling(CLEAN.declaration, RUNS, CORRUPTIONS["ranks that part at once"])
    verdict = judge(case, ALL, ORACLE, subject_of(engine))
    (parted,) = [finding for finding in verdict.findings if finding.invariant == "lossless.ranks-agree"]
    assert (parted.step, parted.where["rank"], parted.where["side"]) == (0, 1, "collectives")


def test_a_run_that_took_no_step_is_a_finding() -> None:
    case = bundle.load(CORPUS / "kv-truncated-not-gathered.json").case
    engine = Falling(CLEAN.declaration, RUNS, lambda trace: Trace((), (), None))
    verdict = judge(case, ALL, ORACLE, subject_of(engine))
    assert "lossless.takes-part" in {finding.invariant for finding in verdict.findings}
    assert not verdict.internal
