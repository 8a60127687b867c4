"""Functions that a clean run enters, and functions that a fault replaces: a fault out of a run's way is not run."""

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import islice

import pytest

from specverify.backends import faults
from specverify.backends.engine.composition import SEAMS
from specverify.campaign.case_stream import Stream
from specverify.plan import default_dtypes
from specverify.properties.invariants import ALL
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.sampling import Stops
from specverify.reference.tree import Tree
from specverify.selftest.clean_runs import CleanRuns, digest
from specverify.selftest.entered import entered_in, replaced_functions
from specverify.selftest.hunt import HuntPlan, hunt
from specverify.setup.subjects import open_planted, subject_of
from tests.models import LLAMA

CHAIN = Case(LLAMA, (3, 1, 4), Scripted((Tree((0, 0, 1), (4, 2, 5)),)), stops=Stops(2))

OUT_OF_ITS_WAY = "grammar-mask-of-parent"
"""A fault that no case without a grammar enters."""


def double(number: int) -> int:
    return 2 * number


def triple(number: int) -> int:
    return 3 * number


@cache
def remembered(number: int) -> int:
    return number


class Cell:
    size = 4

    def read(self) -> int:
        return self.size

    @property
    def width(self) -> int:
        return double(self.size)

    @staticmethod
    def zero() -> int:
        return 0


class Read(Cell):
    """Overrides a method, by a function of its own."""

    def read(self) -> int:
        return self.wrong()

    def wrong(self) -> int:
        return -1


class Width(Cell):
    @property
    def width(self) -> int:
        return 0


class Zero(Cell):
    @staticmethod
    def zero() -> int:
        return 1


class Size(Cell):
    size = 5


class Compared(Cell):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Inner:
    scale: Callable[[int], int] = double
    cell: type[Cell] = Cell


@dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    cell: Cell = field(default_factory=Cell)
    lookup: Callable[[int], int] = remembered


def code(function: Callable[..., object]) -> object:
    return function.__code__


@pytest.mark.parametrize(
    ("planted", "replaced"),
    [
        (Outer(), set()),
        (Outer(Inner(scale=triple)), {code(double)}),
        (Outer(Inner(scale=partial(triple))), {code(double)}),
        (Outer(Inner(cell=Read)), {code(Cell.read)}),
        (Outer(Inner(cell=Read), cell=Zero()), {code(Cell.read), code(Cell.zero)}),
        (Outer(cell=Width()), {code(vars(Cell)["width"].fget)}),
    ],
)
def test_the_functions_that_a_fault_replaces(planted: Outer, replaced: set[object]) -> None:
    assert set(replaced_functions(Outer(), planted) or ()) == replaced


@pytest.mark.parametrize("planted", [Outer(cell=Size()), Outer(cell=Compared()), Outer(lookup=double)])
def test_what_no_function_is_in_place_of_cannot_be_seen(planted: Outer) -> None:
    assert replaced_functions(Outer(), planted) is None


def test_functions_are_noted_while_a_run_lasts_and_no_longer() -> None:
    result, entered = entered_in(lambda: double(3))
    assert result == 6
    assert code(double) in entered
    assert code(triple) not in entered
    assert sys.getprofile() is None
    with pytest.raises(ZeroDivisionError):
        entered_in(lambda: 1 // 0)
    assert sys.getprofile() is None


def test_functions_are_noted_in_the_threads_of_a_run_too() -> None:
    def run() -> None:
        thread = threading.Thread(target=double, args=(3,))
        thread.start()
        thread.join()

    _, entered = entered_in(run)
    assert code(double) in entered
    assert threading.getprofile() is None
    profiles: list[object] = []
    thread = threading.Thread(target=lambda: profiles.append(sys.getprofile()))
    thread.start()
    thread.join()
    assert profiles == [None]


@pytest.mark.parametrize("fault", ["items-joined-as-they-come", "decode-before-last-item"])
def test_a_fault_of_another_process_is_hunted(fault: str) -> None:
    planted = open_planted("cpu-handed-over", fault)
    assert CleanRuns("cpu-handed-over").replaced_in(planted) is None
    for sieved in (True, False):
        assert hunt(HuntPlan(fault, "cpu-handed-over", 1, 12, ("float32",), 1.0, float("inf"), sieved)).caught


def test_what_an_earlier_case_left_remembered_counts_as_entered_again() -> None:
    clean_runs = CleanRuns("cpu-eager")
    masked = clean_runs.replaced_in(open_planted("cpu-eager", "tree-masked-as-chain"))
    assert clean_runs.worth_judging_with_variants(CHAIN, ALL, False, masked) == ALL
    clean_runs._entered_by_variants.clear()
    assert clean_runs.worth_judging_with_variants(CHAIN, ALL, False, masked) == ALL


def test_a_fault_out_of_the_way_of_a_clean_run_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clean_runs = CleanRuns("cpu-eager")
    planted = open_planted("cpu-eager", OUT_OF_ITS_WAY)
    monkeypatch.setattr(planted, "run", lambda case: pytest.fail("it was run"))
    replaced = clean_runs.replaced_in(planted)
    assert replaced
    assert clean_runs.worth_judging(CHAIN, subject_of(planted), ALL, tables=False, replaced=replaced) == ()
    assert clean_runs.worth_judging_with_variants(CHAIN, ALL, False, replaced) == ()
    masked = clean_runs.replaced_in(open_planted("cpu-eager", "tree-masked-as-chain"))
    assert clean_runs.worth_judging_with_variants(CHAIN, ALL, False, masked) == ALL
    assert clean_runs.worth_judging_with_variants(CHAIN, ALL, False, None) == ALL


def test_a_hunt_through_variants_leaves_out_what_none_of_them_enters(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def note_question(*_: object) -> tuple[()]:
        asked.append("clean")
        return ()

    monkeypatch.setattr(CleanRuns, "worth_judging_with_variants", note_question)
    plan = HuntPlan(OUT_OF_ITS_WAY, "cpu-eager", 3, 2, ("float32",), 1.0, float("inf"))
    assert not hunt(plan).caught
    assert asked == ["clean"] * 2
    hunt(replace(plan, fault=None, cases=1))
    assert asked == ["clean"] * 2, "a clean hunt judges by all invariants"


def test_nearly_all_faults_replace_functions_alone() -> None:
    seen = [replaced_functions(SEAMS, fault.plant(SEAMS)) for fault in faults.ALL if fault.on == "cpu-eager"]
    assert sum(functions is not None for functions in seen) > 0.9 * len(seen)
    assert frozenset() not in seen, "a fault that replaces nothing"


@pytest.mark.slow
def test_faults_out_of_the_way_of_drawn_cases_leave_every_bit() -> None:
    clean_runs = CleanRuns("cpu-eager")
    drawn = list(islice(Stream(117002, default_dtypes("cpu-eager")), 6))
    compared = 0
    for fault in (fault for fault in faults.ALL if fault.on == "cpu-eager"):
        backend = open_planted("cpu-eager", fault.name)
        replaced = clean_runs.replaced_in(backend)
        subject = subject_of(backend, keep=1)
        for case in drawn:
            if clean_runs.worth_judging(case, subject, ALL, False, replaced) == () and replaced is not None:
                assert digest(subject, case) == digest(clean_runs._clean, case), (fault.name, case.id)
                compared += 1
    assert compared > 100
