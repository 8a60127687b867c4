"""Turns of costly tests: CI runs every cheap test each time, and of the files of costly ones a part in turn.

`tests/seconds.json` names the costly ones with the mean seconds of a run, as `python -m tests.measure seconds FILE`
writes it from pytest's report. A test that it does not name is cheap or new, and always runs. The costly tests of a
file take their turn together, since they share what a file draws or finds once.
"""

import json
from pathlib import Path
from xml.etree import ElementTree
from zlib import crc32

import pytest

TURNS = 5
"""In how many runs every test has run."""

COSTLY_S = 0.25
"""Mean seconds of the parameters of a costly test."""

RECORD = Path(__file__).parent / "seconds.json"


def turn_of(nodeid: str) -> int:
    """The turn of the costly tests of a test's file."""
    return crc32(nodeid.split("::", 1)[0].encode()) % TURNS


def function_of(nodeid: str) -> str:
    """The test function of a test, without its parameters."""
    return nodeid.split("[", 1)[0]


def add_option(parser: pytest.Parser) -> None:
    """Add `--turn` to the command line of pytest."""
    parser.addoption(
        "--turn",
        type=int,
        metavar="NUMBER",
        help=f"of the costly tests (tests/seconds.json) run those alone whose turn it is; {TURNS} successive numbers "
        "run all (default: all)",
    )


def leave_out_of_turn(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the costly tests of other turns than `--turn`."""
    turn = config.getoption("turn")
    if turn is None:
        return
    costly = set(json.loads(RECORD.read_text()))
    chosen: list[pytest.Item] = []
    waiting: list[pytest.Item] = []
    for item in items:
        waits = function_of(item.nodeid) in costly and turn_of(item.nodeid) != turn % TURNS
        (waiting if waits else chosen).append(item)
    if waiting:
        config.hook.pytest_deselected(items=waiting)
        items[:] = chosen


def header(config: pytest.Config) -> list[str]:
    """The line of pytest's header that says whose turn it is; none where all tests run."""
    turn = config.getoption("turn")
    if turn is None:
        return []
    return [f"turn {turn % TURNS + 1} of {TURNS}: the costly tests of the other turns do not run"]


def costly_functions(report: Path) -> dict[str, float]:
    """The costly test functions of a run and the mean seconds of their parameters, from its `--junitxml` report."""
    seconds: dict[str, list[float]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].replace(".", "/") + ".py"
        seconds.setdefault(f"{file}::{function_of(case.attrib['name'])}", []).append(float(case.attrib["time"]))
    means = {function: sum(times) / len(times) for function, times in seconds.items()}
    return {function: round(mean, 2) for function, mean in sorted(means.items()) if mean >= COSTLY_S}
