"""Shards: together they judge exactly the cases of one run, and the union of their results is its result."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specverify.agenda import LANES, Agenda, Saved, lanes_of
from tests.checkpoints import saved
from tests.meta.gate.conftest import Sample
from tests.meta.gate.test_ledger import CASE


@pytest.mark.parametrize("cases", [1, 5, 12, 23, 150, 500, 501])
@pytest.mark.parametrize(("shards", "jobs"), [(1, 1), (1, 3), (2, 1), (2, 2), (5, 4)])
def test_every_lane_and_every_saved_case_has_one_worker(cases: int, shards: int, jobs: int) -> None:
    cases_saved = tuple(Saved(replace(CASE, prompt=(at, 5)), str(at)) for at in range(7))
    parts = [
        Agenda(cases_saved, part=shard, parts=shards).slice(worker, jobs)
        for shard in range(shards)
        for worker in range(jobs)
    ]
    lanes = [lane for part in parts for lane in part.lanes(cases)]
    assert sorted(lane for lane, _ in lanes) == list(range(lanes_of(cases)))
    assert sum(share for _, share in lanes) == cases
    assert all(share > 0 for _, share in lanes)
    assert sorted(one.invariant or "" for part in parts for one in part.own_saved()) == [str(at) for at in range(7)]
    assert sum(part.wanted(cases) for part in parts) == cases + 7
    assert lanes_of(cases) <= LANES


def facts(lines: list[Any]) -> Counter[tuple[str, str, str, str]]:
    """The judged cases of results.jsonl, without times and what belongs to the run alone."""
    return Counter((line["id"], line["outcome"], str(line["invariants"]), str(line["findings"])) for line in lines)


@pytest.mark.parametrize("fault", ["", pytest.param("unverified", marks=pytest.mark.slow)])
def test_two_shards_judge_the_cases_of_one_run_and_find_the_same(sample: Sample, fault: str) -> None:
    sample.plant(fault)
    file = sample.folder / "pyproject.toml"
    file.write_text(file.read_text().replace('memory = ".specverify/memory"\n', "").replace("judged = 0.9", ""))
    words = ("gate", "--cases", "12", "--seed", "4")
    whole = sample(*words, "--report", "whole")
    codes = [sample(*words, "--shard", f"{at}/2", "--report", f"part{at}") for at in (1, 2)]
    lines = {name: read(sample.folder / name) for name in ("whole", "part1", "part2")}
    assert len(lines["whole"]) == 12
    assert facts(lines["part1"]) + facts(lines["part2"]) == facts(lines["whole"])
    assert not facts(lines["part1"]) & facts(lines["part2"])
    assert whole == (1 if fault else 0)
    assert (1 in codes) == (whole == 1)


def read(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_checkpoint_is_judged_too_and_its_prompts_are_split(sample: Sample) -> None:
    place = saved("llama", sample.folder)
    (sample.folder / "specverify.toml").write_text(
        'backends = ["cpu-eager"]\ncases = 12\ndtypes = ["float32"]\njobs = 1\n'
        'invariants = ["lossless.greedy-match"]\n'
        f'[[models]]\nmodel = "{place}"\ncases = 2\nnew-tokens = 4\n'
        'draft = "ngram"\nlayout = "paged"\n'
    )
    words = ("gate", "--seed", "4", "--report")
    assert sample(*words, "whole") == 0
    for at in (1, 2):
        assert sample(*words, f"part{at}", "--shard", f"{at}/2") == 0
    whole, *parts = (facts(read(sample.folder / name)) for name in ("whole", "part1", "part2"))
    assert sum(parts, Counter()) == whole
    assert sum(whole.values()) == 12 + 2  # one draft, and one invariant, which judges a prompt's long case alone
