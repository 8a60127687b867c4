"""The memory of a reference: what the headers say it takes, what is free, and the refusal that names what would fit."""

import json
import os
import resource
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file

from specverify.isolation import control_groups
from specverify.isolation.run_memory import run_bytes
from specverify.reference.architecture import Checkpoint
from specverify.reference.case import Case
from specverify.reference.draft import Ngram
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.files.stored import StoredTensor
from specverify.reference.oracle.checkpoint import identify
from specverify.reference.oracle.parameters import COPIED_BYTES
from specverify.reference.sampling import Stops
from specverify.reference.tree import RankTree
from specverify.reference.weights import shapes
from specverify.references import memory
from specverify.references.memory import (
    ROOM,
    EnginePlace,
    WeightSizes,
    check_memory,
    drafted_sizes,
    free_bytes,
    weight_sizes,
)
from specverify.setup.errors import MissingInput
from tests.headfiles import save_head
from tests.inprocess import exit_code_of, in_this_process

GIB = 2**30
EAGLE1 = Eagle1(RankTree((0,), (0,)), HiddenStates(place="normed", shift=1), HeadLayer(2, 1, 4, 12))


@pytest.fixture(autouse=True)
def without_bytes_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the tests' own processes is free to no run."""
    monkeypatch.setattr(memory, "run_bytes", lambda: 0)


