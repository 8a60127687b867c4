"""`--reference` on the command line: what pages say of its rows, and one line where it cannot be or is not right."""

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import specverify
from specverify.backends import devices
from specverify.campaign import against
from specverify.reference.case import Case
from specverify.references import device_array
from specverify.setup.errors import MissingInput, UnusableInput
from tests.cases import CORPUS
from tests.inprocess import exit_code_of, in_this_process
from tests.models import LLAMA

FEW = ("--cases", "6", "--jobs", "1", "--invariant", "lossless.greedy-match")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    in_this_process(monkeypatch)
    return tmp_path


def test_every_report_names_the_reference_and_its_rows(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("diff", "--reference", "torch:cpu", *FEW, "--json", "run.json", "--junit", "run.xml", "--html", "run.html")
    assert exit_code_of(*words) == 0
    content = json.loads((folder / "run.json").read_text())
    rows = content["reference_rows"]
    assert content["reference"] == "torch:cpu"
    assert rows["judged"] > rows["certified"] >= 3
    assert rows["widest"] < 1e-12
    counts = f"{rows['judged']} rows by the oracle's formulas; NumPy certified {rows['certified']} of them"
    assert f"torch:cpu, {counts}" in " ".join(capfd.readouterr().out.split())
    assert counts in (folder / "run.html").read_text().replace("&#39;", "'")
    properties = {entry.get("name"): entry.get("value") for entry in ElementTree.parse("run.xml").iter("property")}
    assert properties["reference"] == "torch:cpu"
    assert counts in str(properties["reference_rows"])


def test_a_reference_that_numpy_refutes_judges_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(device_array.UFUNCS, np.exp, lambda x: torch.exp(x.float()).double())
    assert exit_code_of("diff", "--reference", "torch:cpu", *FEW) == 3
    out, err = capfd.readouterr()
    assert "AGREE" not in out
    # A line alone where the first case is refuted; where nothing was compared in it, a page.
    said = " ".join((out or err).split())
    assert "--reference torch:cpu: NumPy computes other numbers in " in said
    assert "no verdict of this run counts" in said


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (
            ("--against", "cpu-fused"),
            2,
            "--reference torch:cpu computes the oracle, in whose place --against puts cpu-fused",
        ),
        (("--reference", "torch:cuda"), 3, "--reference torch:cuda: no card; --reference torch:cpu computes the same"),
        (("--reference", "torch"), 2, "'torch' is not one of 'numpy', 'torch:cpu', 'torch:cuda', 'torch:npu'"),
    ],
)
def test_one_line_where_it_cannot_be(
    words: tuple[str, ...], code: int, line: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for module in (devices, against):
        monkeypatch.setattr(module, "why_no_device", lambda device: "no card" if device == "cuda" else None)
    assert exit_code_of("diff", "--reference", "torch:cpu", *FEW, *words) == code
    assert line in " ".join(capfd.readouterr().err.split())


FAULT = "kv-truncated-not-gathered"
SAVED = str(CORPUS / f"{FAULT}.json")


def test_a_replay_by_torch_finds_what_numpy_finds_and_says_who_certified(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of("replay", SAVED, "--fault", FAULT, "--reference", "torch:cpu", "--json", "torch.json") == 1
    page = " ".join(capfd.readouterr().out.split())
    assert exit_code_of("replay", SAVED, "--fault", FAULT, "--json", "numpy.json") == 1
    by_torch, by_numpy = (json.loads((folder / name).read_text()) for name in ("torch.json", "numpy.json"))
    assert (by_torch["result"], by_torch["reference"]) == ("FAILED", "torch:cpu")
    assert by_torch["finding"]["reference"] == "torch:cpu"
    assert by_torch["reference_rows"]["certified"] > 0
    assert f"NumPy certified {by_torch['reference_rows']['certified']} of them" in page
    assert "torch:cpu, by the oracle's formulas" in page
    assert "--reference torch:cpu" in by_torch["finding"]["replay"]
    assert by_numpy["finding"]["invariant"] == by_torch["finding"]["invariant"]
    assert "reference_rows" not in by_numpy
    assert specverify.replay(SAVED, reference="torch:cpu").word == "FIXED"


def test_a_replay_whose_reference_numpy_refutes_judges_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(device_array.UFUNCS, np.exp, lambda x: torch.exp(x.float()).double())
    assert exit_code_of("replay", SAVED, "--reference", "torch:cpu") == 3
    assert "UNJUDGED --reference torch:cpu: NumPy computes other numbers" in " ".join(capfd.readouterr().out.split())
    with pytest.raises(MissingInput, match="NumPy computes other numbers"):
        specverify.judge(Case(LLAMA, (3, 1, 4)), reference="torch:cpu")


def test_one_case_is_judged_by_torch() -> None:
    result = specverify.judge(Case(LLAMA, (3, 1, 4)), reference="torch:cpu")
    assert result.outcome == "agree"
    assert result.verdict.reference_rows.certified > 0
    with pytest.raises(UnusableInput, match="in whose place --against puts cpu-fused"):
        specverify.judge(Case(LLAMA, (3, 1, 4)), reference="torch:cpu", against="cpu-fused")
