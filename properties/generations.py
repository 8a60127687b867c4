"""Generations: whole requests, run by the backend and tested draw by draw.

They take the backend's request path, on coins from seeds: no coin is chosen by whoever made the case.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.special import logsumexp

from specverify.properties.laws.draw_by_draw import Point, draft_bets, logit_bound, points, trials, upper_bounds
from specverify.properties.laws.sampled.draft_faults import ACCEPT, FAULTS, GROUPS
from specverify.properties.laws.sampled.gate import log_bar
from specverify.properties.laws.sampled.links import Links
from specverify.properties.laws.worlds import is_promised, prune_tree
from specverify.properties.tolerance.closeness import noise
from specverify.properties.verdict.invariant import NotApplicable, Oracle, Unobserved
from specverify.properties.verdict.subject import NoTrace, Refusal, Subject
from specverify.properties.verdict.variants import dice
from specverify.reference.architecture import Checkpoint, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Draft
from specverify.reference.malformed import Malformed
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Array, Shared, Trace
from specverify.reference.tree import Shape

RUN_TESTS = 10_000
"""Tests that one run may hold: a single law is a finding of its own if its evidence alone would condemn such a run."""

HOT = 8.0
"""Temperature of every second run where few tokens are asked for.

At lower temperatures the built-in models are so sure that drawn tokens and the arg-max are often the same.
"""

DOUBT = 3.0
"""Log of the evidence beyond which LONGER times as much is asked of a case that was to be asked little.

A correct backend gets there on one case in 20 at most. Asking for more is sound: an e-process may be stopped by any
rule that looks at the past alone.
"""

LONGER = 5

THETAS = 0.1 * 2.0 ** np.arange(7)
"""Tilts of the bets on neighbours, .1 to 6.4, upwards only: requests on the same coins agree too often."""

TOGETHER = 8
"""Requests of a batch of an engine that batches by itself: several cost it little more than one."""

MIN_ROOM = 16
"""Tokens for which generations of an engine have room that shows nothing but tokens; drawn cases often have few."""


class Neighbours:
    """The e-value of the claim that a request's tokens come by its own coins, with its neighbour's tokens as bets.

    Two requests with the same prompt and settings and independent coins are independent: given all tokens of the
    neighbour, each token of the request still follows the law after the tokens before it. While the two texts agree,
    the bet is that the next token is the neighbour's: for a token of probability u at most, exp(theta 1[it came]) / M
    with M = 1 + u (e^theta - 1) has mean at most 1 under every law in the band. So has the product over the stream, and
    the average over the tilts: at any time, P(E >= 1/a) <= a.
    """

    def __init__(self) -> None:
        self._sums = np.zeros(len(THETAS))
        self.bets = 0

    def add(self, most_likely: float, agrees: bool) -> None:
        """Take one token: `agrees` if it was the neighbour's, whose probability is `most_likely` at most."""
        if not 0.0 <= most_likely <= 1.0:
            raise ValueError(f"{most_likely} is no probability")
        self.bets += 1
        self._sums -= np.log1p(most_likely * np.expm1(THETAS))
        self._sums += THETAS * agrees

    def compare(self, output: tuple[int, ...], neighbour: tuple[int, ...], high: list[Array]) -> None:
        """Take the tokens of `output` up to the first that differs from its `neighbour`.

        The neighbour had the same prompt and settings before. `high` holds the highest probability [V] that each token
        may have at each place of `output`.
        """
        for token, neighbour_token, bounds in zip(output, neighbour, high, strict=False):
            self.add(min(1.0, float(bounds[neighbour_token])), token == neighbour_token)
            # From here on the two contexts differ, and the neighbour's tokens predict nothing.
            if token != neighbour_token:
                return

    @property
    def parts(self) -> tuple[float, ...]:
        """Logarithms of the e-values of the bets, one for each tilt."""
        return tuple(float(value) for value in self._sums)

    @property
    def log_e(self) -> float:
        """Natural logarithm of the e-value so far; 0 before the first bet."""
        return float(logsumexp(self._sums) - np.log(len(THETAS)))