LARGE = WeightSizes(2 * GIB, 8 * GIB, GIB // 2)


def saved_llama(folder: Path, layers: int, hidden: int, inner: int, vocabulary: int) -> Checkpoint:
    """A checkpoint of random weights in bfloat16."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": vocabulary, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    from specverify.reference.oracle.configuration import read_architecture

    generator = torch.Generator().manual_seed(0)
    weights = {
        name: (torch.randn(shape, generator=generator) / max(1, shape[-1]) ** 0.5 + (len(shape) == 1)).bfloat16()
        for name, shape in shapes(read_architecture(folder / "config.json")).items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return identify(folder)


def test_the_headers_say_what_the_weights_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_llama(tmp_path, 2, 8, 24, 40)
    monkeypatch.delattr(StoredTensor, "values")
    layer = 8 * 8 + 2 * 4 * 8 + 8 * 8 + 3 * 8 * 24 + 2 * 8
    count = 2 * layer + 2 * 40 * 8 + 8
    sizes = weight_sizes(tmp_path)
    stored = (tmp_path / "model.safetensors").stat().st_size
    assert sizes == WeightSizes(stored, 8 * count, 8 * layer, mapped_dtype="bfloat16")
    assert sizes.taken_by("numpy") == 16 * count + ROOM
    assert sizes.taken_by("torch:cpu") == sizes.stored + 16 * layer + ROOM
    assert sizes.taken_by("torch:cuda") == 8 * layer + ROOM


@pytest.mark.parametrize(
    ("reference", "free", "line"),
    [
        ("numpy", 10 * GIB, None),
        ("numpy", 4 * GIB, "all weights in float64 (8 GiB), and once more changed a little a layer at a time (512 MiB),"
         " and 896 MiB for all else; 4 GiB are free; --reference torch:cpu takes 3.88 GiB"),
        ("numpy", 2 * GIB, "--reference torch:cuda takes 1.38 GiB, and 3.38 GiB on a device"),
        ("torch:cpu", 4 * GIB, None),
        ("torch:cpu", 2 * GIB, "2 GiB are free; --reference torch:cuda takes 1.38 GiB, and 3.38 GiB on a device"),
        ("torch:cpu", GIB // 2, "512 MiB are free; no reference fits: the smallest, torch:cuda, takes 1.38 GiB"),
    ],
)  # fmt: skip
def test_a_refusal_names_what_would_fit(
    reference: str, free: int, line: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: free)
    if line is None:
        assert check_memory("a-model", LARGE, reference).startswith(f"--reference {reference} takes ")
        monkeypatch.setattr(memory, "TOLD", 32 * GIB)
        assert check_memory("a-model", LARGE, reference) == ""
        return
    with pytest.raises(MissingInput) as refusal:
        check_memory("a-model", LARGE, reference)
    assert line in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_of_a_small_checkpoint_all_changed_weights_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: 4 * GIB)
    monkeypatch.setattr(memory, "TOLD", 0)
    small = WeightSizes(COPIED_BYTES // 4, COPIED_BYTES, COPIED_BYTES // 8)
    assert small.taken_by("numpy") == 2 * COPIED_BYTES + ROOM
    assert "(256 MiB), and once more changed a little, and 896 MiB" in check_memory("a-model", small, "numpy")
    larger = replace(small, wide=COPIED_BYTES + 8)
    assert larger.taken_by("numpy") == COPIED_BYTES + 8 + COPIED_BYTES // 8 + ROOM


NARROW = WeightSizes(2 * GIB, 8 * GIB, GIB // 2, mapped_dtype="bfloat16")
"""A checkpoint of 2**30 parameters in bfloat16, which an engine in that dtype maps from the files."""


@pytest.mark.parametrize(
    ("reference", "engine", "gib"),
    [
        ("torch:cpu", EnginePlace("cpu", "bfloat16"), 0),
        ("torch:cpu", EnginePlace("cpu", "float32"), 4),
        ("torch:cpu", EnginePlace("cuda", "float32"), 0),
        ("numpy", EnginePlace("cpu", "bfloat16"), 2),
        ("numpy", EnginePlace("cpu", "float64"), 8),
        ("torch:cuda", EnginePlace("cpu", "bfloat16"), 2),
    ],
)
def test_the_weights_of_the_engine_count(reference: str, engine: EnginePlace, gib: int) -> None:
    assert NARROW.taken_by(reference, engine) == NARROW.taken_by(reference) + gib * GIB


def test_an_engine_that_maps_nothing_has_a_copy_in_any_dtype() -> None:
    for dtype, gib in (("bfloat16", 2), ("float32", 4)):
        assert LARGE.taken_by("torch:cpu", EnginePlace("cpu", dtype)) == LARGE.taken_by("torch:cpu") + gib * GIB
    # A head counts in the engine's dtype beside mapped weights.
    headed = replace(NARROW, wide_head=GIB)
    assert headed.of_engine("torch:cpu", EnginePlace("cpu", "bfloat16")) == GIB // 4


def test_an_engine_on_the_reference_s_device_counts_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: 64 * GIB)
    engine = EnginePlace("cuda", "bfloat16")
    assert NARROW.on_device(engine) == NARROW.on_device() + 2 * GIB
    check_memory("a-model", NARROW, "torch:cuda", EnginePlace("cpu", "bfloat16"), NARROW.on_device())
    with pytest.raises(MissingInput, match=r"takes 5\.38 GiB of the device's memory"):
        check_memory("a-model", NARROW, "torch:cuda", engine, NARROW.on_device())


def test_a_refusal_names_the_dtype_in_which_weights_are_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: 4 * GIB)
    check_memory("a-model", NARROW, "torch:cpu", EnginePlace("cpu", "bfloat16"))
    with pytest.raises(MissingInput) as refusal:
        check_memory("a-model", NARROW, "torch:cpu", EnginePlace("cpu", "float32"))
    assert "the engine's weights in float32 (4 GiB)" in str(refusal.value)
    assert str(refusal.value).endswith("--reference torch:cpu --dtype bfloat16 takes 3.88 GiB")


def test_a_device_that_is_too_small_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: 8 * GIB)
    assert "on the device" in check_memory("a-model", LARGE, "torch:cuda", device_bytes=4 * GIB)
    with pytest.raises(
        MissingInput, match=r"takes 3\.38 GiB of the device's memory, of which 2 GiB are free; --reference "
    ):
        check_memory("a-model", LARGE, "torch:cuda", device_bytes=2 * GIB)


def test_what_is_free_is_the_least_of_machine_container_and_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(control_groups, "MOUNTED", tmp_path)
    monkeypatch.setattr(control_groups, "OWN", tmp_path / "absent")
    monkeypatch.setattr(memory, "_free_of_limit", lambda: None)
    assert free_bytes() == 8000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes() == 8000 * 1024
    for name, content in (
        ("memory.max", "5000000"),
        ("memory.current", "3000000"),
        ("memory.stat", "inactive_file 4\nactive_file 3"),
    ):
        (tmp_path / name).write_text(f"{content}\n")
    assert free_bytes() == 2000007
    monkeypatch.setattr(memory, "_free_of_limit", lambda: 5)
    assert free_bytes() == 5


@pytest.mark.parametrize(
    ("named", "limits", "free"),
    [
        ("0::/job/step", {"job/step": 700, "job": 900}, 700),
        ("0::/job/step", {"job": 600}, 600),
        ("4:memory:/job/step\n3:cpu:/other", {"memory/job": 500, "other": 7}, 500),
        ("5:cpu,memory:/", {"memory": 400, "": 800}, 400),
        ("0::/of/the/host", {"": 300}, 300),
        ("nonsense", {"": 200}, 200),
    ],
)
def test_a_limit_may_stand_at_any_group_around_the_process(
    named: str, limits: dict[str, int], free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").write_text(f"{named}\n")
    monkeypatch.setattr(control_groups, "MOUNTED", tmp_path / "mounted")
    monkeypatch.setattr(control_groups, "OWN", tmp_path / "own")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "absent")
    monkeypatch.setattr(memory, "_free_of_limit", lambda: None)
    for place, limit in limits.items():
        folder = tmp_path / "mounted" / place
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in (("memory.max", limit), ("memory.current", 0), ("memory.stat", "inactive_file 0")):
            (folder / name).write_text(f"{content}\n")
    assert free_bytes() == free


def test_what_the_run_holds_already_is_free_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    block = bytearray(os.urandom(1 << 20) * 64)
    assert 64 << 20 < run_bytes() < 64 << 30
    del block
    monkeypatch.setattr(memory, "_free_of_machine", lambda: LARGE.taken_by("torch:cpu") - ROOM)
    monkeypatch.setattr(memory, "own_groups", lambda controller: ())
    monkeypatch.setattr(memory, "_free_of_limit", lambda: None)
    monkeypatch.setattr(memory, "run_bytes", lambda: 64 * GIB)
    assert check_memory("a-model", LARGE, "torch:cpu")
    monkeypatch.setattr(memory, "run_bytes", lambda: ROOM - 1)
    with pytest.raises(MissingInput):
        check_memory("a-model", LARGE, "torch:cpu")
    # A limit of address space is one process's.
    monkeypatch.setattr(memory, "run_bytes", lambda: ROOM)
    monkeypatch.setattr(memory, "_free_of_limit", lambda: 1)
    assert free_bytes() == 1


def test_a_command_refuses_before_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    in_this_process(monkeypatch)
    monkeypatch.chdir(tmp_path)
    saved_llama(tmp_path, 2, 8, 24, 40)
    monkeypatch.setattr(memory, "free_bytes", lambda: 2**20)
    assert exit_code_of("diff", "--model", tmp_path, "--cases", "1") == 3
    out, err = capfd.readouterr()
    assert out == ""
    (line,) = [line for line in err.splitlines() if line.startswith("specverify:")]
    assert f"{tmp_path}: --reference numpy takes 896 MiB of memory: all weights in float64" in line
    assert line.endswith("1 MiB are free; no reference fits: the smallest, torch:cuda, takes 896 MiB")


def under_a_cap(checkpoint: Checkpoint, answer: Connection) -> None:
    """In a process of its own: cap the address space at what torch takes, and run torch and NumPy's certificate."""
    from specverify.properties.verdict.finding import Verdict
    from specverify.references.certificate import Certificate
    from specverify.references.torch_oracle import TorchOracle

    torch.set_num_threads(1)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    cap = pages * resource.getpagesize() + weight_sizes(checkpoint.source).taken_by("torch:cpu")
    resource.setrlimit(resource.RLIMIT_AS, (cap, cap))
    lines = [check_memory("it", weight_sizes(checkpoint.source), "torch:cpu")]
    try:
        check_memory("it", weight_sizes(checkpoint.source), "numpy")
    except MissingInput as why:
        lines.append(str(why))
    draft = Ngram(RankTree((0, 0, 1, 0), (0, 0, 0, 1)), 3)
    case = Case(checkpoint, (1, 2, 3, 1, 2), draft, stops=Stops(3), dtype="bfloat16")
    oracle = TorchOracle("cpu")
    oracle(case)
    oracle.amplification(case, case.prefix, oracle(case).steps[0].drafted.tree)  # type: ignore[union-attr]
    lines.append(str(Certificate("torch:cpu", oracle, 0).certify(Verdict(case, "", {})).reference_rows.certified))
    answer.send(lines)


@pytest.mark.slow
def test_torch_runs_where_numpy_is_refused(tmp_path: Path) -> None:
    checkpoint = saved_llama(tmp_path, 16, 512, 1408, 2000)
    test_end, child_end = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=under_a_cap, args=(checkpoint, child_end))
    process.start()
    child_end.close()
    fits, refused, certified = test_end.recv()
    process.join()
    assert fits.startswith("--reference torch:cpu takes")
    assert "are free; --reference torch:cpu takes" in refused
    assert int(certified) > 0


