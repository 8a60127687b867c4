"""The pytest plugin: the `backend` fixture, device markers, and a session that cannot go green on an absent device."""

import ast
from collections.abc import Iterator
from typing import Any

import pytest

from specverify.devices import missing

MARKERS = {
    "cpu": "runs on any machine",
    "cuda": "needs an NVIDIA device",
    "npu": "needs an Ascend device; nothing emulated counts",
    "emulated": "on the documented contract of a device that is not there; runs only where -m or --backend names it",
    "slow": "takes minutes; runs only where -m names it",
    "statistical": "spends a stated false-alarm probability",
}

ACCELERATORS = ("cuda", "npu")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this plugin."""
    group = parser.getgroup("specverify")
    group.addoption(
        "--backend",
        action="append",
        default=[],
        metavar="NAME",
        help="run the `backend` fixture on this backend or pkg.module:factory (repeatable; default: every one we ship)",
    )
    group.addoption(
        "--allow-absent-device",
        action="store_true",
        help="let `-m cuda` or `-m npu` pass where that device is absent, its tests skipped",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    for name, words in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {words}")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Refuse to run a selection of device tests where that device is absent."""
    expression = str(session.config.getoption("markexpr", "") or "")
    if session.config.getoption("--allow-absent-device"):
        return
    for device in demanded(expression):
        why = missing(device)
        if why is not None:
            pytest.exit(
                f"-m {expression!r} asks for {device} tests and this machine has no such device: {why}. "
                "Nothing was tested. (--allow-absent-device skips them instead.)",
                returncode=3,
            )


def demanded(expression: str) -> list[str]:
    """The accelerators that a marker expression asks for: it selects their tests, and plain CPU tests it does not."""
    if not expression.strip() or _selects(expression, {"cpu"}) or _selects(expression, set()):
        return []
    return [device for device in ACCELERATORS if _selects(expression, {device})]


def _asked(expression: str, mark: str) -> bool:
    """Whether a marker expression says that items of `mark` shall run."""
    return bool(expression.strip()) and _selects(expression, {mark}) and not _selects(expression, set())


def _selects(expression: str, marks: set[str]) -> bool:
    """Whether `-m expression` selects an item with exactly `marks`."""

    def value(node: ast.expr) -> bool:
        if isinstance(node, ast.BoolOp):
            parts = [value(part) for part in node.values]
            return all(parts) if isinstance(node.op, ast.And) else any(parts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not value(node.operand)
        if isinstance(node, ast.Call):
            return value(node.func)
        return isinstance(node, ast.Name) and node.id in marks

    try:
        return value(ast.parse(expression, mode="eval").body)
    except SyntaxError:
        return True  # pytest itself complains about an expression it cannot read


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests that ask for `backend` on every backend, each marked with its device, or as emulated."""
    if "backend" not in metafunc.fixturenames:
        return
    from backends.registry import ROWS

    named = metafunc.config.getoption("--backend")
    marks = {row.name: "emulated" if row.emulated else row.device for row in ROWS}
    chosen = named or list(marks)
    params = [pytest.param(name, marks=getattr(pytest.mark, marks.get(name, "cpu"))) for name in chosen]
    slow = {row.name for row in ROWS if row.slow} - set(named)
    params = [
        pytest.param(*one.values, marks=(*one.marks, *([pytest.mark.slow] if one.values[0] in slow else [])))
        for one in params
    ]
    metafunc.parametrize("backend", params, indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, with the reason, what this machine or this selection does not run."""
    expression = str(config.getoption("markexpr", "") or "")
    named = config.getoption("--backend")
    lacking = {device: missing(device) for device in ACCELERATORS}
    for item in items:
        for device, why in lacking.items():
            if why is not None and item.get_closest_marker(device):
                item.add_marker(pytest.mark.skip(reason=f"{device}: {why}"))
        if item.get_closest_marker("slow") and "slow" not in expression:
            item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))
        if item.get_closest_marker("emulated") and not (named or _asked(expression, "emulated")):
            item.add_marker(pytest.mark.skip(reason="emulated: run with -m emulated, or name it with --backend"))
        if item.get_closest_marker("npu") and item.get_closest_marker("emulated"):
            raise pytest.UsageError(f"{item.nodeid}: emulated is never hardware; it cannot be marked npu")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """With --allow-absent-device, a selection that left nothing to run is no failure."""
    allowed = session.config.getoption("--allow-absent-device")
    if allowed and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say what is under test."""
    from specverify.environment import environment

    found = environment()
    names = ", ".join(config.getoption("--backend")) or "every backend shipped"
    versions = ", ".join(f"{name} {found[name]}" for name in ("torch", "transformers", "numpy") if name in found)
    return [f"specverify {found['specverify']}: {names}; {versions}"]


class BackendUnderTest:
    """What the `backend` fixture gives: a backend, the oracle, and the judge that `specverify diff` uses.

    Attributes:
        name: The backend's name.
        subject: The backend as invariants see it.
        dtypes: Working dtypes that `diff` draws for it by default.
    """

    def __init__(self, name: str) -> None:
        from reference.decoder import Oracle
        from specverify.opening import open_planted, subject_of
        from specverify.plan import default_dtypes

        opened = open_planted(name, None)
        self.dtypes = default_dtypes(name)
        self.name = name
        self.declaration = opened.declaration
        self.subject = subject_of(opened)
        self._oracle = Oracle()

    def judge(self, case: Any, *globs: str) -> Any:
        """The verdict of `case` on the invariants that `globs` name, all of them for none."""
        from properties.judge import judge
        from specverify.selection import invariants_matching

        return judge(case, invariants_matching(globs), self._oracle, self.subject)

    def check(self, case: Any, *globs: str) -> Any:
        """Judge `case`, and fail the test with the failure page if anything differs."""
        from properties.tally import Failure
        from reports.terminal import failure_page

        verdict = self.judge(case, *globs)
        if verdict.first is not None:
            page = failure_page(Failure(verdict, verdict.first, case.id, backend=self.name))
            pytest.fail(f"\n{page}", pytrace=False)
        return verdict


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> Iterator[BackendUnderTest]:
    """Each backend in turn; see `BackendUnderTest`."""
    from backends.base import Unavailable

    try:
        yield BackendUnderTest(request.param)
    except Unavailable as why:
        pytest.skip(str(why))
