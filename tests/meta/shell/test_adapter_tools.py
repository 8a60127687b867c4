"""The tools of an adapter's author: what they write runs as it stands, and what is wrong is told where it is wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specverify.adapters.init_command import KINDS
from specverify.cli import main
from specverify.conformance.opened import open_or_exit
from tests.inprocess import in_this_process
from tests.tiers import first

ROOT = Path(__file__).resolve().parents[3]

ADAPTERS = """from specverify.adapt import Declaration, Stage, Trace, Unsupported, blackbox


def text(prompt_ids, max_new_tokens):
    return "three tokens"


def refuses(prompt_ids, max_new_tokens):
    raise Unsupported("no license for this prompt")


def breaks(prompt_ids, max_new_tokens):
    return deeper(prompt_ids)


def deeper(prompt_ids):
    raise IndexError("slot 3 is out of range")


class Nothing:
    declaration = Declaration(
        name="nothing", device="cpu", reveals=frozenset({Stage.EMITTED}), dtypes=("float32",), layout_settings=()
    )

    def run(self, case):
        return None


class Silent(Nothing):
    def run(self, case):
        return Trace((), (), None)


class Bare:
    def run(self, case):
        return None


class Listed:
    declaration = Declaration(name="listed", device="cpu", reveals=["emitted"], dtypes=("float32",))

    def run(self, case):
        return None


def none():
    return None


def inside():
    return {}["weights"]


