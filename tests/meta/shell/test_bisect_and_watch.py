"""`replay --bisect` speaks git's exit codes; `diff --watch` writes the page of a run that goes on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specverify import __version__
from specverify.backends.base import Unavailable
from specverify.campaign import campaign, watching
from specverify.campaign.replay import ReplayResult
from specverify.cli import main
from specverify.plan import Plan
from specverify.properties.tally import Failure, SameDefect
from specverify.properties.verdict.finding import Finding, Verdict
from specverify.reference.case import Case
from specverify.reference.trace import Stage
from specverify.reports.bundle import ledger_command
from specverify.reports.html.pages import diff_page, running_page
from specverify.setup.errors import UnusableInput
from tests.models import LLAMA

CASE = Case(LLAMA, (3,))
FINDING = Finding("lossless.greedy-match", Stage.EMITTED, 0, {"position": 0}, 7, 9)
VERDICT = Verdict(CASE, "engine", {FINDING.invariant: "failed"}, (FINDING,))


def code_of(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["replay", "saved.json", *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    ("word", "plain", "git"),
    [("FIXED", 0, 0), ("AGREE", 0, 0), ("FAILED", 1, 1), ("DIFFER", 1, 1), ("CHANGED", 1, 125), ("UNJUDGED", 3, 125)],
)
def test_a_result_is_told_to_git(word: str, plain: int, git: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specverify.campaign.replay.replay", lambda *_, **__: ReplayResult(word, None, "so it is"))
    assert (code_of(), code_of("--bisect")) == (plain, git)


@pytest.mark.parametrize(("why", "plain"), [(UnusableInput("torn file"), 2), (Unavailable("no device"), 3)])
def test_a_revision_that_cannot_be_judged_is_passed_over(
    why: Exception, plain: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> ReplayResult:
        raise why

    monkeypatch.setattr("specverify.campaign.replay.replay", refuse)
    assert (code_of(), code_of("--bisect")) == (plain, 125)
    assert capsys.readouterr().err == f"specverify: {why}\n" * 2


ENGINE = """
from specverify.adapt import blackbox
import torch

def generate(prompt_ids, max_new_tokens, model):
    tokens = list(prompt_ids)
    for _ in range(max_new_tokens):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt_ids) :]{cut}

open_ = blackbox(generate)
"""


@pytest.mark.slow
def test_git_finds_the_change_that_broke_an_engine(tmp_path: Path) -> None:
    """Five revisions: right, right, one that cannot be imported, wrong, wrong."""
    from specverify.reports import bundle

    def git(*words: str) -> str:
        identity = ["-c", "user.name=x", "-c", "user.email=x@x"]
        process = subprocess.run(["git", *identity, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    git("init", "-q")
    revisions = []
    for number, content in enumerate(
        (
            ENGINE.format(cut=""),
            ENGINE.format(cut="") + "#",
            "import absent",
            ENGINE.format(cut="[1:]"),
            ENGINE.format(cut="[1:] "),
        )
    ):
        (tmp_path / "engine.py").write_text(content)
        git("add", "engine.py")
        git("commit", "-q", "-m", f"revision {number}")
        revisions.append(git("rev-parse", "HEAD").strip())
    failure = Failure(VERDICT, FINDING, CASE.id, backend="engine:open_")
    file = bundle.save(tmp_path / ".specverify", failure, {})
    git("bisect", "start", "HEAD", "HEAD~4")
    replay = [sys.executable, "-m", "specverify", "replay", "--bisect", str(file), "--backend", "engine:open_"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3]), "PYTHONDONTWRITEBYTECODE": "1"}
    bisect = subprocess.run(
        ["git", "bisect", "run", *replay], cwd=tmp_path, capture_output=True, text=True, env=environment, check=False
    )
    named = bisect.stdout.split("could be any of:")[-1].split()
    assert {revisions[2], revisions[3]} <= {*named}, bisect.stdout + bisect.stderr
    assert not {revisions[0], revisions[1], revisions[4]} & {*named}, "those two alone"


def test_watch_needs_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--watch"], ["--watch", "--html", "-"]):
        with pytest.raises(SystemExit) as ended:
            main(["diff", *words])
        assert ended.value.code == 2
        assert "--watch needs --html FILE" in capsys.readouterr().err


def test_the_page_of_a_run_that_goes_on_reloads_itself_and_the_last_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "REFRESH_S", 0)
    file = tmp_path / "run.html"
    watched = watching.Watched(file)
    assert watched.look() is None
    assert not file.exists(), "nothing runs yet"
    running = campaign.Campaign(Plan(cases=9), None)  # type: ignore[arg-type]
    watched.begin(running)
    assert watched.look() is None
    page = file.read_text()
    assert '<meta http-equiv="refresh"' in page
    assert "no difference so far" in page
    assert "So far 0 of 9 cases" in page
    running.tally.add(VERDICT)
    running.places[0].failures.append(Failure(VERDICT, FINDING, CASE.id))
    assert watched.look() is None
    assert "The output leaves" in file.read_text()
    assert running.tally.failures == [], "the run's own counts are made at its end"
    assert 'http-equiv="refresh"' not in diff_page(running.tally, __version__).decode()
    assert "<script" not in running_page(running.tally, __version__, 5).decode()
    watched.file = tmp_path / "absent" / "run.html"
    assert "create the folder first" in str(watched.look())


def test_the_ledger_is_given_every_bundle_of_a_cause() -> None:
    """One entry alone would leave the gate red: the cause shows under two invariants."""
    also = (SameDefect("cache.isolation", Stage.COMMITTED, "b" * 12, "out/b.json"),)
    failure = Failure(VERDICT, FINDING, CASE.id, file="out/a.json", also=also)
    assert ledger_command(failure) == "specverify ledger add out/a.json out/b.json --reason WHY"
    assert ledger_command(Failure(VERDICT, FINDING, CASE.id)) is None
    assert ledger_command(Failure(VERDICT, FINDING, CASE.id, file="a", fault="planted")) is None
