"""Drawn cases and sessions that an engine must pass.

Cases are judged by one invariant, in 16 bits, or by all invariants at once. The tests of this package and those of the
repository (`tests/conformance`) call these functions.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy

from specverify.conformance.opened import line_about
from specverify.interface import DiffResult, diff
from specverify.interface.engines import Engine
from specverify.properties.invariants import ALL
from specverify.properties.live.play import play
from specverify.properties.live.watch import SessionStats
from specverify.properties.strategies import cases, session_cases
from specverify.properties.strategies.cases import single_cases
from specverify.properties.strategies.models import GALLERY, RECURRENT
from specverify.properties.strategies.settings import explore, without_local_constants
from specverify.properties.tally import Failure
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.invariant import Invariant
from specverify.pytest_plugin import BackendUnderTest
from specverify.reference.abilities import Abilities
from specverify.reference.case import Case
from specverify.reference.family import FAMILIES
from specverify.reference.oracle.decoder import Oracle
from specverify.reports import bundle
from specverify.reports.pages.summary import run_headline
from specverify.reports.pages.terminal import failure_page
from specverify.reports.tree_scene import scene_of
from specverify.reports.vocabulary import account
from specverify.setup.environment import environment
from specverify.setup.refusals import ABSENT, UNUSABLE

EXAMPLES = settings(
    max_examples=8, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
"""The draws of a test, whatever profile a project loads."""

LAYOUTS = {
    "attention.page-permutation": "paged",
    "cache.page-boundary": "paged",
    "cache.allocator-conserves": "paged",
    "cache.prefix-reuse": "prefix",
}
"""Invariants that speak of one kind of layout alone."""

HYBRIDS = tuple({GALLERY[number].family: None for number in RECURRENT})
"""Families of models that cases have, with layers that keep a recurrent state."""

NARROWED: dict[str, dict[str, tuple[str | int, ...]]] = {
    "draft.shared": {"drafts": ("trie",)},
    "draft.dispatch": {"drafts": ("model",), "tree_kinds": ("dispatched",)},
    "draft.tree-top-m": {"drafts": ("model",), "tree_kinds": ("dynamic",)},
    "draft.stops": {"drafts": ("model",), "tree_kinds": ("stopped",)},
    "draft.candidates": {"drafts": ("block",)},
    "attention.columns-best": {"families": tuple(name for name, words in FAMILIES.items() if words.indexed)},
    "lossless.ranks-agree": {"ranks": (2,)},
    "cache.recurrent-rows": {"families": HYBRIDS},
    "cache.recurrent-equivalence": {"families": HYBRIDS},
}
"""Invariants that speak of few cases: what alone is drawn of the declaration's fields, where the engine has it."""

ROUNDS = (1, 4, 16)
"""How often as many cases are drawn, in turn, until one was judged: some invariants speak of few."""

OF_ANY_RUN = ("lossless.completes", "lossless.takes-part")
"""Invariants that hold of a run which shows nothing; a case that they alone judged was not compared with anything."""


def invariant_named(name: str) -> Invariant:
    """The invariant called `name`."""
    return next(invariant for invariant in ALL if invariant.name == name)


def outcomes_of(
    backend: BackendUnderTest, name: str, how: settings = EXAMPLES, rounds: tuple[int, ...] = ROUNDS
) -> set[str]:
    """The outcomes of the invariant `name` on cases drawn within the backend's declaration.

    Cases of which the invariant does not speak are drawn again, and not run. More cases are drawn, by the factors
    `rounds`, until one is checked. A case that differs fails the test with its page, after Hypothesis has made it
    smaller. The test is skipped where the backend declares no case of which the invariant speaks.
    """
    outcomes: set[str] = set()
    invariant = invariant_named(name)
    if invariant.promise and not getattr(backend.declaration, invariant.promise):
        pytest.skip(f"{backend.name} does not promise {invariant.promise}")
    why = why_undeclared(name, backend.declaration)
    if why:
        pytest.skip(f"{backend.name} {why}")
    alone = invariant.speaks_of == "request" and not invariant.looks_at_run  # it says nothing of sessions
    kind: Callable[..., SearchStrategy[Case]] = single_cases if alone else cases
    if invariant.speaks_of == "session":
        kind = session_cases
    within, narrowed = backend.declaration, NARROWED.get(name, {})
    if all({*few} <= {*(getattr(within, field) or few)} for field, few in narrowed.items()):
        within = replace(within, **narrowed)  # type: ignore[arg-type]  # of words and numbers
    drawn = kind(backend.dtypes, layout=LAYOUTS.get(name), within=within).filter(partial(speaks_of, invariant))

    def check_case(case: Case) -> None:
        outcomes.add(backend.check(case, name).outcomes[name])

    for times in rounds:
        with suppress(Unsatisfiable):  # none of so many spoke of it: the next round draws more
            settings(how, max_examples=times * how.max_examples)(given(drawn)(check_case))()
        if "checked" in outcomes:
            break
    return outcomes


