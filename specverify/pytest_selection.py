"""Selection of backend tests in a pytest run: fixture, marks, options and tiers."""

import ast
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest

from specverify.backends.devices import why_no_device

MARKERS = {
    "cpu": "runs on any machine",
    "cuda": "needs an NVIDIA device",
    "npu": "needs an Ascend device; nothing emulated counts",
    "emulated": "on the documented contract of a device that is not there; runs only where -m or {option} names it",
    "slow": "takes minutes; runs only where -m names it",
    "statistical": "spends a stated false-alarm probability",
}

ACCELERATORS = ("cuda", "npu")
"""Marks of tests that need a device."""


@dataclass(frozen=True)
class Selection:
    """The fixture, the options and the marks of one project, and their effects.

    Attributes:
        word: The prefix of every name: "specverify" in other projects, "" in the tests of this repository. The fixture
            is `backend` or `specverify_backend`, the mark `cuda` or `specverify_cuda`, the option `--backend` or
            `--specverify-backend`.
    """

    word: str = ""

    @property
    def fixture(self) -> str:
        """The name of the fixture that gives a backend."""
        return self.mark("backend")

    def mark(self, name: str) -> str:
        """The mark `name` of MARKERS, with this project's prefix."""
        return f"{self.word}_{name}" if self.word else name

    def option(self, name: str) -> str:
        """The command-line option `name`, with this project's prefix."""
        return f"--{self.word}-{name}" if self.word else f"--{name}"

    def add_options(self, parser: pytest.Parser) -> None:
        """Add both options to the command line of pytest."""
        group = parser.getgroup("specverify")
        group.addoption(
            self.option("backend"),
            action="append",
            default=[],
            metavar="NAME",
            help=f"run the `{self.fixture}` fixture on this backend or pkg.module:factory "
            "(repeatable; default: every one we ship)",
        )
        group.addoption(
            self.option("allow-absent-device"),
            action="store_true",
            help=f"let `-m {self.mark('cuda')}` or `-m {self.mark('npu')}` pass where that device is absent, "
            "its tests left out",
        )

    def add_plain_option(self, parser: pytest.Parser) -> None:
        """Add `--backend` as another spelling of this project's own option.

        Raises:
            ValueError, argparse.ArgumentError: The name is taken.
        """
        parser.getgroup("specverify").addoption(
            "--backend", action="append", dest=self.option("backend")[2:].replace("-", "_"), metavar="NAME"
        )

    def register(self, config: pytest.Config) -> None:
        """Register the markers."""
        for name, words in MARKERS.items():
            config.addinivalue_line("markers", f"{self.mark(name)}: {words.format(option=self.option('backend'))}")

    def named_backends(self, config: pytest.Config) -> list[str]:
        """The backends that the command line names."""
        return list(config.getoption(self.option("backend")))

    def demanded_devices(self, expression: str) -> list[str]:
        """The accelerators that a marker expression asks for: it selects their tests, and no plain CPU tests.

        Args:
            expression: The argument of `-m`. Marks of other projects count as absent.
        """
        # An expression such as `not slow` selects plain CPU tests too, and demands no device.
        if not expression.strip() or _selects(expression, {self.mark("cpu")}) or _selects(expression, set()):
            return []
        return [device for device in ACCELERATORS if _selects(expression, {self.mark(device)})]

    def refuse_absent(self, config: pytest.Config) -> None:
        """End the run with exit code 3 if `-m` asks for the tests of an absent device."""
        expression = _expression(config)
        if config.getoption(self.option("allow-absent-device")):
            return
        for device in self.demanded_devices(expression):
            why = why_no_device(device)
            if why is not None:
                pytest.exit(
                    f"-m {expression!r} asks for {device} tests and this machine has no such device: {why}. "
                    f"Nothing was tested. ({self.option('allow-absent-device')} leaves them out instead.)",
                    returncode=3,
                )

    def settle(self, session: pytest.Session, exitstatus: int) -> None:
        """Let a run without tests pass if `-m` asks for an absent device and the command line allows its absence."""
        config = session.config
        self.hand_over(config)
        allowed = config.getoption(self.option("allow-absent-device")) and self.demanded_devices(_expression(config))
        if allowed and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK

    def parametrize(self, metafunc: pytest.Metafunc) -> None:
        """Run a test with the fixture on every backend, each marked with its device or as emulated."""
        if self.fixture not in metafunc.fixturenames:
            return
        from specverify.backends.shipped import ROWS

        named = self.named_backends(metafunc.config)
        kinds = {row.name: "emulated" if row.emulated else row.device for row in ROWS}
        # A backend that the command line names is wanted, even if it is slow.
        slow = {row.name for row in ROWS if row.slow} - set(named)
        params = []
        for name in named or list(kinds):
            words = [kinds.get(name, "cpu"), *(["slow"] if name in slow else [])]
            params.append(pytest.param(name, marks=[getattr(pytest.mark, self.mark(word)) for word in words]))
        metafunc.parametrize(self.fixture, params, indirect=True, scope="session")

    def choose(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect and count the tests of other tiers; skip tests of a named backend whose device is absent.

        A tier is a mark that this run does not ask for, or a device that this machine lacks.
        """
        expression, named = _expression(config), self.named_backends(config)
        reasons: dict[str, str | None] = {}
        # One item may belong to several tiers; the last match is counted.
        tiers: Counter[str] = Counter()
        selected = []
        deselected = []
        for item in items:
            slow, emulated = self.mark("slow"), self.mark("emulated")
            if item.get_closest_marker(self.mark("npu")) and item.get_closest_marker(emulated):
                raise pytest.UsageError(f"{item.nodeid}: emulated is never hardware; it cannot be marked npu")
            tier = None
            for device in ACCELERATORS:
                if item.get_closest_marker(self.mark(device)):
                    if device not in reasons:  # once per device, and only if needed, since `missing` imports torch
                        reasons[device] = why_no_device(device)
                    if reasons[device] is not None and named:
                        item.add_marker(pytest.mark.skip(reason=f"{device}: {reasons[device]}"))
                    elif reasons[device] is not None:
                        tier = f"{device} ({reasons[device]})"
            if item.get_closest_marker(emulated) and not (named or _selects_by(expression, emulated)):
                tier = f"{emulated} (-m {emulated}, or {self.option('backend')})"
            if item.get_closest_marker(slow) and slow not in expression:
                tier = f"{slow} (-m {slow})"
            if tier is None:
                selected.append(item)
            else:
                tiers[tier] += 1
                deselected.append(item)
        if deselected:
            items[:] = selected
            config.hook.pytest_deselected(items=deselected)
        # Kept for the summary line, and for the main process of pytest-xdist.
        config.stash[self._tiers] = tiers

    @cached_property
    def _tiers(self) -> "pytest.StashKey[Counter[str]]":
        return pytest.StashKey()

    def _tier_counts(self, config: pytest.Config) -> "Counter[str]":
        none: Counter[str] = Counter()
        return config.stash.get(self._tiers, none)

    def hand_over(self, config: pytest.Config) -> None:
        """In a worker of pytest-xdist, send the counts of tiers to the process that prints the summary."""
        if hasattr(config, "workeroutput"):
            config.workeroutput[f"tiers {self.word}"] = dict(self._tier_counts(config))

    def take_over(self, config: pytest.Config, worker_output: dict[str, Any]) -> None:
        """Keep the counts of one worker; they replace another worker's, since all workers collect the same tests."""
        config.stash[self._tiers] = Counter(worker_output.get(f"tiers {self.word}", {}))

    def summary(self, config: pytest.Config) -> str | None:
        """One line with the number of tests in each tier that this run left out; None if there are none."""
        tiers = self._tier_counts(config)
        counts = "; ".join(f"{count} {tier}" for tier, count in sorted(tiers.items()))
        return f"left to other tiers: {counts}" if counts else None

    def header(self, config: pytest.Config) -> list[str]:
        """The line of pytest's header with the backends under test and the versions of packages."""
        from specverify.setup.environment import environment

        facts = environment()
        names = ", ".join(self.named_backends(config)) or "every backend shipped"
        versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "transformers", "numpy") if name in facts)
        return [f"specverify {facts['specverify']}: {names}; {versions}"]


def _expression(config: pytest.Config) -> str:
    """The argument of `-m`, or the empty string."""
    return str(config.getoption("markexpr", "") or "")


def _selects_by(expression: str, mark: str) -> bool:
    """Whether a marker expression selects items because of `mark`."""
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
