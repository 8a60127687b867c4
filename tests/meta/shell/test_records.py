"""Records of runs: what a bench writes can be read back, resumed, merged and compared; a damaged part is one line."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from specverify.bench.decode_record import measurements_of
from specverify.campaign.recorder import Recorder, manifest_for
from specverify.plan import Plan
from specverify.properties.tally import Failure
from specverify.properties.verdict.judge import judge
from specverify.records.merge import merge_records, shard_folder, shards_in
from specverify.records.ranks import Ranks, ranks_of
from specverify.records.read import check, read
from specverify.records.write import Writer
from specverify.reference.oracle.decoder import Oracle
from specverify.reports.bundle import load
from specverify.reports.progress import Progress
from specverify.reports.record import Lines
from specverify.setup.errors import UnusableInput
from specverify.setup.selection import invariants_matching
from specverify.setup.subjects import open_planted, subject_of
from tests.cases import CORPUS
from tests.checkpoints import readable
from tests.inprocess import exit_code_of, in_this_process
from tests.meta.pages.test_html import sound

PROMPTS = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return readable("llama", tmp_path_factory.mktemp("records"))


def bench(checkpoint: Path, folder: Path, *options: object) -> int:
    arguments = ("--model", checkpoint, "--cases", PROMPTS, "--new-tokens", 6, "--trace", folder)
    return exit_code_of("bench", "decode", *arguments, *options)


@pytest.fixture(scope="module")
def whole_record(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert bench(checkpoint, folder) == 0
    return folder


@pytest.fixture
def record(whole_record: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(whole_record, tmp_path / "run"))


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines()


def test_a_record_is_read_back_as_the_bench_that_it_was(whole_record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_record = read(whole_record)
    assert sorted(run_record.prompts) == list(range(PROMPTS))
    assert run_record.manifest["environment"]["torch"]
    assert run_record.manifest["model"]["digest"].startswith("sha256:")
    assert [draft["name"] for draft in run_record.manifest["drafts"]] == ["ngram"]
    measured = measurements_of(run_record)
    assert len(measured.turns) == PROMPTS * 4
    assert measured.turns[0].paths[0][0] == 0
    assert exit_code_of("trace", "show", whole_record, "--json", "-") == 0
    report = json.loads(capsys.readouterr().out)
    assert [way["way"] for way in report["ways"]] == measured.ways
    assert len(report["turns"]) == len(measured.turns)
    assert (report["failures"], report["torn"]) == ([], 0)


def test_a_record_is_shown_as_one_page(
    whole_record: Path, record: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "record.html"
    assert exit_code_of("trace", "show", whole_record, "--html", page) == 0
    text = sound(page.read_bytes()).text
    assert "share of the time by stage" in text
    assert read(whole_record).manifest["settings"] in text
    (record / "prompts.jsonl").write_text("")  # no prompt is finished: nothing to plot, but what ran is shown
    assert exit_code_of("trace", "show", record, "--html", page) == 0
    assert "Record of bench decode" in sound(page.read_bytes()).text
    capsys.readouterr()
    assert exit_code_of("trace", "show", whole_record, "--html", page, "--json", page) == 2
    assert "would be one file" in capsys.readouterr().err


def test_the_schema_is_printed_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of("trace", "schema", "--record") == 0
    assert set(json.loads(capsys.readouterr().out)["$defs"]) >= {"manifest", "turn", "prompt", "failure"}
    with pytest.raises(UnusableInput, match="here: seconds: 'x' is not of type 'number'"):
        check("turn", {"prompt": 0, "way": "a", "tokens": [], "seconds": "x"}, "here")


def test_a_run_goes_on_after_the_prompts_that_are_finished(checkpoint: Path, whole_record: Path, record: Path) -> None:
    kept_lines = lines(record / "turns.jsonl")[:5]  # one prompt of four ways, and one turn of the next
    (record / "turns.jsonl").write_text("\n".join(kept_lines) + '\n{"prompt": 1, "way": "ng')
    (record / "prompts.jsonl").write_text(lines(record / "prompts.jsonl")[0] + "\n")
    assert read(record).torn == 1
    assert bench(checkpoint, record) == 0
    assert lines(record / "turns.jsonl")[:5] == kept_lines
    assert len(lines(record / "turns.jsonl")) == 5 + 1 + 2 * 4
    assert exit_code_of("trace", "compare", whole_record, record) == 0


def test_a_finished_run_is_not_run_again(checkpoint: Path, record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (record / "turns.jsonl").read_text()
    assert bench(checkpoint, record) == 0
    assert (record / "turns.jsonl").read_text() == before
    assert "3 prompts taken from the record of an earlier run" in capsys.readouterr().out


def test_the_record_of_another_run_is_refused(
    checkpoint: Path, record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(checkpoint, record, "--nodes", 2) == 2
    assert "holds the record of another run (its nodes differs)" in capsys.readouterr().err


DAMAGED = {
    "manifest.json": ("{", "manifest.json: not JSON"),
    "turns.jsonl": ('{"prompt": 0}', "turns.jsonl:1: 'way' is a required property"),
    "prompts.jsonl": ("[]", "prompts.jsonl:1: [] is not of type 'object'"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_record_is_one_line(name: str, record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (record / name).write_text(DAMAGED[name][0] + "\n")
    assert exit_code_of("trace", "show", record) == 2
    error_text = capsys.readouterr().err
    assert (len(error_text.splitlines()), DAMAGED[name][1] in error_text) == (1, True)


def test_no_record_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of("trace", "show", tmp_path) == 2
    assert "no record of a run" in capsys.readouterr().err


def test_two_records_that_differ_in_a_token_or_a_path_are_told(
    whole_record: Path, record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [json.loads(line) for line in lines(record / "turns.jsonl")]
    turns[0]["seconds"] += 1.0
    (record / "turns.jsonl").write_text("\n".join(map(json.dumps, turns)))
    assert exit_code_of("trace", "compare", whole_record, record) == 0
    turns[1]["tokens"][0] += 1
    turns[2]["paths"] = [[0, 2]]
    (record / "turns.jsonl").write_text("\n".join(map(json.dumps, turns)))
    capsys.readouterr()
    assert exit_code_of("trace", "compare", whole_record, record, "--json", "-") == 1
    differ = json.loads(capsys.readouterr().out)["differ"]
    assert [difference["fields"] for difference in differ] == [["tokens"], ["paths"]]


def shard_record(whole_record: Path, folder: Path, world: int) -> Path:
    """The record of a run as its ranks would have written it."""
    for rank in range(world):
        shard = shard_folder(folder, rank, world)
        shard.mkdir(parents=True)
        manifest = json.loads((whole_record / "manifest.json").read_text()) | {"shard": [rank, world]}
        (shard / "manifest.json").write_text(json.dumps(manifest))
        for name in ("turns.jsonl", "prompts.jsonl"):
            shard_lines = [line for line in lines(whole_record / name) if json.loads(line)["prompt"] % world == rank]
            (shard / name).write_text("\n".join([*shard_lines, ""]))
    return folder


def test_shards_are_merged_as_the_whole_run(whole_record: Path, tmp_path: Path) -> None:
    shards = shard_record(whole_record, tmp_path / "run", 2)
    assert exit_code_of("trace", "merge", shards, "--out", tmp_path / "merged") == 0
    assert exit_code_of("trace", "compare", whole_record, tmp_path / "merged") == 0
    assert merge_records(shards_in([shards])).manifest["missing"] == []


def test_a_shard_that_is_not_whole_is_named_and_left_out(
    whole_record: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = shard_record(whole_record, tmp_path / "run", 2)
    cut = shard_folder(shards, 0, 2) / "prompts.jsonl"
    cut.write_text(lines(cut)[0] + "\n")
    assert exit_code_of("trace", "merge", shards, "--out", tmp_path / "merged") == 3
    assert "shard 0 of 2 is missing: 1 of its prompts are not finished" in capsys.readouterr().out
    assert sorted(read(tmp_path / "merged").prompts) == [1]
    shutil.rmtree(shard_folder(shards, 1, 2))
    assert exit_code_of("trace", "show", shards) == 3
    assert "shard 1 of 2 is missing: it wrote no record" in capsys.readouterr().out


def test_shards_of_different_runs_are_refused(whole_record: Path, tmp_path: Path) -> None:
    shards = shard_record(whole_record, tmp_path / "run", 2)
    other_manifest = shard_folder(shards, 1, 2) / "manifest.json"
    other_manifest.write_text(json.dumps(json.loads(other_manifest.read_text()) | {"settings": "0" * 16}))
    with pytest.raises(UnusableInput, match="parts of different runs"):
        merge_records(shards_in([shards]))


def test_ranks_are_those_of_torchrun() -> None:
    assert ranks_of({}) == Ranks(0, 1, 0)
    ranks = ranks_of({"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1"}, "nccl")
    assert (ranks.prompt_numbers(8), ranks.backend) == ([1, 4, 7], "nccl")
    for wrong in ({"RANK": "x"}, {"RANK": "2", "WORLD_SIZE": "2"}):
        with pytest.raises(UnusableInput):
            ranks_of(wrong)


def test_several_ranks_need_a_folder(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert exit_code_of("bench", "decode", "--model", checkpoint) == 2
    assert "needs --trace DIR" in capsys.readouterr().err


def test_a_diff_records_a_turn_for_each_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_this_process(monkeypatch)
    few = ("--cases", 12, "--layout", "branch", "--invariant", "lossless.greedy-match", "--dtype", "float64")
    written = ("--report", tmp_path / "reports", "--trace", tmp_path / "traced")
    assert exit_code_of("diff", "--jobs", 1, *few, *written) in (0, 3)
    run_record = read(tmp_path / "traced")
    judged = [json.loads(line) for line in lines(tmp_path / "reports" / "results.jsonl")]
    assert [turn["prompt"] for turn in run_record.turns.values()] == [case["id"] for case in judged]
    assert any(len(path) > 1 for turn in run_record.turns.values() for path in turn["paths"])
    capsys.readouterr()
    page = tmp_path / "traced.html"
    assert exit_code_of("trace", "show", tmp_path / "traced", "--html", page) == 0
    assert "Record of diff" in sound(page.read_bytes()).text
    assert "agree" in capsys.readouterr().out
    assert exit_code_of("trace", "compare", tmp_path / "traced", tmp_path / "traced") == 0


def test_a_failure_is_dumped_with_its_lowered_tree_until_a_smaller_one_is_found(tmp_path: Path) -> None:
    plan = Plan(fault="tree-masked-as-chain")
    bundle = load(CORPUS / "tree-masked-as-chain.json")
    subject = subject_of(open_planted("cpu-eager", plan.fault))
    verdict = judge(bundle.case, invariants_matching(("structure.mask-is-ancestry",)), Oracle(), subject)
    assert verdict.first is not None
    failure = Failure(verdict, verdict.first, verdict.case.id, fault=plan.fault)
    with Writer(tmp_path / "traced", manifest_for(plan)) as writer, Lines(tmp_path / "results.jsonl") as results:
        recorder = Recorder(plan, tmp_path, results, Progress(1), writer)
        larger_case = replace(bundle.case, stops=replace(bundle.case.stops, max_new_tokens=99))
        drawn = replace(failure, verdict=replace(verdict, case=larger_case))
        larger, unwritten = recorder.failure_found(drawn, None)
        assert unwritten is None
        recorder.failure_found(failure, larger)
    (dump,) = (tmp_path / "traced" / "failures").iterdir()
    dumped_failure = json.loads(dump.read_text())
    check("failure", dumped_failure, "the dump")
    assert (dumped_failure["prompt"], dumped_failure["finding"]["invariant"]) == (
        bundle.case.id,
        "structure.mask-is-ancestry",
    )
    assert len(dumped_failure["lowered"]["token"]) >= len(dumped_failure["tree"]["parent"]) > 1
    assert dumped_failure["environment"]["seed"] == "0"
