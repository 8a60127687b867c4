"""Every folder of `examples` does what its README says, without a network and without a device."""

import json
import re
import runpy
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

from specverify.cli import main
from tests.inprocess import in_this_process
from tests.measure.documents.pages import ROOT

EXAMPLES = ROOT / "examples"
TESTED = {"black_box", "kernel", "trace", "server", "checkpoint", "notebook", "wrong_to_right"}

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def example(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the example that the test names, as the current folder."""
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    folder: Path = tmp_path / "examples" / request.param
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    in_this_process(monkeypatch)
    return folder


@pytest.fixture
def specverify(capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process; returns its exit code and what it printed."""

    def run(*arguments: str) -> tuple[int, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([*arguments])
        return int(ended.value.code or 0), capfd.readouterr().out

    return run


def run_script(script: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a script of the example as `python SCRIPT ARGUMENTS` does."""
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    runpy.run_path(script, run_name="__main__")


def test_every_example_has_a_readme_and_a_test() -> None:
    folders = {folder.name for folder in EXAMPLES.iterdir() if folder.is_dir() and folder.name != "__pycache__"}
    assert folders == TESTED
    for name in folders:
        lines = (EXAMPLES / name / "README.md").read_text().splitlines()
        assert "specverify" in "\n".join(lines)


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="transformers 5.0 cannot take back tokens behind a sliding window, which the example's declaration admits",
)
@pytest.mark.parametrize("example", ["black_box"], indirect=True)
def test_the_engine_in_ten_lines_is_judged_on_every_case(example: Path, specverify: Run) -> None:
    code, page = specverify("diff", "--backend", "my_engine:open_", "--cases", "25", "--jobs", "1")
    assert code == 0
    assert "25 of 25 cases agree" in page


@pytest.mark.slow
@pytest.mark.parametrize("example", ["kernel"], indirect=True)
def test_the_kernel_agrees_and_the_wrong_one_is_found(example: Path, specverify: Run) -> None:
    arguments = ("--invariant", "attention.context-exact", "--cases", "12", "--jobs", "1", "--layout", "branch")
    code, page = specverify("diff", "--backend", "my_kernel:open_", *arguments)
    assert code == 0, page
    code, page = specverify("diff", "--backend", "my_kernel:open_wrong", *arguments)
    assert code == 1
    assert "attention.context-exact" in page
    assert re.search(r"attended to\s+column", page), page


@pytest.mark.parametrize("example", ["trace"], indirect=True)
def test_the_trace_agrees_and_the_wrong_one_names_step_and_field(
    example: Path, specverify: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "specverify." not in (example / "small_engine.py").read_text()
    run_script("small_engine.py", "run.jsonl", monkeypatch=monkeypatch)
    code, _ = specverify("trace", "check", "run.jsonl")
    assert code == 0
    run_script("small_engine.py", "run.jsonl", "wrong", monkeypatch=monkeypatch)
    code, page = specverify("trace", "check", "run.jsonl")
    assert code == 1
    assert "run.jsonl:2: run 0, step 0, accepted.path" in page


@pytest.mark.parametrize("example", ["checkpoint"], indirect=True)
def test_the_checkpoint_is_judged_on_its_prompts(
    example: Path, specverify: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_script("make_checkpoint.py", "checkpoint", monkeypatch=monkeypatch)
    run = ("diff", "--model", "checkpoint", "--prompts", "prompts.txt", "--draft", "ngram", "--dtype", "float32")
    code, page = specverify(*run, "--cases", "1", "--new-tokens", "4", "--jobs", "1")
    assert code == 0, page
    assert "2 of 2 cases agree" in page, "the whole text, and its first steps with all invariants"


@pytest.mark.parametrize("example", ["server"], indirect=True)
def test_the_server_is_judged(example: Path, specverify: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run_script("../checkpoint/make_checkpoint.py", "checkpoint", monkeypatch=monkeypatch)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = runpy.run_path("server.py")["serve"]("checkpoint", 0)
    serving = threading.Thread(target=server.serve_forever, args=(0.02,))
    serving.start()
    try:
        address = f"openai:http://127.0.0.1:{server.server_address[1]}"
        code, page = specverify(
            "diff", "--backend", address, "--model", "checkpoint", "--cases", "3", "--new-tokens", "4", "--jobs", "1"
        )
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
    assert code == 0, page
    assert "3 of 3 cases agree" in page


@pytest.mark.parametrize("example", ["wrong_to_right"], indirect=True)
def test_the_tutorial_goes_from_wrong_to_right(example: Path, specverify: Run) -> None:
    cases = ("--jobs", "1", "--cases", "12", "--json", "result.json")
    tries = (
        ("first", 1, "prompt-returned"), ("second", 1, "ending-ignored"), ("third", 0, None), ("fourth", 0, None),
    )  # fmt: skip
    pages = {}
    for name, expected, mistake in tries:
        code, pages[name] = specverify("diff", "--backend", f"{name}:open_", *cases)
        assert code == expected, pages[name]
        findings = json.loads(Path("result.json").read_text())["findings"]
        assert [finding["hint"] and finding["hint"]["mistake"] for finding in findings] == [mistake] * code
    assert pages["third"].startswith("AGREE on text alone: no speculation was seen  generate")
    assert pages["fourth"].startswith("AGREE  generate")


@pytest.mark.parametrize("example", ["notebook"], indirect=True)
def test_the_notebook_runs(example: Path) -> None:
    """Every code cell in order, in one namespace, as a kernel runs them; the last line of a cell shows its value."""
    cells = json.loads((example / "judge.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names: dict[str, object] = {"__name__": "__main__"}
    for cell in code:
        exec(compile(cell, "judge.ipynb", "exec"), names)
    assert len(code) == 6
    for name in ("wrong", "again", "typical"):
        assert "<iframe" in names[name]._repr_html_()  # type: ignore[attr-defined]
