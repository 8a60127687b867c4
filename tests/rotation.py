"""Turns of costly tests: CI runs every cheap test each time, and of the files of costly ones a part in turn.

`tests/seconds.json` names the costly ones with their seconds in a run, as `python -m tests.measure seconds FILE`
writes it from pytest's report. A test that it does not name is cheap or new, and always runs. The costly tests of a
file take their turn together, since they share what a file draws or finds once; turns take about the same time.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

TURNS = 10
"""In how many runs every test has run."""

COSTLY_S = 0.25
"""Mean seconds of the parameters of a costly test."""

RECORD = Path(__file__).parent / "seconds.json"


def turns_of(seconds: Mapping[str, float]) -> dict[str, int]:
    """The turn of each file: the costliest files first, each in the turn that has the least to do."""
    by_file: dict[str, float] = {}
    for function, total in seconds.items():
        by_file[file_of(function)] = by_file.get(file_of(function), 0.0) + total
    load = [0.0] * TURNS
    turns: dict[str, int] = {}
    for file, total in sorted(by_file.items(), key=lambda entry: (-entry[1], entry[0])):
        turns[file] = load.index(min(load))
        load[turns[file]] += total
    return turns


def file_of(nodeid: str) -> str:
    """The file of a test or of a test function."""
    return nodeid.split("::", 1)[0]


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
    costly = json.loads(RECORD.read_text())
    turns = turns_of(costly)
    chosen: list[pytest.Item] = []
    waiting: list[pytest.Item] = []
    for item in items:
        waits = function_of(item.nodeid) in costly and turns[file_of(item.nodeid)] != turn % TURNS
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
    """The costly test functions of a run and the seconds of all their parameters, from its `--junitxml` report."""
    seconds: dict[str, list[float]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].replace(".", "/") + ".py"
        seconds.setdefault(f"{file}::{function_of(case.attrib['name'])}", []).append(float(case.attrib["time"]))
    return {
        function: round(sum(times), 2)
        for function, times in sorted(seconds.items())
        if sum(times) / len(times) >= COSTLY_S
    }
