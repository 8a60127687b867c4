"""The pytest plugin for other projects, with the fixture `specverify_backend`.

A project loads it with `-p specverify` or `pytest_plugins = ["specverify.pytest_plugin"]`. It has no entry point, so
that it never loads itself. All its options, fixtures and marks begin with "specverify"; those of the project and of
other plugins are not touched.
"""

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest

from specverify.pytest_selection import Selection

if TYPE_CHECKING:
    from specverify.interface.engines import Engine

SELECTION = Selection("specverify")

CONFORMANCE = "specverify.conformance"
"""The package of the tests that ship, as `--pyargs` names it."""


RESIDUE = pytest.StashKey[list[str]]()
"""Lines on what runs left in the processes of backends; see `specverify.properties.residue`."""

HANDED = "specverify residue"
"""The key under which a worker of pytest-xdist hands its lines over."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--specverify-backend` and `--specverify-allow-absent-device`."""
    SELECTION.add_options(parser)


@pytest.hookimpl(trylast=True)
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser, args: list[str]) -> None:
    """Add `--backend` too in a run of `--pyargs specverify.conformance`, unless the project has such an option.

    pytest calls this after it has loaded the project's own conftest files.
    """
    if any(argument.split("::")[0].startswith(CONFORMANCE) for argument in args):
        with suppress(ValueError, argparse.ArgumentError):  # the name is taken: `--specverify-backend` does the same
            SELECTION.add_plain_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks `specverify_cuda`, `specverify_slow` and their like."""
    SELECTION.register(config)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Refuse to run a selection of device tests where that device is absent."""
    SELECTION.refuse_absent(session.config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests with the fixture `specverify_backend` on every named backend."""
    SELECTION.parametrize(metafunc)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests under our marks that belong to another tier, or skip them with the reason."""
    SELECTION.choose(config, items)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """With --specverify-allow-absent-device, a selection of device tests that left nothing to run is no failure."""
    SELECTION.settle(session, exitstatus)
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[HANDED] = session.config.stash.get(RESIDUE, [])


def pytest_report_header(config: pytest.Config) -> list[str]:
    """The header lines that name the backends under test."""
    return SELECTION.header(config)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what runs left behind, and one line with the tiers that this run left out and their numbers of tests."""
    residue: list[str] = config.stash.get(RESIDUE, [])
    for line in dict.fromkeys(residue):
        terminalreporter.write_line(line)
    other_tiers = SELECTION.summary(config)
    if other_tiers is not None:
        terminalreporter.write_line(other_tiers)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over the counts and the lines of a worker of pytest-xdist."""
    output = getattr(node, "workeroutput", None) or {}
    SELECTION.take_over(node.config, output)
    node.config.stash.setdefault(RESIDUE, []).extend(output.get(HANDED, []))


class BackendUnderTest:
    """The fixture's value: a backend in a process of its own, the oracle, and the judge that `specverify diff` uses.

    Attributes:
        name: The backend's name.
        subject: The backend as invariants see it.
        dtypes: Working dtypes that `diff` draws for it by default.
    """

    def __init__(self, engine: "Engine") -> None:
        # Imported here, so that a project's pytest run pays for our imports only if a test uses the fixture.
        from specverify.interface.engines import named
        from specverify.isolation import door
        from specverify.isolation.backend_spec import BackendSpec
        from specverify.plan import drawn_dtypes
        from specverify.reference.oracle.decoder import Oracle

        self._open = ExitStack()
        self.name = self._open.enter_context(named(engine))
        try:
            self._door = self._open.enter_context(door.open_backend(BackendSpec(self.name)))
        except BaseException:
            self._open.close()
            raise
        self.declaration = self._door.declaration
        self.dtypes = drawn_dtypes(self.declaration.dtypes)
        self.subject = self._door.subject()
        self._oracle = Oracle()

    def close(self) -> None:
        """End the backend's process."""
        # The fixture lives longer than a `with` block here could.
        self._open.close()

    @property
    def left_behind(self) -> list[str]:
        """A line for each thing that runs left in the backend's process and that changes no answer."""
        from specverify.reports.counts import residue_rows

        return [f"{self.name} left behind: {what}" for _, what in residue_rows(self._door.residue.values())]

    def judge(self, case: Any, *globs: str) -> Any:
        """The verdict on `case` by the invariants that `globs` match; by all invariants without globs."""
        from specverify.properties.verdict.judge import judge
        from specverify.setup.selection import invariants_matching

        return judge(case, invariants_matching(globs), self._oracle, self.subject)

    def check(self, case: Any, *globs: str) -> Any:
        """Judge `case`, and fail the test with the page of the result if anything differs or the judge raises."""
        from specverify.campaign.judged import failure_of
        from specverify.interface.results import JudgeResult
        from specverify.reference.case_json import case_to_json
        from specverify.reports.writing import as_json

        verdict = self.judge(case, *globs)
        if verdict.first is None and not verdict.internal:
            return verdict
        result = JudgeResult(verdict, failure_of(verdict, self._oracle, self.subject, backend=self.name))
        lines = result.page()
        if verdict.first is None:
            lines += f"case {case.id}: the judge has no answer\n{as_json(case_to_json(case))}"
        pytest.fail(f"\n{lines}", pytrace=False)


def yield_backend(request: pytest.FixtureRequest) -> Iterator[BackendUnderTest]:
    """The backend named by `request.param`; if it is unavailable, the test is skipped with the reason."""
    from specverify.backends.base import Unavailable

    try:
        backend = BackendUnderTest(request.param)
    except Unavailable as why:
        pytest.skip(str(why))
    yield backend
    request.config.stash.setdefault(RESIDUE, []).extend(backend.left_behind)
    backend.close()


@pytest.fixture(scope="session")
def specverify_backend(request: pytest.FixtureRequest) -> Iterator[BackendUnderTest]:
    """Each backend in turn; see `BackendUnderTest`."""
    yield from yield_backend(request)
