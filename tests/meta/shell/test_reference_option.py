"""`--reference` on the command line: what pages say of its rows, and one line where it cannot be or is not right."""

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from specverify.backends import devices
from specverify.campaign import against
from specverify.references import device_array
from tests.inprocess import exit_code_of, in_this_process

FEW = ("--cases", "3", "--jobs", "1", "--invariant", "lossless.greedy-match")


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
    assert out == ""
    (line,) = [line for line in err.splitlines() if line.startswith("specverify:")]
    assert line.startswith("specverify: --reference torch:cpu: NumPy computes other numbers in ")
    assert line.endswith("no verdict of this run counts")


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