@dataclass(frozen=True)
class Effort:
    """The amount of generation asked of one case.

    Attributes:
        tokens: Tokens of generations after which no other run begins.
        runs: Most runs; fewer than a subject remembers.
        hot: Whether every second run is at HOT, if that is above the case's own temperature.
        nodes: Number of nodes that are kept of a tree which a model or a trie drafts, the first ones level by level;
            0 keeps the tree as it is.
    """

    tokens: int
    runs: int
    hot: bool = False
    nodes: int = 0

    @property
    def in_doubt(self) -> "Effort":
        """The effort where the evidence is beyond DOUBT."""
        return replace(self, tokens=LONGER * self.tokens, runs=min(LONGER * self.runs, FULL_EFFORT.runs))


FULL_EFFORT = Effort(300, 24)
"""The effort where whole generations are the only test of a backend's sampling."""

SESSION_EFFORT = Effort(100, 6)
"""The effort for the requests of one session, which are tested beside each other as they are."""

SMALL_EFFORT = Effort(24, 3, hot=True, nodes=3)
"""The effort where laws are also asked on tables: it tells drawn tokens from arg-max, and own coins from a mate's."""


@dataclass
class GenerationEvidence:
    """The evidence of the generations of one case.

    Attributes:
        first: Trace of the first request.
        tokens: Number of tokens of all requests.
        links: The e-processes over their draws.
        neighbours: The e-process over pairs of requests; None where a case has one generation.
    """

    first: Trace | None = None
    tokens: int = 0
    links: Links = field(default_factory=Links)
    neighbours: Neighbours | None = None

    @property
    def log_e(self) -> float:
        """Log of the e-value of the whole stream: the mean of the e-values of links and neighbours."""
        if self.neighbours is None:
            return self.links.log_e
        return float(np.logaddexp(self.links.log_e, self.neighbours.log_e) - np.log(2.0))

    @property
    def parts(self) -> tuple[float, ...]:
        """Logs of the e-values of all bets, those on neighbours last; 0 for these where a case has one generation."""
        return (*self.links.parts, *(Neighbours() if self.neighbours is None else self.neighbours).parts)

    @property
    def draws(self) -> int:
        """Number of trials and bets so far."""
        return self.links.trials + (self.neighbours.bets if self.neighbours is not None else 0)

    @property
    def worst(self) -> str:
        """The test with the most evidence: a link of `specverify.properties.laws.sampled.links`, or `neighbour`.

        Texts that follow no law agree with their neighbour's as well, so that a link comes first whose evidence alone
        condemns.
        """
        log_es = dict(self.links.log_es)
        link = max(log_es, key=lambda name: log_es[name])
        if self.neighbours is None or log_es[link] >= log_bar(RUN_TESTS):
            return link
        return link if log_es[link] > self.neighbours.log_e else "neighbour"


def generation_evidence(case: Case, oracle: Oracle, subject: Subject, effort: Effort) -> GenerationEvidence:
    """One e-process over the draws of several generations, each draw given all draws before it.

    `specverify.properties.laws.draw_by_draw` makes the trials. A case on a small model runs with fresh seeds, two
    requests in one batch where the backend plays sessions, until `effort` is spent or the evidence is enough. A case on
    a checkpoint runs as it is, unless a tape holds its coins, since somebody chose those. A backend that takes no seed
    runs again unchanged.

    Raises:
        NotApplicable: The rule does not promise the target's law, or the engine's law has no bound.
    """
    if not is_promised(case):
        raise NotApplicable("the rule does not promise the target's law here")
    single = isinstance(case.model, Checkpoint)
    knows_draft = _knows_draft(case, subject)
    groups = GROUPS if knows_draft else {ACCEPT: len(FAULTS)}
    evidence = GenerationEvidence(links=Links(groups), neighbours=None if single else Neighbours())
    last_outputs: dict[float, tuple[int, ...]] = {}
    # As many runs as doubt may ask for; the loop breaks off where there is none.
    for num_runs, run in enumerate(_runs(_roomy(case, subject), effort.in_doubt), 1):
        for alone, trace in _requests(run, subject, pairs=not single):
            law_points = _add_trials(evidence, alone, trace, oracle, subject, knows_draft)
            temperature = alone.sampling.temperature
            # Only requests at one temperature have the same law, so only these are compared.
            if evidence.neighbours is not None and temperature in last_outputs:
                evidence.neighbours.compare(trace.output, last_outputs[temperature], upper_bounds(law_points))
            last_outputs[temperature] = trace.output
        if _is_enough(evidence, effort, num_runs):
            break
    if evidence.first is None:
        raise Unobserved("no request of the backend's runs took part")
    return evidence


