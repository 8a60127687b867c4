"""Mutation scores: mutants are stable, run where they should, are caught where they must be, and are judged once."""

import ast
import json
import os
import random
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from specverify.reference.case_json import case_from_json
from tests.cases import CORPUS
from tests.measure.mutation import engine_scope, oracle_scope
from tests.measure.mutation.bench import Options, bench, draw_mutants
from tests.measure.mutation.engine_judge import Posed, Survey, corpus, judge_mutant, reaching
from tests.measure.mutation.generate import Mutant, mutants_of
from tests.measure.mutation.known import Record, read_records
from tests.measure.mutation.loader import source_of
from tests.measure.mutation.pool import Work, run
from tests.measure.pages import mutants_page

REFERENCE = oracle_scope.Reference(Path("nowhere")).modules()
MODULES = (*engine_scope.modules(), *REFERENCE)

SOURCE = '''
def far(one: int, two: "int | None" = 3, *, deep: bool = False) -> bool:
    """A docstring of 5 < 6."""
    total = one
    total += 2
    if not deep and total < 4:
        raise ValueError(f"{total + 1} is too {'far' if deep else 'near'}")
    for at in range(total):
        if at == 3:
            break
    assert total > 0
    return min(total, one) in [far(one, total, deep=deep) for one in range(2) if one][1:total]
'''


def one_child(work: Work) -> dict[str, Any]:
    """What it returns, in a child that imports without pytest, which would rewrite every module of ours first."""

    def plainly(tell: Callable[[str], None]) -> Any:
        # A forked child has no other threads of torch, and would wait for them where an earlier test had started some.
        torch.set_num_threads(1)
        sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "AssertionRewritingHook"]
        return work(tell)

    (outcome,) = run([(None, plainly)], 1, 120.0, lambda: False)
    returned: dict[str, Any] = outcome[1]["returned"]
    return returned


@cache
def mutants_in(module: str) -> list[Mutant]:
    """All mutants of a module. They are made where a test asks: those of all modules take seconds."""
    return mutants_of(module, source_of(module)[1])[0]


def of_line(module: str, part: str, operator: str, number: int = 0) -> Mutant:
    """The mutant of an operator on the line that holds `part`."""
    return [mutant for mutant in mutants_in(module) if part in mutant.before and mutant.operator == operator][number]


def test_every_kind_of_change_is_made_and_texts_types_and_asserts_are_left() -> None:
    mutants, skipped = mutants_of("m", SOURCE)
    changed = {(mutant.operator, mutant.applied(SOURCE).splitlines()[mutant.line - 1].strip()) for mutant in mutants}
    assert {
        ("constant", 'def far(one: int, two: "int | None" = 4, *, deep: bool = False) -> bool:'),
        ("boolean", 'def far(one: int, two: "int | None" = 3, *, deep: bool = True) -> bool:'),
        ("deletion", "pass"),
        ("arithmetic", "total -= 2"),
        ("and-or", "if (not deep or total < 4):"),
        ("not", "if deep and total < 4:"),
        ("compare", "if not deep and (total <= 4):"),
        ("branch", "if True:"),
        ("branch", "if False:"),
        ("bound", "for at in range((total - 1)):"),
        ("jump", "continue"),
        ("return", "return False"),
    } <= changed
    last = {mutant.after for mutant in mutants if mutant.line == 12}
    assert {
        "return max(total, one) in [far(one, total, deep=deep) for one in range(2) if one][1:total]",
        "return (min(total, one) not in [far(one, total, deep=deep) for one in range(2) if one][1:total])",
        "return min(total, one) in [(far(total, one, deep=deep)) for one in range(2) if one][1:total]",
        "return min(total, one) in [(far(one, total)) for one in range(2) if one][1:total]",
        "return min(total, one) in [far(one, total, deep=deep) for one in range(2) if True][1:total]",
        "return min(total, one) in [far(one, total, deep=deep) for one in range(2) if one][1:(total + 1)]",
    } <= last
    assert not [mutant for mutant in mutants if mutant.line in (3, 7, 11)]
    assert set(skipped) == {"annotations", "texts", "what is raised", "asserts"} - {"annotations", "texts"}


def test_mutants_are_the_same_every_time_and_each_changes_the_program() -> None:
    modules = ["specverify.backends.engine.lower_tree", "specverify.reference.tree"]
    every, drawn, _ = draw_mutants(modules, 20, 3)
    assert [mutant.id for mutant in every] == [mutant.id for name in modules for mutant in mutants_in(name)]
    assert len({mutant.id for mutant in every}) == len(every)
    assert drawn == draw_mutants(modules, 20, 3)[1] != draw_mutants(modules, 20, 4)[1]
    for mutant in drawn:
        source = source_of(mutant.module)[1]
        assert ast.dump(ast.parse(mutant.applied(source))) != ast.dump(ast.parse(source)), mutant.id


