"""The sample repository goes from nothing to a red gate and a green one, on GitHub and on GitLab, as the docs say."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from junitparser import JUnitXml

from specverify.gate import starting
from specverify.reports.gate import record
from tests.ci_services import Checkout, run_github, run_gitlab
from tests.meta.gate.conftest import IGNORED, SAMPLE, Sample
from tests.tiers import first

ROOT = Path(__file__).resolve().parents[3]
GATE = (ROOT / "docs" / "how_to" / "ci.md").read_text()


def failed_names(text: str) -> list[str]:
    """The names of the failed test cases of a JUnit report."""
    return [case.name for suite in JUnitXml.fromstring(text.encode()) for case in suite if "failure" in tags(case)]


def tags(case: object) -> set[str]:
    return {re.sub(r"\W", "", type(element).__name__.lower()) for element in getattr(case, "result", [])}


def test_on_github_the_gate_is_red_with_summary_and_annotations(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = sample.folder / "step.md"
    step.write_text("before\n")
    for name, value in (("GITHUB_ACTIONS", "true"), ("GITHUB_STEP_SUMMARY", step), ("GITHUB_WORKSPACE", sample.folder)):
        monkeypatch.setenv(name, str(value))
    sample.plant("broken")
    assert sample("gate") == 1
    assert step.read_text() == "before\n" + sample.report("summary.md") + "\n"
    assert "specverify replay .specverify/" in sample.report("summary.md")
    assert re.search(r"^::error file=small_engine.py,line=\d+,title=small_engine%3Aopen_", sample.out, re.MULTILINE)
    stops = re.findall(r"^::stop-commands::(\w+)$", sample.out, re.MULTILINE)
    assert stops
    assert all(f"::{word}::" in sample.out.split("\n") for word in stops)
    sample.plant("")
    assert sample("gate") == 0
    assert "::error" not in sample.out
    assert "SpecVerify: AGREE" in step.read_text()


@pytest.mark.slow
def test_on_gitlab_the_gate_is_red_with_junit_and_code_quality(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("GITLAB_CI", "true"), ("CI_PROJECT_DIR", str(sample.folder))):
        monkeypatch.setenv(name, value)
    sample.plant("broken")
    assert sample("gate") == 1
    entry, *entries = json.loads(sample.report("code-quality.json"))
    assert {issue["location"]["path"] for issue in (entry, *entries)} == {"small_engine.py"}
    assert len({issue["fingerprint"] for issue in (entry, *entries)}) == 1 + len(entries)
    line = (sample.folder / "small_engine.py").read_text().splitlines()[entry["location"]["lines"]["begin"] - 1]
    assert "raise IndexError" in line
    assert "lossless.completes" in failed_names(sample.report("junit.xml"))
    for bundle in sample.bundles():
        assert f"[[ATTACHMENT|.specverify/{bundle.name}]]" in sample.report("junit.xml")
    Draft202012Validator(record.schema()).validate(sample.result())
    assert "::" not in sample.out.replace("small_engine:open_", "")
    sample.plant("")
    assert sample("gate") == 0
    assert json.loads(sample.report("code-quality.json")) == []
    assert failed_names(sample.report("junit.xml")) == []


def test_the_profile_that_the_docs_show_is_one(tmp_path: Path) -> None:
    from specverify.gate.profile import load

    (block,) = re.findall(r"```toml\n(.*?)```", GATE, re.DOTALL)
    (tmp_path / "specverify.toml").write_text(block)
    profile = load(tmp_path / "specverify.toml")
    assert profile.backends == ("my_engine:open_", "my_engine:fused")
    assert profile.floors.reached == ("cache.*",)


def runs_of_ci(sample: Sample, tmp_path: Path, service: str, text: str) -> list[tuple[bool, bool]]:
    """Three runs of a CI file, the first without a fault: whether each succeeded, and whether it tried a saved case."""
    source = tmp_path / "source"
    shutil.copytree(sample.folder, source, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "caches").mkdir()
    checkout = Checkout(source, sample.folder, tmp_path / "caches")
    run = run_github if service == "github" else run_gitlab

    remembered: list[str] = []

    def shell(line: str) -> int:
        program, *words = shlex.split(line)
        if program == "pip":
            assert words[:-1] == ["install"]
            assert re.fullmatch(r"git\+https://\S+@v\d\S*", words[-1])
            return 0
        assert program == "specverify"
        remembered[:] = [file.stem for file in (sample.folder / ".specverify/memory").glob("*.json")]
        return sample(*words)

    results = []
    for number, fault in enumerate(("", "unverified", "unverified"), 1):
        sample.plant(fault)
        succeeded = run(text, checkout, shell, number)
        results.append((succeeded, not {line["id"] for line in sample.lines()}.isdisjoint(remembered)))
    return results


@pytest.mark.parametrize("service", first(["github", "gitlab"], 1))
def test_a_red_run_leaves_its_failures_to_the_next(sample: Sample, tmp_path: Path, service: str) -> None:
    text = starting.ci_file(service)
    assert runs_of_ci(sample, tmp_path, service, text) == [(True, False), (False, False), (False, True)]


@pytest.mark.slow
def test_a_cache_that_is_saved_on_success_alone_would_lose_them(sample: Sample, tmp_path: Path) -> None:
    text = starting.ci_file("github").replace("actions/cache/restore", "actions/cache")
    text = re.sub(r" +- uses: actions/cache/save.*?(?= +- uses)", "", text, flags=re.DOTALL)
    assert runs_of_ci(sample, tmp_path, "github", text) == [(True, False), (False, False), (False, False)]


@pytest.mark.slow
@pytest.mark.parametrize("service", ["github", "gitlab"])
def test_from_nothing_by_the_words_of_the_docs(tmp_path: Path, service: str) -> None:
    """In processes of their own, with the engine isolated, as a user's CI runs them."""
    folder = tmp_path / "project"
    shutil.copytree(SAMPLE, folder, ignore=IGNORED)
    (folder / "pyproject.toml").unlink()
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("GITHUB_", "CI_", "GITLAB_"))}
    variables |= {"PYTHONPATH": str(ROOT), "CI": "true"}
    if service == "github":
        variables |= {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(folder / "step.md")}
    else:
        variables |= {"GITLAB_CI": "true", "CI_PROJECT_DIR": str(folder)}

    def specverify(line: str, fault: str = "") -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", *line.split()]
        run = {**variables, "SMALL_ENGINE": fault}
        return subprocess.run(words, cwd=folder, env=run, capture_output=True, text=True, timeout=300)

    started, gate = (line.split("#")[0].strip() for line in re.findall(r"^specverify gate.*$", GATE, re.MULTILINE)[:2])
    assert specverify(started.replace("github", service)).returncode == 0
    profile = folder / "specverify.toml"
    profile.write_text(profile.read_text().replace("cpu-eager", "small_engine:open_").replace("200", "24"))
    green = specverify(gate)
    assert green.returncode == 0, green.stdout + green.stderr
    red = specverify(gate, "unverified")
    assert red.returncode == 1, red.stdout + red.stderr
    assert "DIFFER  specverify gate" in red.stdout
    (bundle, *_) = (file.name for file in (folder / ".specverify").glob("[0-9a-f]" * 12 + ".json"))
    added = specverify(f"specverify ledger add .specverify/{bundle} --reason known", "unverified")
    assert added.returncode == 0, added.stderr
    assert specverify(gate, "unverified").returncode == 0
    assert specverify(gate).returncode == 1
    assert specverify("specverify compare .specverify/gate.json .specverify/gate.json").returncode == 0