def requests_of(case: Case, subject: Subject, effort: Effort) -> Iterator[tuple[Case, Trace]]:
    """The requests of the runs of `generation_evidence`, in its order, each with its trace."""
    pairs = not isinstance(case.model, Checkpoint)
    for run in _runs(_roomy(case, subject), effort):
        yield from _requests(run, subject, pairs)


def session_evidence(case: Case, oracle: Oracle, subject: Subject) -> GenerationEvidence:
    """One e-process over the draws of the sampled requests of a session, which runs on fresh seeds several times.

    Unlike `generation_evidence`, requests keep their own prompts and settings, so that those of a neighbour would show.

    Raises:
        NotApplicable: No request samples by a rule that promises the target's law.
    """
    assert case.session is not None
    size = 1 + len(case.session.mates)
    sampled = [number for number in range(size) if not case.alone(number).sampling.greedy]
    if not sampled or not all(is_promised(case.alone(number)) for number in sampled):
        raise NotApplicable("no request samples, or the rule does not promise the target's law here")
    evidence = GenerationEvidence()
    seeds = dice(case, "session").integers(0, 2**62, size=(SESSION_EFFORT.in_doubt.runs, size)).tolist()
    for num_runs, run_seeds in enumerate(seeds, 1):
        shared = subject(with_seeds(case, run_seeds)).shared
        for number in sampled if shared is not None else ():
            trace = shared.requests[number] if shared is not None else None
            if trace is not None:
                _add_trials(evidence, case.alone(number), trace, oracle, subject, knows_draft=False)
        if _is_enough(evidence, SESSION_EFFORT, num_runs):
            break
    if evidence.first is None:
        raise Unobserved("no sampled request of the session took part")
    return evidence


def with_seeds(case: Case, seeds: Sequence[int]) -> Case:
    """The session with these seeds, the case's own request first."""
    assert case.session is not None
    mates = tuple(
        replace(mate, sampling=replace(mate.sampling, tape=(), seed=seed))
        for mate, seed in zip(case.session.mates, seeds[1:], strict=True)
    )
    sampling = replace(case.sampling, tape=(), seed=seeds[0])
    return replace(case, sampling=sampling, session=replace(case.session, mates=mates))


def _add_trials(
    evidence: GenerationEvidence, alone: Case, trace: Trace, oracle: Oracle, subject: Subject, knows_draft: bool
) -> list[Point]:
    """Add the draws of one request to the evidence; the laws before each of its tokens."""
    law_points = points(alone, oracle, trace, logit_bound(alone, noise(alone, oracle, subject)))
    bets = draft_bets(alone, oracle, trace.output, law_points) if knows_draft else None
    for trial in trials(alone, trace, law_points, bets):
        evidence.links.add(trial)
    evidence.first = evidence.first or trace
    evidence.tokens += len(trace.output)
    return law_points


def _is_enough(evidence: GenerationEvidence, effort: Effort, num_runs: int) -> bool:
    """Whether `effort` is spent after so many runs, or the evidence condemns by itself."""
    limits = effort.in_doubt if evidence.log_e > DOUBT else effort
    return evidence.log_e >= log_bar(RUN_TESTS) or evidence.tokens >= limits.tokens or num_runs >= limits.runs


def _roomy(case: Case, subject: Subject) -> Case:
    """The case; on an engine that drafts in its own way with room for MIN_ROOM tokens, if model and engine admit it."""
    if subject.abilities is None or subject.abilities.draft_trees or isinstance(case.model, Checkpoint):
        return case
    stops = replace(case.stops, max_new_tokens=max(case.stops.max_new_tokens, MIN_ROOM), max_length=0)
    try:
        longer = replace(case, stops=stops)
    except Malformed:
        return case
    return longer if subject.declines(longer) is None else case


def _knows_draft(case: Case, subject: Subject) -> bool:
    """Whether the engine drafts with the case's model in its own way, so that its draft's law is known but not shown.

    A draft that is a checkpoint would take as much time as the target.
    """
    has_own_draft = subject.abilities is not None and not subject.abilities.draft_trees
    return has_own_draft and isinstance(case.draft.model, Seeded)