def test_a_wrong_ancestor_mask_is_caught_and_an_idle_default_is_not() -> None:
    corpus_cases = [
        (name, case)
        for name, case, _ in corpus(CORPUS)
        if name in ("tree-masked-as-chain", "ring-trimmed-for-one-token")
    ]
    posed = tuple(Posed(case, name, frozenset(), "", None) for name, case in corpus_cases)
    wrong = of_line("specverify.backends.engine.accept", "==", "compare")
    report = one_child(partial(judge_mutant, wrong, "cpu-eager", posed, "turns"))
    assert (report["outcome"], report["how"]) == ("caught", "finding"), report
    idle = of_line("specverify.backends.engine.kv.lanes", "def get_seq_length", "constant")
    report = one_child(partial(judge_mutant, idle, "cpu-eager", posed[:1], "turns"))
    assert report == {"outcome": "survived", "judged": 1, "differing": 1}


@pytest.mark.slow
def test_a_wrong_oracle_is_caught_by_its_tests() -> None:
    wrong = of_line("specverify.reference.oracle.stopping", "min_tokens", "compare")
    names = ["tests/meta/oracle/test_stopping.py::test_min_tokens_passes_over_what_completes_before_it"]
    report = one_child(partial(oracle_scope.run_tests, wrong, names))
    assert (report["outcome"], report["how"]) == ("caught", "test"), report


def test_only_cases_that_reach_the_statement_are_judged() -> None:
    case = case_from_json(json.loads(next(iter(sorted(CORPUS.glob("*.json")))).read_text())["case"])
    mutant = of_line("specverify.backends.engine.accept", "==", "compare")
    there, elsewhere = (f"{mutant.module}:{line}" for line in (mutant.statement, mutant.statement + 1))
    posed = tuple(Posed(case, "", frozenset({line}), "", None) for line in (there, elsewhere))
    assert reaching(mutant, Survey(frozenset({elsewhere}), posed)) == posed[:1]
    assert reaching(mutant, Survey(frozenset({there}), posed)) == posed, "it runs at import, before any case"
    assert reaching(mutant, Survey(frozenset(), posed)) == posed, "its module could not be noted"


class Counting:
    """A scope of one module, whose mutants are caught where their line is even."""

    silence_s = 30.0
    module = "specverify.reference.tape"

    def __init__(self, digest: str) -> None:
        self.digest = digest
        self.stages = engine_scope.STAGES[:2]
        self.differing: list[str] = []
        self.calls: list[tuple[str, str]] = []

    def modules(self) -> list[str]:
        return [self.module]

    def work(self, mutant: Mutant, stage: Any) -> Work:
        self.calls.append((mutant.id, stage.name))
        return partial(self._outcome, mutant.line % 2 == 0)

    @staticmethod
    def _outcome(caught: bool, tell: Callable[[str], None]) -> dict[str, Any]:
        return {"outcome": "caught", "how": "finding", "by": "x"} if caught else {"outcome": "survived", "judged": 1}


@pytest.mark.slow
def test_what_was_judged_is_not_judged_again(tmp_path: Path) -> None:
    options = Options("reference", 5, 1, 2, None, tmp_path)
    first = Counting("a")
    figures = bench(options, first)
    judged_once = figures["caught"] + 2 * figures["survived"]
    assert len(first.calls) == judged_once
    assert figures["caught"] + figures["survived"] == 5 - figures["equivalent"]
    assert figures["survived"] == len(figures["survivors"]) > 0
    assert figures["red"]
    assert not figures["unfinished"]
    assert figures["survivors"][0]["before"] in mutants_page(figures)
    again = Counting("a")
    assert bench(options, again)["survivors"] == figures["survivors"]
    assert again.calls == []
    changed = Counting("b")
    bench(options, changed)
    assert len(changed.calls) == 2 * figures["survived"], "survivors of other source are judged again"


def test_a_run_that_is_out_of_time_is_no_pass(tmp_path: Path) -> None:
    figures = bench(Options("reference", 8, 1, 1, 1e-9, tmp_path), Counting("a"))
    assert figures["unfinished"]
    assert not figures["red"], "what was not judged has not survived"
    assert figures["not_judged"] + figures["equivalent"] == 8
    assert "NOT FINISHED" in mutants_page(figures)


