"""Mutants of the oracle, tested: each in a process of its own, by the tests that reach its line, the quickest first."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.measure.mutation.generate import Mutant
from tests.measure.mutation.loader import forget, install_mutant, install_notes
from tests.measure.mutation.pool import Work, run

ROOT = Path(__file__).resolve().parents[3]

PACKAGES = ("specverify", "tests")

FILES = (
    "case_rules",
    "case_ids",
    "model_rules",
    "setting_rules",
    "seeded_weights",
    "lowering",
    "sampled_step",
    "processing",
    "stopping",
    "acceptance_rules",
    "brute_force",
    "shared_prefix",
    "checkpoint_config",
    "checkpoint_refusals",
    "checkpoint",
    "bundle",
    "law",
    "irope",
    "openpangu",
    "conditional_law",
    "margin_models",
    "coinbox",
    "oracle_against_transformers",
    "cli_law",
    "engine_laws",
    "engine_parts",
    "session_machine",
    "strategies",
)
"""Test files of `tests/meta` that say what the oracle must be; those about commands, reports and backends are left."""

OF_INPUT = ("cli_bad_input", "replay_fuzz")
"""Those that say what it must refuse, through commands."""

LONGEST_S = 20.0
"""Seconds of a test beyond which it judges no mutants."""

ENOUGH_S = 60.0
"""Seconds that the tests of one mutant may take together on the oracle as it is."""

SILENCE_S = 60.0
"""Seconds of processor time that one test may take."""


@dataclass(frozen=True)
class Tested:
    """One test, and what it does to the clean oracle.

    Attributes:
        name: pytest's node id.
        seconds: Of its run.
        reached: Statements that ran, as `module:line`.
    """

    name: str
    seconds: float
    reached: frozenset[str]


@dataclass(frozen=True)
class Stage:
    """One pass over the mutants at large, by some test files."""

    name: str
    files: tuple[str, ...]


class Reference:
    """What is mutated is `reference`; what judges is `tests/meta`."""

    stages = (Stage("tests", FILES), Stage("tests of input", OF_INPUT))
    silence_s = SILENCE_S

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.digest = _digest()
        self.differing: list[str] = []
        self._surveys: dict[str, tuple[frozenset[str], tuple[Tested, ...]]] = {}

    def modules(self) -> list[str]:
        """Every module of the oracle."""
        files = sorted((ROOT / "reference").rglob("*.py"))
        parts = [file.relative_to(ROOT).with_suffix("").parts for file in files if file.stem != "__init__"]
        return [".".join(("specverify", *part)) for part in parts]

    def work(self, mutant: Mutant, stage: Stage) -> Work:
        """What a child does with the mutant: the tests that reach it, until one fails."""
        always, tests = self._surveyed(stage)
        statement = f"{mutant.module}:{mutant.statement}"
        chosen = [test for test in tests if statement in always or statement in test.reached]
        return partial(run_tests, mutant, [test.name for test in choice(chosen, statement)])

    def _surveyed(self, stage: Stage) -> tuple[frozenset[str], tuple[Tested, ...]]:
        if stage.name not in self._surveys:
            file = self._folder / f"survey-{stage.name.replace(' ', '-')}-{self.digest}.json"
            if not file.exists():
                files = [f"tests/meta/test_{name}.py" for name in stage.files]
                ((_, outcome),) = run(
                    [(None, partial(survey_tests, self.modules(), files))], 1, 5 * SILENCE_S, lambda: False
                )
                if "returned" not in outcome:
                    raise RuntimeError(f"the tests could not be run on the oracle as it is: {outcome}")
                file.write_text(json.dumps(outcome["returned"]), encoding="utf-8")
            content = json.loads(file.read_text(encoding="utf-8"))
            self.differing += content["failed"]
            tests = tuple(Tested(name, seconds, frozenset(reached)) for name, seconds, reached in content["tests"])
            self._surveys[stage.name] = frozenset(content["always"]), tests
        return self._surveys[stage.name]


def choice(tests: list[Tested], statement: str) -> list[Tested]:
    """What of `tests` is run, in order: those that reach the statement before others, and the quickest first.

    One half of the time is for the quickest. In the other, files take turns, each with its next quickest: by seconds
    alone a file of many quick tests would use up the time before another's one slow test came on.
    """
    first = sorted(tests, key=lambda test: (statement not in test.reached, test.seconds))
    chosen_tests: list[Tested] = []
    spent = 0.0
    for queue, limit in ((first, ENOUGH_S / 2), (in_turn(first), ENOUGH_S)):
        for test in queue:
            if test not in chosen_tests and (not chosen_tests or spent + test.seconds <= limit):
                spent += test.seconds
                chosen_tests.append(test)
    return [test for test in first if test in chosen_tests]


def in_turn(tests: list[Tested]) -> list[Tested]:
    """The first test of each file, then the second of each, and so on."""
    counts: Counter[str] = Counter()
    ranks: list[int] = []
    for test in tests:
        file = test.name.partition("::")[0]
        ranks.append(counts[file])
        counts[file] += 1
    return [tests[index] for index in sorted(range(len(tests)), key=lambda index: (ranks[index], index))]


class Watcher:
    """A pytest plugin that says which test is on, and keeps what each reached and how it ended."""

    def __init__(self, tell: Callable[[str], None], reached: set[tuple[str, int]]) -> None:
        self.tests: list[tuple[str, float, list[str]]] = []
        self.failed: list[str] = []
        self.ran = 0
        self._tell, self._reached = tell, reached
        self._seconds = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Around each test."""
        self._tell(item.nodeid)
        self._reached.clear()
        self._seconds = 0.0
        outcome = yield
        self.tests.append((item.nodeid, round(self._seconds, 3), sorted(_words(self._reached))))
        return outcome

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """After each part of a test."""
        self._seconds += report.duration
        self.ran += report.when == "call"
        if report.failed:
            self.failed.append(report.nodeid)


