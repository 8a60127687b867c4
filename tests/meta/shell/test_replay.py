"""From a difference to its file and back: bundles replay, machine output keeps its keys, Ctrl-C loses nothing."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from specverify.backends import faults
from specverify.cli import main
from specverify.properties.invariants import ALL
from specverify.reference.case import Case
from specverify.reference.case_json import case_from_json, case_to_json
from specverify.reference.sampling import Sampling, Stops
from tests.inprocess import in_this_process
from tests.models import ELEVEN_TOKENS
from tests.tiers import first

ROOT = Path(__file__).resolve().parents[3]
FAULT = "kv-truncated-not-gathered"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def specverify(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command run in this process."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code, *capfd.readouterr()


@dataclass(frozen=True)
class EndedRun:
    """A folder in which `diff` met a planted fault, and how that run ended."""

    folder: Path
    returncode: int
    stdout: str
    stderr: str


DIFF = ["diff", "--fault", FAULT, "--cases", "40", "--jobs", "1", "--seed", "6", "--dtype", "float64"]
DIFF += ["--report", "out", "--json", "-", "--junit", "out/junit.xml"]


def in_a_process(folder: Path) -> EndedRun:
    ended = subprocess.run(
        [sys.executable, "-m", "specverify", *DIFF],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    return EndedRun(folder, ended.returncode, ended.stdout, ended.stderr)


def in_this_one(folder: Path) -> EndedRun:
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        in_this_process(patch)
        patch.chdir(folder)
        with pytest.raises(SystemExit) as ended:
            main(DIFF)
    assert isinstance(ended.value.code, int)
    return EndedRun(folder, ended.value.code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module", params=first([in_this_one, in_a_process], 1))
def ended_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EndedRun:
    run: Callable[[Path], EndedRun] = request.param
    return run(tmp_path_factory.mktemp("found"))


@pytest.fixture
def bundle(ended_run: EndedRun) -> Path:
    """The file of the planted fault."""
    (file,) = (ended_run.folder / "out").glob("*.json")
    return file


def test_a_planted_fault_is_exit_code_1_with_a_page_on_standard_error(ended_run: EndedRun, bundle: Path) -> None:
    assert ended_run.returncode == 1
    assert re.search("^DIFFER  cpu-eager  ", ended_run.stderr, re.MULTILINE)  # a slow run has told its progress before
    assert f"specverify replay out/{bundle.name} --backend cpu-eager --fault {FAULT}" in " ".join(
        ended_run.stderr.replace("\\", "").split()
    )
    assert sorted(file.name for file in (ended_run.folder / "out").iterdir()) == sorted(
        [bundle.name, "junit.xml", "results", "results.jsonl"]
    )


def test_the_json_of_a_run_keeps_its_keys(ended_run: EndedRun, bundle: Path) -> None:
    result = json.loads(ended_run.stdout)
    assert result["outcome"] == "differ"
    assert result["backend"] == "cpu-eager"
    lines = [json.loads(line) for line in (ended_run.folder / "out" / "results.jsonl").read_text().splitlines()]
    assert result["cases"] == len(lines) >= 1
    assert lines[-1]["outcome"] == "differ"
    assert 0 < result["backend_seconds"] < result["seconds"]
    assert list(result["invariants"]) == [invariant.name for invariant in ALL]
    for counts in result["invariants"].values():
        assert set(counts) == {"checked", "compared", "failed", "unobserved", "not_applicable", "internal"}
        assert (counts["checked"] > counts["failed"]) <= (counts["compared"] > 0)
        assert counts["failed"] <= counts["checked"]
    (finding,) = result["findings"]
    assert {"invariant", "stage", "where", "expected", "observed", "case", "replay"} <= set(finding)
    assert finding["stage"] == "committed"
    assert case_from_json(finding["case"]) == case_from_json(json.loads(bundle.read_text())["case"])
    assert finding["replay"] == f"specverify replay out/{bundle.name} --backend cpu-eager --fault {FAULT}"
    assert isinstance(result["ties"], list)
    assert {"python", "torch", "seed", "jobs"} <= set(result["environment"])


def test_a_bundle_fails_again_with_its_fault_and_is_fixed_without(
    bundle: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = specverify(capfd, "replay", str(bundle), "--fault", FAULT)
    assert (code, err) == (1, "")
    assert out.startswith("DIFFER  cpu-eager  ")
    assert out.splitlines()[-1].startswith("FAILED  ")
    code, out, err = specverify(capfd, "replay", str(bundle))
    assert (code, err) == (0, "")
    assert out.startswith("FIXED  ")
    assert out.count("\n") == 1


def test_a_replay_without_the_fault_of_its_bundle_says_which_was_planted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = ROOT / "tests" / "corpus" / f"{FAULT}.json"
    hint = f"; saved with --fault {FAULT} planted; give --fault {FAULT} to plant it again\n"
    code, out, _ = specverify(capfd, "replay", str(file), "--json", str(tmp_path / "out.json"))
    assert code == 0
    assert out.startswith("FIXED  ")
    assert out.endswith(hint)
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["saved_fault"] == FAULT
    assert content["why"].endswith(hint.strip())
    code, out, _ = specverify(capfd, "replay", str(file), "--fault", FAULT, "--json", str(tmp_path / "out.json"))
    assert code == 1
    assert "to plant it again" not in out
    assert json.loads((tmp_path / "out.json").read_text())["saved_fault"] is None
    bare = json.loads(file.read_text()) | {"fault": "two words\x1b\n"}
    (tmp_path / "odd.json").write_text(json.dumps(bare))
    code, out, _ = specverify(capfd, "replay", str(tmp_path / "odd.json"))
    assert (code, out.count("\n")) == (0, 1)
    assert "\x1b" not in out


def test_another_fault_on_the_same_case_is_a_change(
    bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saved = json.loads(bundle.read_text())["finding"]
    assert faults.fault_named("softmax-twice").stage.word != saved["stage"]
    result = tmp_path / "result.json"
    code, out, _ = specverify(capfd, "replay", str(bundle), "--fault", "softmax-twice", "--json", str(result))
    assert (code, out.splitlines()[-1].split()[0]) == (1, "CHANGED")
    content = json.loads(result.read_text())
    assert content["result"] == "CHANGED"
    assert (content["finding"]["invariant"], content["finding"]["stage"]) != (saved["invariant"], saved["stage"])


def test_a_bare_case_agrees_differs_or_is_not_judged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "case.json"
    file.write_text(json.dumps(case_to_json(Case(ELEVEN_TOKENS, (3, 5), stops=Stops(3)))))
    code, out, err = specverify(capfd, "replay", str(file))
    assert (code, out.split()[0], err) == (0, "AGREE", "")
    code, out, _ = specverify(capfd, "replay", str(file), "--fault", "softmax-twice", "--json", "-")
    result = json.loads(out)
    assert (code, result["result"]) == (1, "DIFFER")
    assert set(result) == {"result", "why", "finding", "emulated", "saved_fault", "residue"}
    assert {"invariant", "stage", "where", "expected", "observed", "case"} <= set(result["finding"])
    file.write_text(
        json.dumps(case_to_json(Case(ELEVEN_TOKENS, (3, 5), sampling=Sampling(0.5, (0.5,)), stops=Stops(3))))
    )
    code, out, err = specverify(capfd, "replay", str(file), "--json", "-")
    assert (code, json.loads(out)["result"], err.split()[0]) == (0, "AGREE", "AGREE")


LISTS: dict[str, set[str]] = {
    "backends": {"name", "device", "emulated", "sentence", "unavailable", "excluded", "known"},
    "invariants": {"name", "sentence", "needs"},
    "layouts": {"name", "sentence", "backends"},
    "faults": {"name", "id", "stage", "sentence", "source", "trigger", "on"},
    "catalogue": {"name", "state", "title", "source", "faults", "sentence"},
    "models": {"name", "sentence"},
    "families": {
        "name",
        "state",
        "model_types",
        "honoured",
        "refused",
        "layouts",
        "backends",
        "tried",
        "sentence",
    },
    "rules": {"name", "state", "lossless_for", "chains_only", "condition", "source", "sentence"},
    "trees": {"name", "state", "draws", "sentence"},
}


@pytest.mark.parametrize("subject", LISTS)
def test_lists_are_arrays_of_rows(subject: str, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = specverify(capfd, "list", subject, "--json")
    rows: list[dict[str, Any]] = json.loads(out)
    assert (code, err) == (0, "")
    assert rows
    assert all(set(row) == LISTS[subject] for row in rows)
    names = [row["name"] for row in rows]
    assert len(set(names)) == len(names)
    code, page, _ = specverify(capfd, "list", subject)
    assert code == 0
    assert all(name in page for name in names)


def test_the_doctor_and_the_whole_list_speak_json(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = specverify(capfd, "list", "--json")
    assert (code, set(json.loads(out))) == (0, set(LISTS))
    code, out, _ = specverify(capfd, "doctor", "--json")
    report = json.loads(out)
    assert code == (0 if report["healthy"] else 3)
    assert all(set(row) == {"name", "state", "detail"} for row in report["checks"])
    assert {row["name"] for row in report["checks"]} >= {"torch", "specverify", "backend cpu-eager", "machine"}


def children(parent: int) -> list[int]:
    """Processes that `parent` started and that still run."""
    pids = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            pids.append(int(status.parent.name))
    return pids


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for left-over processes in /proc")
def test_an_interrupt_keeps_what_ran_and_leaves_nobody_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "specverify", "diff", "--cases", "100000", "--jobs", "1", "--report", "out"]
    command += ["--json", "result.json", "--junit", "junit.xml"]
    lines = tmp_path / "out" / "results.jsonl"
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            until = time.monotonic() + 120
            while not (lines.exists() and lines.read_text().count("\n") >= 3):
                assert running.poll() is None, running.communicate()
                assert time.monotonic() < until, "no case was judged in two minutes"
                time.sleep(0.1)
            workers = children(running.pid)
            assert workers
            os.killpg(running.pid, signal.SIGINT)
            out, err = running.communicate(timeout=60)
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == 3, err
    assert "Traceback" not in out + err
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["stopped"] == "interrupted (Ctrl-C)"
    assert result["outcome"] == "unjudged"
    assert result["cases"] == lines.read_text().count("\n") >= 3
    assert "COULD NOT JUDGE" in out
    assert "interrupted (Ctrl-C)" in out
    assert ElementTree.parse(tmp_path / "junit.xml").getroot().get("errors") == "1"
    # Python's resource tracker ends by itself when the last of them has.
    until = time.monotonic() + 10
    while time.monotonic() < until and any(Path(f"/proc/{worker}").exists() for worker in workers):
        time.sleep(0.1)
    assert [worker for worker in workers if Path(f"/proc/{worker}").exists()] == []
