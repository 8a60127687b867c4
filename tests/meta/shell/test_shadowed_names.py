"""Packages that hide those we need are found before they are imported; the current folder hides nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specverify import shadowing
from specverify.backends.registry import UnknownBackend, open_backend
from specverify.laws.user_rule import own_rule
from specverify.setup import processors
from specverify.setup.errors import UnusableInput

ROOT = Path(__file__).resolve().parents[3]
WRONG = "raise RuntimeError('the wrong module was imported')\n"


def package(folder: Path, name: str, text: str = WRONG) -> Path:
    """The file of a package called `name` in `folder`."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(text)
    return folder / name / "__init__.py"


def start_python(folder: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """A Python started in `folder`, our checkout last on its path as an editable install puts it."""
    site = folder / ".site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(f"import sys; sys.path.append({str(ROOT)!r})\n")
    path = os.pathsep.join([*filter(None, [environment.pop("PYTHONPATH", "")]), str(site)])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def script(folder: Path) -> str:
    """Our command as an installer writes it."""
    file = folder / "bin" / "specverify"
    file.parent.mkdir(exist_ok=True)
    file.write_text("import sys\nfrom specverify.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n")
    return str(file)


def one_line(ended: "subprocess.CompletedProcess[str]") -> str:
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (3, "", 1), ended.stderr
    return ended.stderr


@pytest.mark.parametrize("name", ["numpy", "torch", "click"])
def test_a_file_or_folder_that_hides_what_we_need_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(WRONG)
    line = one_line(start_python(tmp_path, "-m", "specverify", "replay", "x.json"))
    assert line.startswith(f"specverify: `{name}` is {tmp_path / name}.py, which hides ")
    assert "start from another folder, call `specverify` in place of `python -m specverify`" in line
    (tmp_path / f"{name}.py").unlink()
    package(tmp_path, name)
    line = one_line(start_python(tmp_path, script(tmp_path), "--version", PYTHONPATH="."))
    assert line.startswith(f"specverify: `{name}` is {tmp_path / name / '__init__.py'}, which hides ")
    assert line.endswith(f": take {tmp_path} out of PYTHONPATH, or rename it\n")


def test_what_hides_nothing_is_no_complaint(tmp_path: Path) -> None:
    """A folder without `__init__.py` is found last; what PYTHONPATH names on purpose is another build of a package."""
    (tmp_path / "backends").mkdir()
    (tmp_path / "torch").mkdir()
    package(tmp_path / "builds", "click", f"from pathlib import Path\nopen({str(tmp_path / 'seen')!r}, 'w')\n" + WRONG)
    ended = start_python(tmp_path, "-m", "specverify", "diff", PYTHONPATH="builds")
    assert (tmp_path / "seen").exists()
    assert "the wrong module was imported" in ended.stderr


def test_another_program_that_imports_us_gets_an_import_error(tmp_path: Path) -> None:
    package(tmp_path, "rich")
    (tmp_path / "mine.py").write_text("try:\n    import specverify\nexcept ImportError as why:\n    print(why)\n")
    ended = start_python(tmp_path, "-m", "mine", "specverify")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"`rich` is {tmp_path / 'rich' / '__init__.py'}, which hides ")


def test_the_doctor_survives_and_names_everything_that_is_shadowed(tmp_path: Path) -> None:
    files = {name: package(tmp_path, name) for name in ("jsonschema", "junitparser", "rich")}
    ended = start_python(tmp_path, "-m", "specverify", "doctor", "--json")
    rows = {row["name"]: row for row in json.loads(ended.stdout)["checks"]}
    assert (ended.returncode, ended.stderr) == (3, "")
    assert {name for name, row in rows.items() if row["state"] == "shadowed"} == set(files)
    for name, file in files.items():
        assert f"`{name}` is {file}, which hides " in rows[name]["detail"]
    assert rows["specverify"] == {"name": "specverify", "state": "ok", "detail": str(ROOT / "specverify")}
    assert rows["backend cpu-eager"]["state"] == "ok"


def test_a_program_is_our_command_only_if_it_was_started_as_such() -> None:
    is_command = shadowing._is_command
    assert is_command(["/usr/bin/specverify", "diff"], ["python", "/usr/bin/specverify", "diff"])
    assert is_command([r"specverify.exe", "diff"], [])
    assert is_command(["-m", "diff"], ["python", "-m", "specverify", "diff"])
    assert is_command(["-m", "diff"], ["python", "-Im", "specverify", "diff"])
    assert is_command(["-m"], ["python", "-W", "error", "-mspecverify"])
    assert not is_command(["-m", "specverify"], ["python", "-m", "mine", "specverify"])
    assert not is_command(["/usr/bin/pytest", "specverify"], ["python", "/usr/bin/pytest", "specverify"])
    assert not is_command([], [])


ENGINE = """from specverify.backends.registry import open_backend
def open():
    return open_backend("cpu-eager")
def rule(*asked):
    return (0,), [1]
def twice(tokens, logits):
    return 2 * logits
"""


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder that is not on the path, with an engine of a stranger in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ".", str(tmp_path))])
    package(tmp_path, "engine_of_here", "")
    (tmp_path / "engine_of_here" / "adapter.py").write_text(ENGINE)
    for name in ("engine_of_here", "engine_of_here.adapter"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_the_current_folder_is_where_a_named_module_may_lie(away: Path) -> None:
    assert open_backend("engine_of_here.adapter:open").declaration.name == "cpu-eager"
    assert sys.path[-1] == str(away)
    open_backend("engine_of_here.adapter:open")
    assert sys.path.count(str(away)) == 1


def test_so_may_a_rule_or_a_processor(away: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [entry for entry in sys.path if entry != str(away)]
    own_rule("engine_of_here.adapter:rule")
    monkeypatch.setattr(sys, "path", list(before))
    for name in ("engine_of_here", "engine_of_here.adapter"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    processors.admit(["engine_of_here.adapter:twice"])
    with pytest.raises(UnusableInput, match="is it in the current folder or on PYTHONPATH"):
        own_rule("gone_from_here:rule")


def test_the_current_folder_hides_nothing_and_may_be_gone(away: Path) -> None:
    (away / "json.py").write_text(WRONG)
    package(away, "backends")
    with pytest.raises(UnknownBackend, match="cannot import 'backends\\.mine'"):
        open_backend("backends.mine:open")
    vanished_folder = away / "gone"
    vanished_folder.mkdir()
    os.chdir(vanished_folder)
    vanished_folder.rmdir()
    with pytest.raises(UnknownBackend, match="cannot import 'gone'"):
        open_backend("gone:open")
