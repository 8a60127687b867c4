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
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch

from specverify.backends.engine.model.causal_lm import CausalLm
from specverify.bench.host_waits import HostWaits
from specverify.first_contact import conformance, kernels, parts, run
from specverify.first_contact.kernels import Launch, launches
from specverify.first_contact.parts import BEGUN, SHORT, Part
from tests.inprocess import exit_code_of, in_this_process
from tests.pretended.backends import device_and_backends, device_kernel
from tests.pretended.install import pretended_device
from tests.pretended.ledger import Ledger
from tests.pretended.timed import make_timed_parts_small

FEW = [Launch(16, 1, 1, 1, 0, 0, False), Launch(80, 7, 2, 7, 3, 9, True)]

ROOT = Path(__file__).parents[3]

NEVER = float("inf")
"""The time at which a run is over that has all the time of the world."""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
    """The pretended device, and a first contact of few and small parts."""
    in_this_process(monkeypatch)
    make_timed_parts_small(monkeypatch)
    monkeypatch.setattr(kernels, "launches", lambda: iter(FEW))
    monkeypatch.setattr(parts, "KERNEL_DTYPES", ("float32",))
    # The shipped tests run in a process of their own, which costs seconds: the slow tier has them.
    monkeypatch.setattr(conformance, "find_spec", lambda name: None)
    monkeypatch.setattr(parts, "CASES", 1)
    monkeypatch.setattr(parts, "CHUNK", 1)
    monkeypatch.setitem(parts.BACKENDS, "cuda", ("cuda-eager", "cuda-fused-flashinfer"))
    with device_and_backends() as ledger:
        yield ledger


def states(folder: Path) -> dict[str, str]:
    contents = [json.loads(file.read_text()) for file in folder.glob("part-*.json")]
    return {content["part"]: content["state"] for content in contents}


