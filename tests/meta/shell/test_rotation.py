"""Turns of costly tests: each has its turn, cheap and new ones always run, and the record names what costs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import rotation
from tests.rotation import COSTLY_S, RECORD, TURNS, costly_functions, file_of, leave_out_of_turn, turns_of

ROOT = Path(__file__).resolve().parents[3]


class Hooks:
    def __init__(self) -> None:
        self.deselected: list[Item] = []

    def pytest_deselected(self, items: "list[Item]") -> None:
        self.deselected += items


class Config:
    def __init__(self, turn: int | None) -> None:
        self.hook = Hooks()
        self._turn = turn

    def getoption(self, name: str) -> int | None:
        assert name == "turn"
        return self._turn


class Item:
    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid


FILES = [f"tests/test_{letter}.py" for letter in "abcdefghijkl"]

ITEMS = [
    Item(f"{file}::{test}") for file in FILES for test in ("test_costly[1]", "test_costly[2]", "test_cheap", "test_new")
]


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{file}::test_costly" for file in FILES]
    (tmp_path / "seconds.json").write_text(json.dumps(dict.fromkeys(names, 3.0)))
    monkeypatch.setattr(rotation, "RECORD", tmp_path / "seconds.json")


def run_in(turn: int | None) -> tuple[list[str], list[str]]:
    """The tests that run in a turn, and those that wait."""
    config, items = Config(turn), list(ITEMS)
    leave_out_of_turn(config, items)  # type: ignore[arg-type]
    return [item.nodeid for item in items], [item.nodeid for item in config.hook.deselected]


@pytest.mark.usefixtures("record")
def test_every_costly_test_has_its_turn_and_the_others_always_run() -> None:
    everything = [item.nodeid for item in ITEMS]
    assert run_in(None) == (everything, [])
    costly = [nodeid for nodeid in everything if "test_costly" in nodeid]
    ran: list[str] = []
    for turn in range(7, 7 + TURNS):
        chosen, waiting = run_in(turn)
        assert chosen == [nodeid for nodeid in everything if nodeid in chosen], "in their order"
        assert sorted(chosen + waiting) == sorted(everything)
        assert set(waiting) <= set(costly)
        assert waiting, "each turn leaves some to others"
        ran += [nodeid for nodeid in chosen if nodeid in costly]
    assert sorted(ran) == sorted(costly)


def test_the_turns_share_the_recorded_seconds() -> None:
    record = json.loads(RECORD.read_text())
    turns = turns_of(record)
    shares = [sum(total for name, total in record.items() if turns[file_of(name)] == turn) for turn in range(TURNS)]
    assert min(shares) > 0.9 * max(shares)
    assert min(record.values()) >= COSTLY_S


def test_a_report_of_pytest_tells_which_tests_are_costly(tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(
        "import pytest, time\n"
        "@pytest.mark.parametrize('seconds', [0.0, 0.7])\n"
        "def test_costly(seconds): time.sleep(seconds)\n"
        "def test_cheap(): pass\n"
    )
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    subprocess.run([*command, "--junitxml", report, tmp_path], check=True, cwd=tmp_path, capture_output=True)
    assert list(costly_functions(report)) == ["test_sample.py::test_costly"]


def test_ci_runs_the_turn_of_its_commit() -> None:
    assert 'pytest -n 2 --turn "$turn"' in (ROOT / ".ci" / "run").read_text()
