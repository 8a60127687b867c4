"""Shards: together they judge exactly the cases of one run, and the union of their results is its result."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from specverify.agenda import Agenda, Saved
from specverify.lanes import LANES, lanes_of
from specverify.reports.gate.record import schema
from tests.cases import ONE_CHILD
from tests.checkpoints import save_checkpoint
from tests.meta.gate.conftest import Sample


@pytest.mark.parametrize("cases", [1, 5, 12, 23, 150, 500, 501])
@pytest.mark.parametrize(("shards", "jobs"), [(1, 1), (1, 3), (2, 1), (2, 2), (5, 4)])
def test_every_lane_and_every_saved_case_has_one_worker(cases: int, shards: int, jobs: int) -> None:
    cases_saved = tuple(Saved(replace(ONE_CHILD, prompt=(number, 5)), str(number)) for number in range(7))
    parts = [
        Agenda(cases_saved, part=shard, parts=shards).slice(worker, jobs)
        for shard in range(shards)
        for worker in range(jobs)
    ]
    lanes = [lane for part in parts for lane in part.lanes(cases)]
    assert sorted(lane for lane, _ in lanes) == list(range(lanes_of(cases)))
    assert sum(share for _, share in lanes) == cases
    assert all(share > 0 for _, share in lanes)
    assert sorted(saved_case.invariant or "" for part in parts for saved_case in part.own_saved()) == [
        str(number) for number in range(7)
    ]
    assert sum(part.num_cases(cases) for part in parts) == cases + 7
    assert lanes_of(cases) <= LANES


def test_more_lanes_make_more_parts_with_no_case_in_common() -> None:
    parts = [Agenda(part=part, parts=400, most_lanes=400) for part in range(400)]
    lanes = [lane for part in parts for lane in part.lanes(2400)]
    assert sorted(lane for lane, _ in lanes) == list(range(400))
    assert {share for _, share in lanes} == {6}
    assert lanes_of(2400) == LANES


def test_shards_beyond_the_lanes_say_which_option_makes_more(sample: Sample) -> None:
    words = ("gate", "--cases", "300", "--seed", "4", "--shard", "26/50")
    assert sample(*words) == 2
    assert "make at most 24 shards; --lanes 50 makes more" in sample.err
    assert sample("gate", "--cases", "12", "--seed", "4", "--shard", "3/50") == 2
    assert "make at most 2 shards\n" in sample.err


def test_idle_workers_are_noted(sample: Sample) -> None:
    assert sample("gate", "--cases", "12", "--jobs", "3", "--seed", "4") == 0, sample.out
    (note,) = (note for note in sample.result()["notes"] if "idle" in note)
    assert note.startswith("1 of 3 workers of ")
    assert note.endswith("are idle: 12 cases are 2 lanes (more cases make more)")


def facts(lines: list[Any]) -> Counter[tuple[str, str, str, str]]:
    """The judged cases of results.jsonl, without times and what belongs to the run alone."""
    return Counter((line["id"], line["outcome"], str(line["invariants"]), str(line["findings"])) for line in lines)


@pytest.mark.parametrize("fault", ["", pytest.param("unverified", marks=pytest.mark.slow)])
def test_two_shards_judge_the_cases_of_one_run_and_find_the_same(sample: Sample, fault: str) -> None:
    sample.plant(fault)
    file = sample.folder / "pyproject.toml"
    file.write_text(file.read_text().replace('memory = ".specverify/memory"\n', "").replace("judged = 0.9", ""))
    words = ("gate", "--cases", "12", "--seed", "4")
    whole_code = sample(*words, "--report", "whole")
    codes, found_pages = [], []
    for shard in (1, 2):
        codes.append(sample(*words, "--shard", f"{shard}/2", "--report", f"part{shard}"))
        found_pages += pages(sample.out)
    lines = {name: read(sample.folder / name) for name in ("whole", "part1", "part2")}
    assert len(lines["whole"]) == 12
    assert facts(lines["part1"]) + facts(lines["part2"]) == facts(lines["whole"])
    assert not facts(lines["part1"]) & facts(lines["part2"])
    assert whole_code == (1 if fault else 0)
    assert (1 in codes) == (whole_code == 1)
    assert sample("gate", "--cases", "12", "--merge", "part2", "part1", "--report", "both") == whole_code
    assert bool(fault) == bool(found_pages)
    assert set(pages(sample.out)) <= set(found_pages)
    assert folder_result(sample.folder / "both") == folder_result(sample.folder / "whole")
    assert facts(read(sample.folder / "both")) == facts(lines["whole"])


def pages(out: str) -> list[str]:
    """The pages of failures, without what another shard saw of the same cause, and without the folder of bundles."""
    alone = re.sub(r"  also seen .*?one cause *\n", "", re.sub(r"\n {16}", " ", out))
    return sorted(page.split("  replay  ")[0] for page in alone.split("\nDIFFER  ")[1:] if "  replay  " in page)


SEED = "11"
"""A fresh seed with which drafted tokens are accepted in each of the two shards."""


@pytest.fixture
def shards(sample: Sample) -> Sample:
    """The reports of two shards of a gate on 12 cases, in the folders part1 and part2."""
    file = sample.folder / "pyproject.toml"
    file.write_text(
        file.read_text().replace('memory = ".specverify/memory"\n', "").replace("judged = 0.9", "invariants = 3")
    )
    for shard in (1, 2):
        arguments = ("--cases", "12", "--seed", SEED, "--shard", f"{shard}/2", "--report", f"part{shard}")
        assert sample("gate", *arguments) == 0, sample.out
    return sample


def test_floors_hold_for_all_shards_together_and_none_may_be_missing(shards: Sample) -> None:
    """No shard is measured by floors; what is missing, cut off, doubled or foreign is no pass."""
    merge = ("gate", "--cases", "12", "--merge", "--report", "both")
    result = shards.folder / "both" / "gate.json"
    assert "floors hold for all shards together" in shards.out
    assert shards(*merge, "part1", "part2", "--verbose") == 0
    assert re.search(r"invariant +checked +compared +failed", shards.out)
    file = shards.folder / "pyproject.toml"
    text = file.read_text()
    file.write_text(text.replace("invariants = 3", "invariants = 4"))
    assert shards(*merge, "part1", "part2") == 3
    assert "3 invariants compared something, below the floor of 4" in " ".join(shards.out.split())
    file.write_text(text)
    assert shards(*merge, "part1") == 3
    assert json.loads(result.read_text())["reasons"][0] == "shard 2/2 is missing"
    journal = shards.folder / "part2" / "journal.jsonl"
    whole_text = journal.read_text()
    journal.write_text(whole_text[: whole_text.rindex('"ended"', 0, whole_text.rindex('"ended"'))])
    assert shards(*merge, "part1", "part2") == 3
    assert json.loads(result.read_text())["runs"][0]["judged"] == 12
    assert "shard 2/2 was cut off" in shards.out
    damaged = whole_text.replace('"verdict": {', '"verdict": 7, "x": {', 1)
    journal.write_text(damaged[: damaged.rindex('"ended"', 0, damaged.rindex('"ended"'))])
    assert shards(*merge, "part1", "part2") == 2
    assert re.search(r"journal\.jsonl: line \d+ is damaged", shards.err)
    for words, why in (
        (("part1", "part1"), "are both shard 1/2"),
        (("part1", "part3"), "no journal of a gate"),
        (("--fault", "kv-truncated-not-gathered", "part1"), "is of another gate"),
        ((), "--merge needs the report folders"),
    ):
        assert shards(*merge, *words) == 2
        assert why in shards.err
    journal.write_text(whole_text.replace(f'"seeds": [0, {SEED}]', '"seeds": [0, 5]'))
    assert shards(*merge, "part1", "part2") == 2
    assert "their seeds differ" in shards.err


def test_the_counts_of_a_shard_stand_for_its_verdicts(shards: Sample) -> None:
    """With its results beside it a shard is merged by its counts, without them by its verdicts: to the same end."""
    merge = ("gate", "--cases", "12", "--merge", "part1", "part2", "--report")
    assert shards(*merge, "by-counts") == 0
    lines = [line for part in ("part1", "part2") for line in read(shards.folder / part)]
    assert read(shards.folder / "by-counts") == lines
    for part in ("part1", "part2"):
        (shards.folder / part / "results.jsonl").unlink()
    assert shards(*merge, "by-verdicts") == 0
    by_counts, by_verdicts = (folder_result(shards.folder / name) for name in ("by-counts", "by-verdicts"))
    assert by_counts == by_verdicts
    assert by_counts["runs"][0]["judged"] == 12
    ids = [[line["id"] for line in read(shards.folder / name)] for name in ("by-counts", "by-verdicts")]
    assert ids[0] == ids[1] == [line["id"] for line in lines]


def test_a_shard_that_could_not_start_is_merged_as_such(shards: Sample) -> None:
    journal = shards.folder / "part2" / "journal.jsonl"
    first, opened, *_ = journal.read_text().splitlines()
    run = json.loads(opened)["run"]
    broken = {"run": run, "place": 0, "broken": {"why": "no such device", "code": 2}}
    ended = {"run": run, "place": 0, "ended": {"seconds": 1.0, "wanted": 6, "errors": ["no such device"], "code": 2}}
    journal.write_text("\n".join([first, json.dumps(broken), json.dumps(ended), ""]))
    assert shards("gate", "--cases", "12", "--merge", "part1", "part2", "--report", "both") == 2
    assert "no such device" in shards.out


def folder_result(folder: Path) -> dict[str, Any]:
    """The result of a gate, without times, and without the cases that stand for a failure: each shard has its own."""
    result = json.loads((folder / "gate.json").read_text())
    Draft202012Validator(schema()).validate(result)
    parts = ("outcome", "exit_code", "sentence", "seeds", "fresh_seed", "shard", "reasons", "notes", "known")
    runs = [
        {
            key: sorted(set(value)) if key == "signatures" else value
            for key, value in run.items()
            if "seconds" not in key and key not in ("findings", "environment", "dearest")
        }
        for run in result["runs"]
    ]
    return {key: result[key] for key in parts} | {"runs": runs}


def read(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_checkpoint_is_judged_too_and_its_prompts_are_split(sample: Sample) -> None:
    place = save_checkpoint("llama", sample.folder)
    (sample.folder / "specverify.toml").write_text(
        'backends = ["cpu-eager"]\ncases = 12\ndtypes = ["float32"]\njobs = 1\n'
        'invariants = ["lossless.greedy-match"]\n'
        f'[[models]]\nmodel = "{place}"\ncases = 2\nnew-tokens = 4\n'
        'draft = "ngram"\nlayout = "paged"\n'
        f'[[models]]\nmodel = "{place}"\ncases = 2\nnew-tokens = 4\ndraft = "ngram"\n'
    )
    words = ("gate", "--seed", "4", "--report")
    assert sample(*words, "whole") == 0
    for shard in (1, 2):
        assert sample(*words, f"part{shard}", "--shard", f"{shard}/2") == 0
    whole_facts, *parts = (facts(read(sample.folder / name)) for name in ("whole", "part1", "part2"))
    assert sum(parts, Counter()) == whole_facts
    assert (
        sum(whole_facts.values()) == 12 + 2 + 2
    )  # one draft, and one invariant, which judges a prompt's long case alone
    assert sample("gate", "--merge", "part1", "part2", "--report", "both") == 0
    assert folder_result(sample.folder / "both") == folder_result(sample.folder / "whole")
