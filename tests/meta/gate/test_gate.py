"""The gate on the sample repository: green, red on a planted fault, and reasons for exit codes 2 and 3."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
import yaml

from tests.meta.gate.conftest import ASKED_INVARIANTS, Sample


def profile(sample: Sample, *lines: str) -> None:
    """Replace the sample's profile by its backend and `lines`."""
    defaults = [] if any(line.startswith("invariants") for line in lines) else [ASKED_INVARIANTS]
    text = "\n".join(['backends = ["small_engine:open_"]', 'dtypes = ["float32"]', "jobs = 1", *defaults, *lines])
    (sample.folder / "specverify.toml").write_text(text)


def test_an_engine_without_a_fault_is_green(sample: Sample) -> None:
    assert sample("gate") == 0
    (run,) = sample.result()["runs"]
    assert (run["cases"], run["judged"], run["outcome"]) == (12, 12, "agree")
    assert run["invariants"]["lossless.greedy-match"]["checked"] > 0
    assert "AGREE  specverify gate" in sample.out


def test_a_planted_fault_is_red_and_remembered(sample: Sample) -> None:
    sample.plant("unverified")
    assert sample("gate") == 1
    assert "DIFFER  specverify gate" in sample.out
    assert "specverify replay" in sample.out
    assert "What went wrong" in sample.report("gate.html")
    memory = {file.stem for file in (sample.folder / ".specverify/memory").iterdir()}
    assert memory >= {file.stem for file in sample.bundles()} > set()
    # Another runner, whose one draw agrees: it finds the fault all the same, by the memory, and first.
    assert sample("gate", "--cases", "1", "--report", "other") == 1
    lines = [json.loads(line) for line in (sample.folder / "other/results.jsonl").read_text().splitlines()]
    assert {line["id"] for line in lines[: len(memory)]} == memory
    assert lines[0]["outcome"] == "differ"
    assert lines[-1]["outcome"] == "agree"
    sample.plant("")
    assert sample("gate") == 0


def test_below_a_floor_the_gate_could_not_judge(sample: Sample) -> None:
    profile(sample, "cases = 12", "fresh-seed = false", "[floors]", 'reached = ["cache.commit-equivalence"]')
    assert sample("gate") == 3
    assert any("no invariant that matches cache.commit-equivalence" in reason for reason in sample.result()["reasons"])
    assert 'name="floors"' in sample.report("junit.xml")


