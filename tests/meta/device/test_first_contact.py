"""`specverify first-contact` on the pretended device: its page, what it finds, how it goes on, and kills."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specverify.backends.engine.model.causal_lm import CausalLm
from specverify.bench import attention
from specverify.bench.host_waits import HostWaits
from specverify.first_contact import figures, kernels, parts
from specverify.first_contact.kernels import Launch, launches
from specverify.first_contact.parts import Part, Result
from tests.inprocess import ended, in_this_process
from tests.models import TINY_LLAMA
from tests.pretended.backends import device_and_backends, device_kernel
from tests.pretended.ledger import Ledger

SMALL = replace(attention.SETTINGS["cuda"], prefixes=(16,), nodes=(3,), batches=(1,), heads=2, kv_heads=1, dim=16)

FEW = [Launch(16, 1, 1, 1, 0, 0, False), Launch(80, 7, 2, 7, 3, 9, True)]

ROOT = Path(__file__).parents[3]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
    """The pretended device, and a first contact of few and small parts."""
    in_this_process(monkeypatch)
    monkeypatch.setitem(attention.SETTINGS, "cuda", SMALL)
    monkeypatch.setattr(kernels, "launches", lambda: iter(FEW))
    monkeypatch.setattr(parts, "KERNEL_DTYPES", ("float32",))
    monkeypatch.setattr(figures, "TARGET", TINY_LLAMA)
    monkeypatch.setattr(figures, "TOKENS", 4)
    monkeypatch.setattr(parts, "CASES", 1)
    monkeypatch.setattr(parts, "CHUNK", 1)
    monkeypatch.setitem(parts.BACKENDS, "cuda", ("cuda-eager", "cuda-fused-flashinfer"))
    with device_and_backends() as ledger:
        yield ledger


def states(folder: Path) -> dict[str, str]:
    contents = [json.loads(file.read_text()) for file in folder.glob("part-*.json")]
    return {content["part"]: content["state"] for content in contents}


def test_a_first_contact_writes_its_page(device: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("first-contact", "--device", "cuda", "--into", tmp_path) == 3
    assert states(tmp_path) == {
        "machine": "agree",
        "kernels float32": "agree",
        "cuda-eager 0": "agree",
        "cuda-fused-flashinfer 0": "absent",
        "forwards": "agree",
        "attention float32": "agree",
    }
    page = (tmp_path / "page.txt").read_text()
    assert page.startswith("first contact on cuda: 6 parts: 5 agree, 1 absent")
    for words in ("name a pretended device", "launches: 2", "cases: 1", "No module named 'flashinfer'", "waits"):
        assert words in page
    assert page in capsys.readouterr().out
    (rows,) = [json.loads((tmp_path / "part-forwards.json").read_text())["figures"]["rows"]]
    assert {row["backend"] for row in rows} == {"cuda-fused-sdpa", "cuda-fused-graphs", "cuda-fused-words"}
    assert all(row["waits"] > 0 for row in rows)
    table = json.loads((tmp_path / "attention-float32.json").read_text())
    assert table["kind"] == "cuda"


def test_it_goes_on_behind_the_parts_that_the_folder_holds(device: Ledger, tmp_path: Path) -> None:
    assert ended("first-contact", "--device", "cuda", "--into", tmp_path, "--minutes", "0.0001") == 3
    began = states(tmp_path)
    assert len(began) < 6
    assert "not run" in (tmp_path / "page.txt").read_text()
    (tmp_path / "part-machine.json").write_text(
        json.dumps({
            "first_contact": 1, "device": "cuda", "part": "machine", "state": "agree", "seconds": 7.0, "figures": {}
        })
    )  # fmt: skip
    ended("first-contact", "--device", "cuda", "--into", tmp_path)
    assert len(states(tmp_path)) == 6
    assert json.loads((tmp_path / "part-machine.json").read_text())["seconds"] == 7.0


def test_a_kernel_that_is_wrong_or_does_not_compile_is_told(device: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    differs, told = kernels.launch_kernels("cuda", "float32")
    assert (differs, told["launches"], told["faulty"]) == (False, 2, [])

    def plan(*_: Any) -> Any:
        raise RuntimeError("'int' object has no attribute 'to'")

    right = device_kernel()
    wrong = [replace(right, compact=lambda query, columns: _seeing_less(right.compact(query, columns)))]
    monkeypatch.setattr("specverify.backends.engine.attention.triton_launch.compiled_kernel", lambda: wrong[0])
    differs, told = kernels.launch_kernels("cuda", "float32")
    assert differs
    assert "apart, at most" in told["faulty"][0]
    wrong[0] = replace(right, plan=plan)
    differs, told = kernels.launch_kernels("cuda", "float32")
    assert differs
    assert "has no attribute 'to'" in told["faulty"][0]


def _seeing_less(packed: Any) -> Any:
    return replace(packed, first=packed.first + 5)


def test_the_launches_take_every_specialisation() -> None:
    """Each integer argument is 1, odd and a multiple of 16 in some launch, with splits and sinks and without."""
    every = list(launches())
    for name in ("rows", "kv_heads", "page"):
        values = {getattr(launch, name) for launch in every}
        assert 1 in values
        assert any(value > 1 and value % 16 for value in values)
    assert {launch.rows % 16 == 0 for launch in every} == {True, False}
    assert {launch.page % 16 == 0 for launch in every} == {True, False}
    assert {bool(launch.splits) for launch in every} == {launch.sinks for launch in every} == {True, False}
    assert len(set(every)) == len(every)


def test_a_case_that_differs_is_saved(device: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = CausalLm._network

    def network(self: CausalLm, inputs: Any, *others: Any) -> torch.Tensor:
        return right(self, inputs | {"input_ids": inputs["input_ids"] * 0}, *others)

    monkeypatch.setattr(CausalLm, "_network", network)
    (part,) = [part for part in parts.parts_of("cuda", tmp_path) if part.name == "cuda-eager 0"]
    result = part.result()
    assert result.state == "differ"
    (line,) = result.figures["differing"]
    assert (tmp_path / line.partition(":")[0]).exists()


def test_a_part_that_raises_is_a_result() -> None:
    def run() -> Any:
        raise RuntimeError("CUDA error: an illegal memory access\nwas encountered")

    result = Part("kernels", "", run).result()
    assert result.state == "failed"
    assert result.figures == {"why": "RuntimeError: CUDA error: an illegal memory access was encountered"}


def test_without_the_device_nothing_else_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("first-contact", "--device", "npu", "--into", tmp_path) == 3
    assert states(tmp_path) == {"machine": "absent"}
    assert "torch_npu is not installed" in capsys.readouterr().out


def test_a_folder_of_something_else_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "part-machine.json").write_text("[")
    assert ended("first-contact", "--device", "cuda", "--into", tmp_path) == 2
    assert "part-machine.json: it cannot be read" in capsys.readouterr().err


def test_waits_are_counted_as_torch_tells_them(device: Ledger) -> None:
    tensor = torch.ones(2, device="cuda")
    with HostWaits("cuda") as waits:
        tensor.sum().item()
        tensor.cpu()
        tensor + 1
    assert waits.count == 2
    with HostWaits("cpu") as unknown:
        torch.ones(2).tolist()
    assert unknown.count is None


@pytest.mark.slow
def test_whenever_it_is_killed_it_leaves_a_page_that_can_be_read(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.pretended", "first-contact", "--device", "cuda", "--into", str(tmp_path)]
    dice = random.Random(0)
    for _ in range(10):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, env={**os.environ})
        while process.poll() is None and not (tmp_path / "page.txt").exists():
            time.sleep(0.1)
        time.sleep(dice.uniform(0, 12))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (tmp_path / "page.txt").read_text().startswith("first contact on cuda: ")
        assert set(states(tmp_path).values()) <= {"agree", "absent"}
    assert Result("agree", 0.0).figures == {}