number = 3
text_, refuses_, breaks_ = blackbox(text), blackbox(refuses), blackbox(breaks)
wrong_dtype = blackbox(text, dtypes=("float99",))
"""


def line_of(source: str, text: str) -> int:
    """The number of the line of `source` that begins with `text`, blanks apart."""
    return next(index for index, line in enumerate(source.splitlines(), 1) if line.strip().startswith(text))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, whose modules this process can import under names that no other test has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.fixture
def module(folder: Path) -> str:
    """A module of adapters with one error each; its name."""
    name = f"adapters_{folder.name}"
    (folder / f"{name}.py").write_text(ADAPTERS)
    return name


def exit_code_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize("kind", first(KINDS, 4))
def test_a_written_adapter_agrees_as_it_stands(
    kind: str, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    file = f"written_{kind}.py"
    assert exit_code_of("init-adapter", kind, file) == 0
    output = capfd.readouterr().out
    name = f"command:python {file}" if kind == "command" else f"written_{kind}:open_"
    assert f"agrees({name!r}" in (folder / f"test_{file}").read_text()
    source = (folder / file).read_text()
    assert f"specverify check-adapter {chr(39) + name + chr(39) if ' ' in name else name}" in output
    assert "MODULE" not in source + output
    assert exit_code_of("check-adapter", name, "--cases", "4") == 0
    page = capfd.readouterr().out
    assert page.count("agrees        case ") == 4
    assert "lossless.greedy-match (" in page
    assert ("acceptance.greedy-walk (" in page) == (kind in ("stepper", "backend", "component"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_test_that_is_written_beside_it_passes(kind: str, folder: Path) -> None:
    assert exit_code_of("init-adapter", kind) == 0
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_engine.py"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 passed" in ended.stdout


@pytest.mark.parametrize("there", ["my_engine.py", "test_my_engine.py"])
def test_nothing_is_overwritten(there: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / there).write_text("mine")
    assert exit_code_of("init-adapter", "blackbox") == 2
    assert capsys.readouterr().err == (
        f"specverify: {there}: it is there already, and nothing is overwritten: name another file\n"
    )
    assert [path.name for path in folder.iterdir()] == [there]
    assert (folder / there).read_text() == "mine"


@pytest.mark.parametrize("file", ["engine", "my-engine.py", "engine.txt"])
def test_a_file_that_cannot_be_imported_is_not_written(
    file: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of("init-adapter", "blackbox", file) == 2
    assert "give a file such as my_engine.py" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_a_folder_that_is_not_there_is_refused_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of("init-adapter", "blackbox", "absent/my_engine.py") == 2
    assert "cannot write absent/my_engine.py: No such file" in capsys.readouterr().err


def test_the_traceback_of_a_run_is_shown_whole(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of("check-adapter", f"{module}:breaks_", "--cases", "2") == 1
    page = capsys.readouterr().out
    assert page.count("raised        case ") == 2
    for text in ("return deeper(prompt_ids)", 'raise IndexError("slot 3 is out of range")'):
        assert f'{module}.py", line {line_of(ADAPTERS, text)}' in page
        assert text in page
    assert "mend the first traceback above" in page


def test_cases_that_are_declined_are_no_pass_and_told(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of("check-adapter", f"{module}:refuses_", "--cases", "2") == 3
    page = " ".join(capsys.readouterr().out.split())
    assert "declined 2 of 2" in page
    assert "2 cases: no license for this prompt" in page
    assert "declare what the engine takes" in page


def test_a_trace_that_holds_nothing_is_no_pass(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of("check-adapter", f"{module}:Silent", "--cases", "3") != 0
    page = " ".join(capsys.readouterr().out.split())
    assert "missing declared, and no trace holds it: emitted" in page


@pytest.mark.parametrize(
    ("name", "line", "place"),
    [
        ("text_", "generate returned str, expected the generated token ids", "def text"),
        ("Nothing", "what run returned: None, expected specverify.reference.trace.Trace", "def run"),
    ],
)
@pytest.mark.parametrize("command", ["check-adapter", "diff"])
def test_nonsense_is_told_with_what_was_expected_and_where_it_was_made(
    command: str,
    name: str,
    line: str,
    place: str,
    module: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    in_this_process(monkeypatch)
    options = ["--cases", "2"] if command == "check-adapter" else ["--cases", "2", "--jobs", "1", "--backend"]
    # What holds for every case ends `diff` at the first, as wrong input; a run that gives no trace may be the case's.
    is_input = (command, name) == ("diff", "text_")
    assert exit_code_of(command, *options, f"{module}:{name}") == (2 if is_input else 1)
    printed = capsys.readouterr()
    page = " ".join((printed.out + printed.err).split())
    assert line in page
    assert f"{module}.py:{line_of(ADAPTERS, place)}" in page


UNOPENED = {
    "none": ("what 'none' returns has no run() and declaration ({file}:{line}): NoneType, expected a", "def none"),
    "Bare": ("what 'Bare' returns has no run() and declaration ({file}:{line}): Bare, expected a", "class Bare"),
    "text": ("'text' raised TypeError: text() missing 2 required positional arguments", ""),
    "inside": ("'inside' raised KeyError: 'weights' ({file}:{line}); expected a function", 'return {}["weights"]'),
    "number": ("has no factory called 'number' ({file}:{line}): expected a function without arg", "number = "),
    "absent": ("has no factory called 'absent' ({file}): expected a function without arguments", ""),
    "wrong_dtype": ("declaration.dtypes[0]: 'float99', expected one of {dtypes} ({file}:{line})", "wrong_dtype = "),
    "Listed": ("declaration.reveals: list of 1 (str), expected a frozenset of specverify.reference.trace.Stage", ""),
}


@pytest.mark.parametrize("name", UNOPENED)
def test_an_adapter_that_cannot_be_opened_is_one_line_for_every_command(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pattern, text = UNOPENED[name]
    line = line_of(ADAPTERS, text) if text else 0
    message = pattern.format(file=f"{module}.py", line=line, dtypes="float64, float32, bfloat16, float16")
    in_this_process(monkeypatch)
    assert exit_code_of("check-adapter", f"{module}:{name}") == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert exit_code_of("diff", "--backend", f"{module}:{name}", "--cases", "2", "--jobs", "1") == 2
    lines = capsys.readouterr().err.splitlines()
    assert [message in error_line for error_line in lines] == [True]
    assert "Traceback" not in "".join(lines)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("import absent_package\n", "cannot import '{name}' (No module named 'absent_package') ({name}.py:1)"),
        ("x = 1\ny = x +\n", "importing '{name}' raised SyntaxError: invalid syntax ({name}.py, line 2) ({name}.py:2)"),
        ("def f():\n    return 1 / 0\n\n\nf()\n", "raised ZeroDivisionError: division by zero ({name}.py:2)"),
        (None, "cannot import '{name}' (No module named '{name}'); it is searched on Python's path and in the current"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line_for_every_command(
    source: str | None, line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"broken_{folder.name}"
    if source is not None:
        (folder / f"{name}.py").write_text(source)
    assert exit_code_of("check-adapter", f"{name}:open_") == 2
    assert line.format(name=name) in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(pytest.exit.Exception) as ended, open_or_exit(f"{name}:open_"):
        raise AssertionError("it cannot be opened")
    assert ended.value.returncode == 2
    assert line.format(name=name) in str(ended.value)