class Chosen:
    """A pytest plugin that keeps some of the collected tests, in an order; pytest takes seconds for a long list."""

    def __init__(self, names: list[str]) -> None:
        self._place = {name: index for index, name in enumerate(names)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """When all are collected."""
        items[:] = sorted(
            (item for item in items if item.nodeid in self._place), key=lambda item: self._place[item.nodeid]
        )


def survey_tests(modules: list[str], files: list[str], tell: Callable[[str], None]) -> dict[str, Any]:
    """Run the tests on the oracle as it is, in this process; what ran outside of tests is `always`."""
    _forget()
    reached = install_notes(modules)
    watcher = Watcher(tell, reached)
    always: set[str] = set()

    class AfterCollection:
        """Takes what imports and collection reached."""

        def pytest_collection_finish(self) -> None:
            always.update(_words(reached))

    _pytest(files, [watcher, AfterCollection()], first=False)
    quick = [test for test in watcher.tests if test[1] <= LONGEST_S and test[0] not in watcher.failed]
    return {"always": sorted(always), "tests": quick, "failed": [f"{name} fails" for name in watcher.failed]}


def run_tests(mutant: Mutant, names: list[str], tell: Callable[[str], None]) -> dict[str, Any]:
    """Run the named tests on the mutant, in this process, until one fails."""
    if not names:
        return {"outcome": "survived", "judged": 0}
    _forget()
    install_mutant(mutant)
    watcher = Watcher(tell, set())
    files = list(dict.fromkeys(name.partition("::")[0] for name in names))
    code = _pytest(files, [watcher, Chosen(names)], first=True)
    if watcher.failed:
        return {"outcome": "caught", "how": "test", "by": watcher.failed[0].rpartition("/")[2], "judged": watcher.ran}
    if code != pytest.ExitCode.OK:
        return {"outcome": "caught", "how": "import", "by": f"pytest ended with {code!r}", "judged": watcher.ran}
    return {"outcome": "survived", "judged": watcher.ran}


def _pytest(names: list[str], plugins: list[object], first: bool) -> int | pytest.ExitCode:
    # Rewritten asserts would take the import of every module of ours away from the finder that changes it.
    options = [
        "-q",
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
        "--assert=plain",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-p",
        "no:unraisableexception",
        "-c",
        str(ROOT / "pyproject.toml"),
        f"--rootdir={ROOT}",
    ]
    return pytest.main([*options, *(["-x"] if first else []), *(str(ROOT / name) for name in names)], plugins)


def _forget() -> None:
    """What of ours was imported, but for the modules that run here."""
    for room in PACKAGES:
        forget(room, kept_modules=())


def _words(reached: set[tuple[str, int]]) -> frozenset[str]:
    return frozenset(f"{module}:{line}" for module, line in reached)


def _digest() -> str:
    """Of all source that an outcome depends on."""
    content = hashlib.blake2b(digest_size=6)
    for room in ("reference", "properties", "tests"):
        for file in sorted((ROOT / room).rglob("*.py")):
            content.update(file.read_bytes())
    return content.hexdigest()
