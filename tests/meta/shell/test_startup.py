"""Help and lists start without torch: no time is asserted, only what is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from backends.faults.unplanted import reports
from specverify.commands import subjects

ROOT = Path(__file__).resolve().parents[3]
LIGHT = (
    ["--help"], ["list", "layouts"], ["list", "invariants"], ["list", "models"], ["list", "families"],
    ["list", "rules"], ["list", "trees"], ["list", "faults"], ["list", "catalogue"], ["diff", "--help"],
    ["bench", "--help"], ["gate", "--help"], ["trace", "--help"], ["trace", "schema"], ["trace", "schema", "--record"],
    ["trace", "show", "nowhere"],
)  # fmt: skip
REST = dict.fromkeys(("stage", "on", "sentence", "source", "trigger"), "")
HEAVY = ("torch", "transformers", "triton", "jinja2")

PROGRAM = """
import contextlib, io, json, sys
from specverify.cli import main
told = {}
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main(words)
    told[" ".join(words)] = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
print(json.dumps(told))
"""


def test_help_and_lists_import_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # The list of faults is kept from here on; which faults stand in it does not matter here.
    monkeypatch.setattr(subjects, "_planted", lambda: [{"name": one.id, "id": one.id} | REST for one in reports()])
    subjects.plantable()
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(LIGHT), json.dumps(HEAVY)],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    told = json.loads(ended.stdout)
    assert list(told) == [" ".join(words) for words in LIGHT]
    assert {words: names for words, names in told.items() if names} == {}


def test_the_kept_list_of_faults_is_that_of_the_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = subjects.plantable()
    (kept,) = (tmp_path / ".specverify" / "lists").iterdir()
    monkeypatch.setattr(subjects, "_planted", lambda: pytest.fail("the kept rows were not read"))
    assert subjects.plantable() == made
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    kept.write_text("[{")
    assert subjects.plantable() == made
    assert json.loads(kept.read_text()) == made