def _runs(case: Case, effort: Effort) -> Iterator[Case]:
    """The case on coins from seeds: its own seed where the model is a checkpoint without a tape, else fresh ones."""
    if isinstance(case.model, Checkpoint) and not case.sampling.tape:
        yield case
        return
    draft = _cut_trees(case.draft, effort.nodes)
    seeds = dice(case, "generations").integers(0, 2**62, size=1 if isinstance(case.model, Checkpoint) else effort.runs)
    for number, seed in enumerate(seeds.tolist()):
        # Even runs are hot where the effort asks for that; the others keep the case's own temperature.
        case_temperature = case.sampling.temperature
        temperature = max(case_temperature, HOT) if effort.hot and number % 2 == 0 else case_temperature
        yield replace(case, draft=draft, sampling=replace(case.sampling, tape=(), seed=seed, temperature=temperature))


def _cut_trees(draft: Draft, nodes: int) -> Draft:
    """The draft with the first `nodes` nodes of each tree, level by level; scripts stay as they are."""
    if not nodes or draft.trees is not None:
        return draft
    return draft.with_shapes(tuple(prune_tree(Shape(shape.parent), nodes) for shape in draft.shapes))


def _requests(run: Case, subject: Subject, pairs: bool) -> Iterator[tuple[Case, Trace]]:
    """The requests of one run, each as the case that it would be alone, with its trace.

    Where the backend plays sessions and both requests fit, there are two, with the same prompt and a seed each; as many
    as TOGETHER where it batches by itself.
    """
    session = _company(run, subject) if pairs else None
    shared = None if session is None else _shared_trace(session, subject)
    if session is None or shared is None:
        yield run, subject(run)
        return
    for number, trace in enumerate(shared.requests):
        if trace is not None:
            yield session.alone(number), trace


def _shared_trace(session: Case, subject: Subject) -> Shared | None:
    """The traces of all requests of `session`; None where the backend plays no sessions or does not reveal them."""
    if subject.declines(session) is not None:
        return None
    try:
        return subject(session).shared
    except NoTrace as no_trace:
        if isinstance(no_trace.outcome, Refusal):
            return None
        raise


def _company(run: Case, subject: Subject) -> Case | None:
    """`run` beside others that differ in their seeds alone, as many as the engine takes; None where none fits."""
    size = _batch_size(subject)
    if size == 1:
        return _pair(run)
    seeds = [(run.sampling.seed + number) % 2**62 for number in range(size)]
    return _batch([replace(run, sampling=replace(run.sampling, seed=seed)) for seed in seeds])


def outputs_of(cases: Sequence[Case], subject: Subject) -> list[tuple[int, ...]]:
    """The outputs of cases that differ in their seeds alone, in batches where the engine batches by itself."""
    size = _batch_size(subject)
    if size == 1:
        return [subject(case).output for case in cases]
    outputs: list[tuple[int, ...]] = []
    for first in range(0, len(cases), size):
        batch = _batch(cases[first : first + size])
        shared = subject(batch).shared
        if shared is None or None in shared.requests:
            raise Unobserved("the trace does not show every request")
        outputs += [trace.output for trace in shared.requests if trace is not None]
    return outputs


def _batch_size(subject: Subject) -> int:
    """Requests of a batch of an engine that batches by itself; 1 for any other."""
    within = subject.abilities
    if within is None or not within.continuous:
        return 1
    return min(TOGETHER, within.most_requests or TOGETHER)


def _batch(cases: Sequence[Case]) -> Case:
    """The cases, on one model with one draft, as a session of requests that enter at once."""
    first, *other_cases = cases
    draft = first.draft.in_batches(())
    mates = tuple(Mate(case.prompt, draft, case.sampling, case.stops) for case in other_cases)
    actions = tuple(Action("add", (number,)) for number in range(len(cases)))
    return replace(first, draft=draft, steps=0, session=Session(mates, actions, continuous=True))


def _pair(run: Case) -> Case | None:
    """`run` beside a request that differs in its seed alone, both in every batch; None where both do not fit."""
    # Another seed than the request's own; the modulus keeps it in the range of `_runs`.
    seed = (run.sampling.seed + 1) % 2**62
    draft = run.draft.in_batches(())  # both requests are in every batch
    mate = Mate(run.prompt, draft, replace(run.sampling, seed=seed), run.stops)
    steps = run.steps or run.stops.room(len(run.prompt))
    actions = (Action("add", (0,)), Action("add", (1,)), *(Action("step", (0, 1)),) * steps)
    try:  # without a free list there are as many pages as are needed: the case's list was drawn for one request
        return replace(run, draft=draft, session=Session((mate,), actions), layout=replace(run.layout, pages=()))
    except Malformed:
        return None