def speaks_of(invariant: Invariant, case: Case) -> bool:
    """Whether the invariant says anything about the case, or about a request of its session."""
    if invariant.applies(case) or case.session is None or invariant.speaks_of == "session":
        return invariant.applies(case)
    return any(invariant.applies(case.alone(number)) for number in range(1, 1 + len(case.session.mates)))


def why_undeclared(name: str, declared: Abilities) -> str:
    """The field of the declaration that admits none of the values of which the invariant `name` speaks, as a reason.

    Empty for an invariant that speaks of cases which the engine declares. The drafts of NARROWED are one choice of
    several, so that a declaration may lack them.
    """
    for field, few in NARROWED.get(name, {}).items():
        declared_values = getattr(declared, field)  # None, of families alone, is all of them
        if field != "drafts" and declared_values is not None and not {*few} & {*declared_values}:
            return f"declares no {field} of {', '.join(map(str, few))}, of which {name} speaks"
    return ""


def hold_in(backend: BackendUnderTest, dtype: str, how: settings = EXAMPLES) -> None:
    """Judge cases in `dtype` by all invariants; the test is skipped where the backend declares no such dtype."""
    if dtype not in backend.declaration.dtypes:
        pytest.skip(f"{backend.name} declares no {dtype}")

    def check_case(case: Case) -> None:
        backend.check(case)

    settings(how)(given(cases((dtype,), within=backend.declaration))(check_case))()


def judge_all(backend: BackendUnderTest, count: int, seed: int = 0) -> list[Verdict]:
    """Judge up to `count` drawn cases by all invariants, and fail the test unless each was compared with something.

    Args:
        backend: The engine.
        count: Most cases; fewer where the declaration admits fewer.
        seed: The seed of the draws.
    """
    drawn: dict[Case, None] = {}

    def collect(case: Case) -> None:
        drawn.setdefault(case)

    explore(seed, count, cases(backend.dtypes, within=backend.declaration), collect)
    verdicts = [backend.check(case) for case in drawn]
    silent = [verdict for verdict in verdicts if not was_compared(verdict)]
    if silent or not verdicts:
        why = next((f": {verdict.unsupported}" for verdict in silent if verdict.unsupported), "")
        pytest.fail(
            f"{backend.name}: {len(silent)} of {len(verdicts)} drawn cases were not compared with anything{why}",
            pytrace=False,
        )
    return verdicts


def was_compared(verdict: Verdict) -> bool:
    """Whether an invariant that reads what the run shows was checked."""
    judged = {name for name, outcome in verdict.outcomes.items() if outcome in ("checked", "failed")}
    return not judged <= set(OF_ANY_RUN)


def agrees(engine: Engine, cases: int = 20, seed: int = 0) -> None:
    """Fail the running test unless the engine agrees on drawn cases within its declaration.

    A case that differs is made smaller first, and saved in `.specverify`. The message begins with the headline, and
    ends with the command that runs the case again.

    Args:
        engine: `pkg.module:factory`, the name of a backend that ships, or a Python object as `specverify.diff` takes.
        cases: Most cases that are drawn.
        seed: The seed of the draws.
    """
    try:
        with without_local_constants():
            result = diff(engine, cases=cases, seed=seed, jobs=0)
    except (*UNUSABLE, *ABSENT) as why:
        pytest.fail(line_about(why), pytrace=False)
    if not result.agrees:
        pytest.fail(f"{headline_of(result)}\n\n{result.page()}", pytrace=False)


def headline_of(result: DiffResult) -> str:
    """What failed, in one line: the first line of a test runner's summary."""
    if not result.failures:
        return run_headline(result.tally)
    failure = result.failures[0]
    sentence = account(failure.finding, scene_of(failure.verdict, failure.finding), complete=False)
    return f"DIFFER  {result.tally.backend}  {failure.finding.invariant}: {sentence}"


def refuse(failure: Failure | None, folder: Path) -> None:
    """Fail the test with the page of the failure, if there is one, after writing its bundle to `folder`."""
    if failure is not None:
        file = bundle.save(folder, failure, environment())
        pytest.fail(f"\n{failure_page(failure)}\n{file}", pytrace=False)


def require_live(backend: BackendUnderTest) -> None:
    """Skip the test where the engine has no sessions that can be played action by action."""
    if backend.subject.serve is None:
        pytest.skip(f"{backend.name} declares no sessions that are played action by action")


def no_request_notices(backend: BackendUnderTest, kind: str, folder: Path) -> None:
    """Play four sessions in the KV layout `kind`; fail the test where a request notices its company.

    The test is skipped where the engine does not declare the layout. Bundles go to `folder`.
    """
    if kind not in backend.declaration.layouts:
        pytest.skip(f"{backend.name} declares no KV layout {kind}")
    played, dtype = SessionStats(), backend.declaration.dtypes[0]
    failure = play(backend.subject, Oracle(), played, kind, dtype, sessions=4, actions=12, number=0)
    refuse(failure, folder)
    assert played.judged == played.sessions > 0
    assert played.compared > 0
    assert played.interruptions.total() > 0