def test_a_head_and_a_second_model_count(tmp_path: Path) -> None:
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
    saved_llama(tmp_path / "target", 2, 8, 24, 40)
    saved_llama(tmp_path / "draft", 1, 8, 48, 40)
    target, draft = weight_sizes(tmp_path / "target"), weight_sizes(tmp_path / "draft")
    both = drafted_sizes(tmp_path / "target", tmp_path / "draft", None)
    assert both == WeightSizes(
        target.stored + draft.stored,
        target.wide + draft.wide,
        max(target.wide_layer, draft.wide_layer),
        mapped_dtype="bfloat16",
    )
    head = save_head(tmp_path / "head", EAGLE1, "vllm")
    count = sum(array.size for array in load_file(head / "model.safetensors").values())
    with_head = drafted_sizes(tmp_path / "target", None, head)
    assert with_head == replace(target, wide_head=8 * count)
    assert with_head.taken_by("numpy") == target.taken_by("numpy") + 16 * count
    assert with_head.taken_by("torch:cuda") == target.taken_by("torch:cuda") + 8 * count
    # MTP modules lie in the target's own directory: what the target reads counts once.
    assert drafted_sizes(tmp_path / "target", None, tmp_path / "target") == target
    (head / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(UnreadableCheckpoint, match=r"model\.safetensors"):
        drafted_sizes(tmp_path / "target", None, head)


def test_a_run_is_refused_where_the_draft_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    in_this_process(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "target").mkdir()
    saved_llama(tmp_path / "target", 1, 8, 24, 40)
    save_head(tmp_path / "head", EAGLE1, "vllm")
    alone = weight_sizes(tmp_path / "target").taken_by("numpy", EnginePlace("cpu", "float64"))
    monkeypatch.setattr(memory, "free_bytes", lambda: alone)
    words = ("diff", "--model", "target", "--cases", "1", "--new-tokens", "2", "--invariant", "lossless.greedy-match")
    assert exit_code_of(*words, "--draft", "ngram") == 0
    assert exit_code_of(*words, "--draft", "head") == 3
    assert "target: --reference numpy takes " in capfd.readouterr().err


def test_a_run_is_refused_where_the_engine_s_copy_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    in_this_process(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "target").mkdir()
    saved_llama(tmp_path / "target", 1, 8, 24, 40)
    alone = weight_sizes(tmp_path / "target").taken_by("torch:cpu")
    monkeypatch.setattr(memory, "free_bytes", lambda: alone)
    words = ("diff", "--model", "target", "--cases", "1", "--new-tokens", "2", "--invariant", "lossless.greedy-match")
    in_dtype = (*words, "--reference", "torch:cpu", "--draft", "ngram", "--dtype")
    assert exit_code_of(*in_dtype, "float32") == 3
    err = capfd.readouterr().err
    assert "the engine's weights in float32" in err
    assert "--reference torch:cpu --dtype bfloat16 takes" in err
    assert exit_code_of(*in_dtype, "bfloat16") != 3 or "free" not in capfd.readouterr().err