def test_a_child_that_hangs_or_dies_is_said_to() -> None:
    def spins(tell: Callable[[str], None]) -> None:
        tell("case 3")
        while True:
            pass

    def dies(tell: Callable[[str], None]) -> None:
        tell("case 4")
        os._exit(9)

    outcomes = [outcome for _, outcome in run([(None, spins), (None, dies)], 1, 0.2, lambda: False)]
    assert [(outcome["ended"], outcome["said"]) for outcome in outcomes] == [("silent", "case 3"), ("died", "case 4")]


@pytest.mark.slow
def test_every_record_speaks_of_source_that_there_is(tmp_path: Path) -> None:
    every = [mutant for name in MODULES for mutant in mutants_in(name)]
    assert read_records().idle(every) == []
    stale = tmp_path / "known.json"
    mutant = random.Random(0).choice(every)
    reasons = {f"{mutant.marker}@{mutant.place}": "x", "gone": "y"}
    stale.write_text(json.dumps({"not_run": {}, "equivalent": {mutant.module: {mutant.within: reasons}}}))
    records = read_records(stale)
    assert records.idle(every) == [f"{mutant.module} {mutant.within}: gone"]
    assert records.why_equivalent(mutant) == "x"


RECORD_SOURCE = "class Kept:\n  def begin(self, other, columns):\n    self.length = other.length\n    return columns\n"


@pytest.mark.parametrize("place", [False, True])
def test_a_rename_a_move_and_a_formatter_leave_a_record_its_line(place: bool) -> None:
    """The function, its parameters and the module get other names; a record made before still speaks of the line."""
    first = next(mutant for mutant in mutants_of("backends.old", RECORD_SOURCE)[0] if mutant.operator == "deletion")
    record = Record(first.module, first.within, "x", f"{first.marker}@{first.place}" if place else first.marker)
    renamed = RECORD_SOURCE
    for old, new in (("Kept", "Cache"), ("begin", "start"), ("other", "twin"), ("length", "columns_held")):
        renamed = renamed.replace(old, new)
    broken = renamed.replace("(self, twin, columns)", "(\n    self,\n    twin,\n    columns,\n  )")
    broken = broken.replace("= twin.columns_held", "= (\n      twin.columns_held\n    )")
    for source in (renamed, broken):
        moved = mutants_of("backends.kv.new", source)[0]
        assert [mutant.operator for mutant in moved if record.fits(mutant)] == ["deletion"]
    changed = mutants_of("backends.old", RECORD_SOURCE.replace("other.length", "other.length + 1"))[0]
    assert not [mutant for mutant in changed if record.fits(mutant)]


def test_a_place_tells_equal_lines_of_a_function_apart() -> None:
    source = "def add(total, by):\n  total += by\n  total += by\n  return total\n"
    first, second = (mutant for mutant in mutants_of("m", source)[0] if mutant.operator == "deletion")
    assert first.marker == second.marker
    assert first.place != second.place
    assert Record("m", "add", "x", first.marker).fits(second)
    assert not Record("m", "add", "x", f"{first.marker}@{first.place}").fits(second)


def test_half_the_time_is_for_the_quickest_tests_and_half_for_files_in_turn() -> None:
    line = "specverify.reference.tree:9"

    def test(file: str, number: int, seconds: float, reaches: bool = True) -> oracle_scope.Tested:
        return oracle_scope.Tested(f"{file}.py::test_{number}", seconds, frozenset([line] if reaches else []))

    # Ten quick tests fill one half, the slow file's two the other; its third, and other quick ones, find no room.
    half = oracle_scope.ENOUGH_S / 2
    many = [test("many", number, half / 10 + number / 1000) for number in range(20)]
    slow = [test("slow", number, half * 0.4 + number / 1000) for number in range(3)]
    away = test("away", 0, half / 100, reaches=False)
    chosen = oracle_scope.choice([*slow, away, *many], line)
    assert slow[0] in chosen
    assert slow[2] not in chosen
    assert many[8] in chosen
    assert many[19] not in chosen
    assert chosen == sorted(chosen, key=lambda timed_test: (timed_test is away, timed_test.seconds))
    assert sum(timed_test.seconds for timed_test in chosen) <= oracle_scope.ENOUGH_S
    assert oracle_scope.choice([*slow[:1], test("slow", 9, 999.0)], line) == slow[:1]
    assert oracle_scope.choice([test("slow", 9, 999.0)], line), "one at least"
    assert oracle_scope.in_turn([*many[:2], *slow[:2]]) == [many[0], slow[0], many[1], slow[1]]
