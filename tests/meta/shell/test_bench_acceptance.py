"""`bench acceptance` counts compilations, tells warm-up from the rest, and compares decisions; no time is asserted."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specverify.backends.engine.composition import SEAMS
from specverify.backends.engine.sampling.batched import BatchedVerify
from specverify.backends.engine.sampling.coins import Coins, spent_places
from specverify.backends.engine.sampling.question import Question
from specverify.backends.engine.sampling.rules import BATCHED, PROGRAMS
from specverify.backends.engine.sampling.seams import SamplingSeams
from specverify.bench import acceptance
from specverify.bench.acceptance import RULES, WAYS, Decisions, Sizes, Way, decide_alone, measure
from specverify.isolation.engine import COMPILED
from specverify.reference.rules import Rule
from specverify.reports.pages.acceptance import ALONE, WORDS, acceptance_page, advise
from tests.inprocess import exit_code_of

SMALL = Sizes(nodes=3, vocabulary=16, rounds=3)
INTERPRETED = {name: WAYS[name] for name in (ALONE, "one call")}
CAPTURED = {**INTERPRETED, "captured": WAYS["captured"]}


def test_every_rule_and_batch_is_timed_and_compiled_once() -> None:
    figures = measure((1, 2, 3), RULES, SMALL, CAPTURED)
    places = [(row["rule"], row["batch"], row["way"]) for row in figures["rows"]]
    assert places == [(rule, batch, way) for rule in RULES for batch in (1, 2, 3) for way in CAPTURED]
    for row in figures["rows"]:
        is_first = row["way"] == "captured" and row["batch"] == 1
        assert (row["compilations"], row["late"]) == (int(is_first), 0)
        assert row["low_ms"] <= row["median_ms"] <= row["high_ms"]
        assert row["warmup_s"] > 0
        assert row["way"] != ALONE or row["ratio"] == 1
    warmups = {(row["rule"], row["batch"]): row["warmup_s"] for row in figures["rows"] if row["way"] == "captured"}
    assert all(warmups[rule, 1] > warmups[rule, 3] for rule in RULES)  # seconds against milliseconds
    assert figures["same"]
    assert figures["absent"] == {}
    assert all(0 < row["accepted"] < row["levels"] for row in figures["rules"])
    page = acceptance_page(figures)
    assert max(map(len, page.splitlines())) <= 80
    assert "Advice: " in page


def other_token(questions: list[Question], seams: SamplingSeams) -> Decisions:
    """The decisions of each request alone, but for the token of the last one."""
    decisions = decide_alone(questions, seams)
    path, token = decisions[-1]
    return [*decisions[:-1], (path, token + 1)]


def first_request(questions: list[Question], seams: SamplingSeams) -> Decisions:
    """The decision of the first request alone."""
    return decide_alone(questions[:1], seams)


@pytest.mark.parametrize("wrong", [other_token, first_request])
def test_a_decision_unlike_that_of_the_request_alone_ends_with_1(
    wrong: Way, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(acceptance, "WAYS", {**INTERPRETED, "wrong": lambda: wrong})
    file = tmp_path / "out.json"
    options = ("--batch", "2", "--rule", "chain", "--nodes", "3", "--vocabulary", "16", "--json", file)
    assert exit_code_of("bench", "acceptance", *options) == 1
    figures = json.loads(file.read_text())
    assert not figures["same"]
    assert [row["differences"] > 0 for row in figures["rows"]] == [False, False, True]
    out = capsys.readouterr().out
    assert "decided otherwise than alone" in " ".join(out.split())
    assert "Advice: none" in out


@pytest.mark.slow
def test_a_way_that_does_not_compile_is_absent_with_its_reason_in_one_line() -> None:
    tried = []

    def break_down(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        tried.append(graph)
        raise RuntimeError("No working C++ compiler found in\n no-such-compiler")

    ways: dict[str, Callable[[], Way]] = {ALONE: WAYS[ALONE], "inductor": lambda: BatchedVerify(break_down)}  # type: ignore[arg-type]
    figures = measure((2,), ("chain", "target-only"), SMALL, ways)
    assert len(tried) == 1  # not once more for the second rule: a failure takes seconds
    assert [row["way"] for row in figures["rows"]] == [ALONE, ALONE]
    (reason,) = figures["absent"].values()
    assert "No working C++ compiler" in reason
    assert "\n" not in reason
    assert "inductor: not measured" in acceptance_page(figures)


def test_a_request_whose_coin_rounding_could_turn_is_drawn_anew() -> None:
    questions = acceptance.draw_questions(Rule("target-only"), SMALL, 20, 7)
    assert min(map(acceptance.distance_to_edges, questions)) >= acceptance.ROUNDING
    question = questions[0]
    dice = Coins(question.dice.uniforms, question.dice.nodes, True)
    decide_alone([replace(question, dice=dice)], SEAMS.sampling)
    assert dice.low is not None
    place = spent_places(dice, 0)[-1]
    question.dice.uniforms[0, place] = dice.low[0, place].float() + 1e-7
    assert acceptance.distance_to_edges(question) < acceptance.ROUNDING


def row(way: str, batch: int, ms: float, warmup_s: float = 0.0, compilations: int = 0, rule: str = "chain") -> Any:
    """A row of figures whose times spread by a tenth; each alone takes 10 ms."""
    return {
        "rule": rule, "batch": batch, "way": way, "compilations": compilations, "warmup_s": warmup_s, "late": 0,
        "median_ms": ms, "low_ms": 0.9 * ms, "high_ms": 1.1 * ms, "ratio": ms / 10, "differences": 0,
    }  # fmt: skip


def advice(*rows: Any, is_same: bool = True) -> str:
    """The advice on these rows, beside each alone in the same batches."""
    alone = [row(ALONE, batch, 10.0) for batch in sorted({other_row["batch"] for other_row in rows})]
    return advise({"rows": [*alone, *rows], "same": is_same})


def test_the_advice() -> None:
    assert {*WORDS} | {ALONE} == {*WAYS}
    slow_alone = advice(row("one call", 1, 12), row("one call", 8, 5))
    assert "not compiled: at 8 requests it takes 0.50 of the time" in slow_alone
    assert slow_alone.endswith("in a batch of 1, each alone is as fast or faster.")
    # 30 s over the 3 ms by which inductor is faster than the uncompiled call.
    paid = advice(row("one call", 8, 5), row("inductor", 8, 2, 30.0, 1))
    assert "takes 0.20 of the time" in paid
    assert "30 s is paid back after 10000 calls" in paid
    assert "each request alone" in advice(row("one call", 8, 12))
    assert "overlap" in advice(row("one call", 8, 9))
    assert "is wrong" in advice(row("one call", 8, 2), is_same=False)


def test_wrong_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of("bench", "acceptance", "--rule", "typical") == 2
    batched = [name for name, program in PROGRAMS.items() if program in BATCHED]
    assert capsys.readouterr().err.strip().endswith(f"in one call are {', '.join(batched)}")
    assert exit_code_of("bench", "acceptance", "--batch", "4,1") == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, while inductor is imported
def test_inductor_is_compiled_once_and_decides_alike() -> None:
    before = os.environ.get(COMPILED)
    figures = measure((2, 3, 5), RULES, SMALL)
    assert os.environ.get(COMPILED) == before
    assert figures["absent"] == {}
    assert figures["same"]
    compiled = [row for row in figures["rows"] if row["way"] == "inductor"]
    assert [(row["rule"], row["compilations"] + row["late"]) for row in compiled] == [
        (rule, int(batch == 2)) for rule in RULES for batch in (2, 3, 5)
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_without_a_cpp_compiler_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config, cpp_builder

    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    for search in (cpp_builder.get_cpp_compiler, getattr(cpp_builder, "_get_cpp_compiler", None)):
        getattr(search, "cache_clear", lambda: None)()
    figures = measure((2,), ("chain",), SMALL)
    assert [row["way"] for row in figures["rows"]] == [*CAPTURED]
    assert "compiler" in figures["absent"]["inductor"]