@pytest.mark.parametrize(
    ("lines", "words", "message"),
    [
        (["backend = 1"], [], "specverify.toml: backend: no such key; did you mean backends?"),
        (["case-timout = 3"], [], "did you mean case-timeout?"),
        (["[floors]", "judge = 1"], [], "floors.judge: no such key; did you mean judged?"),
        (["cases = 0"], [], "cases: 0 is less than the minimum of 1"),
        (["seeds = [true]"], [], "seeds[0]: True is not of type 'integer'"),
        (["cases = 2024-01-01"], [], "cases: '2024-01-01' is not of type 'integer'"),
        (["x ="], [], "not TOML"),
        (["seeds = []", "fresh-seed = false"], [], "nothing to draw from"),
        (['invariants = ["cache.commits"]'], [], "no invariant matches 'cache.commits'"),
        (['layouts = ["pagd"]'], [], "no KV layout is called 'pagd'"),
        (['corpus = ["nowhere"]'], [], "corpus: nowhere holds no case file"),
        ([], ["--shard", "3/2"], "I/N stands here"),
        ([], ["--shard", "1/2"], "needs --seed N"),
        (["cases = 12"], ["--shard", "1/3", "--seed", "1"], "make at most 2 shards"),
        ([], ["--backend", "cpu-eager"], "the profile has small_engine:open_"),
        ([], ["--changed-since", "HEAD"], "needs the key paths"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(
    sample: Sample, lines: list[str], words: list[str], message: str
) -> None:
    profile(sample, *lines)
    assert sample("gate", *words) == 2
    assert message in sample.err
    assert sample.err.count("\n") == 1


def test_the_oracle_may_be_computed_by_torch(sample: Sample) -> None:
    assert sample("gate", "--cases", "6", "--reference", "torch:cpu") == 0
    (run,) = sample.result()["runs"]
    assert run["reference"] == "torch:cpu"
    assert run["reference_rows"]["judged"] > run["reference_rows"]["certified"] > 0
    assert "NumPy certified" in sample.out


def test_a_folder_without_a_profile_says_how_to_get_one(sample: Sample) -> None:
    (sample.folder / "pyproject.toml").unlink()
    assert sample("gate") == 2
    assert "specverify gate --init github" in sample.err


def test_a_required_device_that_no_backend_runs_on_is_exit_code_3(sample: Sample) -> None:
    profile(sample, "cases = 6", 'devices = ["npu"]')
    assert sample("gate") == 3
    assert "required device npu: no backend of this run computed on it" in sample.out
    (sample.folder / "specverify.toml").write_text('backends = ["cpu-eager"]\ndevices = ["npu"]\n')
    assert sample("gate") == 3
    assert "required device npu: none of cpu-eager runs on it" in sample.err


@pytest.mark.parametrize(
    ("named", "code", "message"),
    [
        ("nowhere:open_", 2, "nowhere"),
        ("small_engine:absent", 2, "absent"),
        ("cuda-eager", 3, "cuda"),
        ("cpu-eagr", 2, "cpu-eager"),
    ],
)
def test_a_backend_that_does_not_open_is_named(sample: Sample, named: str, code: int, message: str) -> None:
    if named == "cuda-eager" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    (sample.folder / "specverify.toml").write_text(f'backends = ["{named}"]\ncases = 6\njobs = 1\n')
    assert sample("gate") == code
    assert message in sample.out + sample.err
    assert "Traceback" not in sample.err


def test_backends_are_judged_side_by_side(sample: Sample) -> None:
    text = (sample.folder / "small_engine.py").read_text()
    (sample.folder / "other_engine.py").write_text(text.replace('"SMALL_ENGINE"', '"OTHER_ENGINE"'))
    (sample.folder / "specverify.toml").write_text(
        'backends = ["small_engine:open_", "other_engine:open_"]\ncases = 12\ndtypes = ["float32"]\njobs = 1\n'
        f"{ASKED_INVARIANTS}\n"
    )
    sample.plant("broken")
    assert sample("gate", "--seed", "3") == 1
    assert [(run["name"], run["exit_code"]) for run in sample.result()["runs"]] == [
        ("small_engine:open_", 1),
        ("other_engine:open_", 0),
    ]
    assert sample.result()["seeds"] == [0, 3]
    assert "new in this run: 3" in sample.err
    assert sample("gate", "--seed", "3", "--backend", "other_engine:open_") == 0


def test_a_fresh_seed_is_new_in_each_run_and_printed(sample: Sample) -> None:
    profile(sample, "cases = 12")
    seeds = []
    for _ in range(2):
        assert sample("gate") == 0
        seeds.append(sample.result()["fresh_seed"])
        assert f"specverify gate --seed {seeds[-1]}" in sample.err
    assert seeds[0] != seeds[1]


def test_a_run_that_no_change_concerns_is_shortened_and_still_compares(sample: Sample) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *words], cwd=sample.folder, check=True, capture_output=True)

    (sample.folder / ".gitignore").write_text(".specverify\n__pycache__\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "First")
    profile(sample, "cases = 120", "fresh-seed = false", 'paths = ["small_engine.py"]')
    assert sample("gate", "--changed-since", "HEAD") == 0
    assert sample.result()["runs"][0]["cases"] == 12
    assert any("shortened" in note for note in sample.result()["notes"])
    engine = sample.folder / "small_engine.py"
    engine.write_text(engine.read_text() + "# changed\n")
    assert sample("gate", "--changed-since", "HEAD", "--cases", "13") == 0
    assert sample.result()["runs"][0]["cases"] == 13
    assert not sample.result()["notes"]
    assert sample("gate", "--changed-since", "--output=x") == 2
    assert not (sample.folder / "x").exists()


def test_a_corpus_is_judged_first_and_what_lies_outside_is_passed_over(sample: Sample) -> None:
    sample.plant("unverified")
    assert sample("gate") == 1
    sample.plant("")
    corpus = sample.folder / "corpus"
    corpus.mkdir()
    (bundle,) = sample.bundles()[:1]
    bundle.rename(corpus / bundle.name)
    strange = Path(__file__).resolve().parents[2] / "corpus" / "kv-truncated-not-gathered.json"
    (corpus / strange.name).write_bytes(strange.read_bytes())
    profile(sample, "cases = 12", "fresh-seed = false", 'corpus = ["corpus"]', 'reports = "second"')
    assert sample("gate") == 0
    run = json.loads((sample.folder / "second/gate.json").read_text())["runs"][0]
    assert run["cases"] == 13
    assert list(run["passed_over"].values()) == ["the backend declines it: generate declares no dtype float64"]
    (corpus / "damaged.json").write_text("{")
    assert sample("gate") == 2
    assert "damaged.json" in sample.err


@pytest.mark.parametrize("service", ["github", pytest.param("gitlab", marks=pytest.mark.slow)])
def test_init_writes_a_profile_that_loads_and_a_ci_file(sample: Sample, service: str) -> None:
    (sample.folder / "pyproject.toml").unlink()
    assert sample("gate", "--init", service) == 0
    text = (sample.folder / "specverify.toml").read_text()
    (sample.folder / "specverify.toml").write_text(text.replace("cpu-eager", "small_engine:open_").replace("200", "12"))
    assert sample("gate") == 0
    place = {"github": ".github/workflows/speculation.yml", "gitlab": ".gitlab-ci.yml"}[service]
    written = (sample.folder / place).read_text()
    assert "specverify gate --seed" in written
    (sample.folder / place).unlink()
    assert sample("gate", "--init", service, "--shards", "3") == 0
    sharded = (sample.folder / place).read_text()
    assert "specverify gate --merge shards/*" in sharded
    assert ("matrix: {shard: [1, 2, 3]}" if service == "github" else "parallel: 3") in sharded
    jobs = yaml.safe_load(sharded)
    jobs = jobs["jobs"] if service == "github" else jobs
    assert [name for name, job in jobs.items() if "needs" in job] == ["gate" if service == "github" else "speculation"]
    (sample.folder / place).write_text(written)
    assert sample("gate", "--init", service) == (2 if service == "github" else 0)
    assert (sample.folder / place).read_text() == written