def test_a_first_contact_writes_its_page(device: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of("first-contact", "--device", "cuda", "--into", tmp_path) == 3
    assert states(tmp_path) == {
        "machine": "agree",
        "kernels float32": "agree",
        "cuda-eager 0": "agree",
        "cuda-fused-flashinfer 0": "absent",
        "forwards": "agree",
        "head": "agree",
        "attention float32": "agree",
        "trees by batch": "agree",
        "batches by context": "agree",
        "conformance": "absent",
    }
    page = (tmp_path / "page.txt").read_text()
    assert page.startswith("first contact on cuda: 10 parts: 8 agree, 2 absent")
    memory = json.loads((tmp_path / "part-kernels-float32.json").read_text())["figures"]["memory"]
    assert memory["peak_mb"] > 0
    assert 0 < memory["free_mb"] <= 80 * 1024
    assert "memory: peak_mb " in page
    for words in ("name a pretended device", "launches: 2", "cases: 1", "No module named 'flashinfer'", "waits"):
        assert words in page
    assert page in capsys.readouterr().out
    (rows,) = [json.loads((tmp_path / "part-forwards.json").read_text())["figures"]["rows"]]
    assert {row["backend"] for row in rows} == {"cuda-fused-sdpa", "cuda-fused-graphs", "cuda-fused-words"}
    assert all(row["waits"] > 0 for row in rows)
    (ways,) = [json.loads((tmp_path / "part-head.json").read_text())["figures"]["rows"]]
    assert [row["way"] for row in ways] == ["target-only", "eagle1"]
    assert ways[0]["over_target"] == 1
    assert ways[1]["waits"] > ways[0]["waits"] > 0
    assert ways[1]["peak_mb"] > ways[0]["peak_mb"] > 0
    grid = json.loads((tmp_path / "part-trees-by-batch.json").read_text())["figures"]
    assert [(row["batch"], row["nodes"]) for row in grid["rows"]] == [(1, 1), (1, 3), (2, 1), (2, 3)]
    assert all(row["ms"] > 0 for row in grid["rows"])
    assert len(grid["lines"]) == 2
    table = json.loads((tmp_path / "attention-float32.json").read_text())
    assert table["kind"] == "cuda"


def test_it_goes_on_behind_the_parts_that_the_folder_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def part(name: str) -> Part:
        def run(until: float) -> tuple[bool, dict[str, Any]]:
            ran.append(name)
            return False, {}

        return Part(name, "", run)

    monkeypatch.setattr(run, "parts_of", lambda device, folder: (part("a"), part("b"), part("c")))
    assert run.run_parts("cuda", tmp_path, 1e-9, lambda line: None) == 3
    assert states(tmp_path) == {}
    assert "not run" in (tmp_path / "page.txt").read_text()
    content = {"first_contact": 1, "device": "cuda", "part": "b", "state": "agree", "seconds": 7.0, "figures": {}}
    (tmp_path / "part-b.json").write_text(json.dumps(content))
    with pretended_device():
        assert run.run_parts("cuda", tmp_path, 1, lambda line: None) == 0
    assert ran == ["a", "c"]
    assert set(states(tmp_path)) == {"a", "b", "c"}
    assert json.loads((tmp_path / "part-b.json").read_text())["seconds"] == 7.0


def test_a_kernel_that_is_wrong_or_does_not_compile_is_told(device: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    differs, kernel_figures = kernels.launch_kernels("cuda", "float32", NEVER)
    assert (differs, kernel_figures["launches"], kernel_figures["faulty"]) == (False, 2, [])

    def plan(*_: Any) -> Any:
        raise RuntimeError("'int' object has no attribute 'to'")

    right = device_kernel()
    wrong = [replace(right, compact=lambda query, columns: _seeing_less(right.compact(query, columns)))]
    monkeypatch.setattr("specverify.backends.engine.attention.triton_launch.compiled_kernel", lambda: wrong[0])
    differs, kernel_figures = kernels.launch_kernels("cuda", "float32", NEVER)
    assert differs
    assert "apart, at most" in kernel_figures["faulty"][0]
    wrong[0] = replace(right, plan=plan)
    differs, kernel_figures = kernels.launch_kernels("cuda", "float32", NEVER)
    assert differs
    assert "has no attribute 'to'" in kernel_figures["faulty"][0]


def _seeing_less(packed: Any) -> Any:
    return replace(packed, first=packed.first + 5)


def test_items_that_the_time_does_not_reach_are_counted_and_run_again(
    device: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    differs, kernel_figures = kernels.launch_kernels("cuda", "float32", 0.0)
    assert (differs, kernel_figures["launches"], kernel_figures["left"]) == (False, 0, len(FEW))
    monkeypatch.setattr(parts, "CHUNK", 3)
    monkeypatch.setattr(parts, "CASES", 3)

    def only_cases(device: str, folder: Path) -> tuple[Part, ...]:
        return tuple(part for part in parts.parts_of(device, folder) if part.name == "cuda-eager 0")

    monkeypatch.setattr(run, "parts_of", only_cases)
    # The first case is judged in time; what follows would end too late, however short it is.
    ticks = chain([0.0] * 5, repeat(19.9999))
    with monkeypatch.context() as patch:
        patch.setattr("specverify.first_contact.cases.time.monotonic", lambda: next(ticks))
        assert run.run_parts("cuda", tmp_path, 1, lambda line: None) == 3
    assert states(tmp_path) == {"cuda-eager 0": SHORT}
    section = json.loads((tmp_path / "part-cuda-eager-0.json").read_text())["figures"]
    assert (section["cases"], section["left"]) == (1, 2)
    assert "left: 2" in (tmp_path / "page.txt").read_text()
    assert run.run_parts("cuda", tmp_path, 100, lambda line: None) == 0
    assert states(tmp_path) == {"cuda-eager 0": "agree"}


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

    def network(self: CausalLm, inputs: Any, *arguments: Any) -> torch.Tensor:
        return right(self, inputs | {"input_ids": inputs["input_ids"] * 0}, *arguments)

    monkeypatch.setattr(CausalLm, "_network", network)
    (part,) = [part for part in parts.parts_of("cuda", tmp_path) if part.name == "cuda-eager 0"]
    result = part.result(NEVER)
    assert result.state == "differ"
    (line,) = result.figures["differing"]
    assert (tmp_path / line.partition(":")[0]).exists()


def test_every_kind_of_part_comes_before_further_cases_of_a_backend(tmp_path: Path) -> None:
    names = [part.name for part in parts.parts_of("cuda", tmp_path)]
    assert len(set(names)) == len(names)
    seventh = names.index("cuda-fused-flashinfer 0")
    assert names[seventh - 6 : seventh + 1] == [f"{backend} 0" for backend in parts.BACKENDS["cuda"]]
    assert seventh < names.index("conformance") < names.index("cuda-eager 10") < names.index("cuda-eager 30")
    assert sum(name.startswith("cuda-eager ") for name in names) * parts.CHUNK == parts.CASES
    assert "kernels float32" not in [part.name for part in parts.parts_of("npu", tmp_path)]


def test_a_part_that_raises_is_a_result() -> None:
    def run(until: float) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access\nwas encountered")

    result = Part("kernels", "", run).result(NEVER)
    assert result.state == "failed"
    assert result.figures == {"why": "RuntimeError: CUDA error: an illegal memory access was encountered"}


def test_without_the_device_nothing_else_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of("first-contact", "--device", "npu", "--into", tmp_path) == 3
    assert states(tmp_path) == {"machine": "absent"}
    assert "torch_npu is not installed" in capsys.readouterr().out


def test_a_folder_of_something_else_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "part-machine.json").write_text("[")
    assert exit_code_of("first-contact", "--device", "cuda", "--into", tmp_path) == 2
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


def test_a_part_that_was_cut_off_runs_again_behind_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def part(name: str) -> Part:
        def run(until: float) -> tuple[bool, dict[str, Any]]:
            order.append(name)
            if name == "b" and order == ["a", "b"]:
                raise KeyboardInterrupt  # as a kill, it leaves the part begun
            return False, {}

        return Part(name, "", run)

    monkeypatch.setattr(run, "parts_of", lambda device, folder: (part("a"), part("b"), part("c")))
    monkeypatch.setattr(run, "begin_peak", lambda device: None)
    monkeypatch.setattr(run, "memory_figures", lambda device: {})
    with pytest.raises(KeyboardInterrupt):
        run.run_parts("cuda", tmp_path, 1, lambda line: None)
    assert states(tmp_path) == {"a": "agree", "b": BEGUN}
    assert "  b                          begun" in (tmp_path / "page.txt").read_text()
    assert run.run_parts("cuda", tmp_path, 1, lambda line: None) == 0
    assert order == ["a", "b", "c", "b"]


def test_a_device_that_answers_no_more_ends_the_run_behind_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for name in ("begin_peak", "memory_figures"):
        monkeypatch.setattr(run, name, lost)
    monkeypatch.setattr(torch, "ones", lost)
    parts_in_order = (
        Part("a", "", lambda until: (False, {})),
        Part("b", "", lost),
        Part("c", "", lambda until: (False, {})),
    )
    monkeypatch.setattr(run, "parts_of", lambda device, folder: parts_in_order)
    lines: list[str] = []
    assert run.run_parts("cuda", tmp_path, 1, lines.append) == 1
    assert states(tmp_path) == {"a": "agree", "b": "failed"}
    assert "the device answers this process no more; the same command goes on behind this part" in lines
    assert "why" in json.loads((tmp_path / "part-b.json").read_text())["figures"]["memory"]
    assert run.run_parts("cuda", tmp_path, 1, lines.append) == 1
    assert states(tmp_path) == {"a": "agree", "b": "failed", "c": "agree"}


@pytest.mark.slow
def test_the_shipped_tests_run_in_miniature() -> None:
    differs, test_figures = conformance.conformance_figures("tests.pretended.backends:cuda_eager")
    assert not differs, test_figures
    assert test_figures["passed"] == len(conformance.INVARIANTS)
    differs, test_figures = conformance.conformance_figures("no-such-backend")
    assert differs
    assert test_figures["failed"]


@pytest.mark.slow
def test_whenever_it_is_killed_it_leaves_a_page_that_can_be_read(tmp_path: Path) -> None:
    """Ten kills at seeded moments, whatever runs then; the parts that had ended are not run again."""
    command = [sys.executable, "-m", "tests.pretended", "first-contact", "--device", "cuda", "--into", str(tmp_path)]
    dice = random.Random(0)
    ended_before: set[str] = set()
    for _ in range(10):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, env={**os.environ})
        while process.poll() is None and not (tmp_path / "page.txt").exists():
            time.sleep(0.1)
        time.sleep(dice.uniform(0, 20))
        process.send_signal(signal.SIGKILL)
        process.wait()
        page = (tmp_path / "page.txt").read_text()
        assert page.startswith("first contact on cuda: ")
        assert page.endswith("\n")
        section_states = states(tmp_path)
        assert set(section_states.values()) <= {"agree", "absent", SHORT, BEGUN}
        ended_now = {name for name, state in section_states.items() if state != BEGUN}
        assert ended_before <= ended_now
        ended_before = ended_now
        assert list(section_states.values()).count(BEGUN) <= 10
    assert "machine" in ended_before
