"""Help and lists start without torch: no time is asserted, only what is imported."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from specverify.backends import devices, registry
from specverify.backends.adapters import SHIPPED_BACKENDS
from specverify.backends.faults.unplanted import reports
from specverify.backends.registry import why_absent, why_unavailable
from specverify.commands import subjects

ROOT = Path(__file__).resolve().parents[3]
LIGHT = (
    ["--help"], ["list", "layouts"], ["list", "invariants"], ["list", "models"], ["list", "families"],
    ["list", "rules"], ["list", "trees"], ["list", "faults"], ["list", "catalogue"], ["diff", "--help"],
    ["bench", "--help"], ["gate", "--help"], ["trace", "--help"], ["trace", "schema"], ["trace", "schema", "--record"],
    ["trace", "show", "nowhere"], ["list", "backends"], ["list", "backends", "--json"], ["list"], ["doctor"],
)  # fmt: skip
OTHER_FIELDS = dict.fromkeys(("stage", "on", "sentence", "source", "trigger"), "")
HEAVY = ("torch", "torch._dynamo", "transformers", "triton", "jinja2", "scipy.stats")

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
    monkeypatch.setattr(
        subjects, "_fault_rows", lambda: [{"name": report.id, "id": report.id} | OTHER_FIELDS for report in reports()]
    )
    subjects.plantable_faults()
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(LIGHT), json.dumps(HEAVY)],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    names_by_command = json.loads(ended.stdout)
    assert list(names_by_command) == [" ".join(words) for words in LIGHT]
    assert {words: names for words, names in names_by_command.items() if names} == {}


def test_backends_are_told_without_opening_them_as_they_are_by_opening_them() -> None:
    names = [row.name for row in SHIPPED_BACKENDS]
    assert {name: why_absent(name) for name in names} == {name: why_unavailable(name) for name in names}


def test_an_absent_package_is_named_as_an_opening_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None if name == "triton" else find_spec(name))
    reason = why_absent("triton-interpreted")
    assert reason == ("triton-interpreted needs Triton (pip install 'triton>=3.0', on Linux): No module named 'triton'")


def test_a_torch_with_cuda_is_asked_for_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "torch_build", lambda: {"__version__": "2.13.0+cu130", "cuda": "13.0", "hip": None})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert devices.why_no_device("cuda") == "no CUDA device is visible"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert devices.why_no_device("cuda") is None
    monkeypatch.setattr(devices, "torch_build", lambda: {"__version__": "2.13.0+cpu", "cuda": None, "hip": None})
    assert devices.why_no_device("cuda") == "torch 2.13.0+cpu is built without CUDA"


def test_the_kept_list_of_faults_is_that_of_the_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fault_rows = subjects.plantable_faults()
    (list_file,) = (tmp_path / ".specverify" / "lists").iterdir()
    monkeypatch.setattr(subjects, "_fault_rows", lambda: pytest.fail("the kept rows were not read"))
    assert subjects.plantable_faults() == fault_rows
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    list_file.write_text("[{")
    assert subjects.plantable_faults() == fault_rows
    assert json.loads(list_file.read_text()) == fault_rows
