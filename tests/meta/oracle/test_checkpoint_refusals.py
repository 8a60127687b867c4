"""Everything that can be wrong with the weights of a checkpoint directory is said in one line."""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specverify.reference.oracle.checkpoint import UnreadableCheckpoint, identify, read_checkpoint
from specverify.reference.weights import shapes
from tests.models import TWO_LAYERS

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def write_checkpoint(root: Path, shards: int = 1) -> None:
    """Writes a good checkpoint directory."""
    (root / "config.json").write_text(json.dumps(LLAMA))
    state = {name: torch.full(shape, len(name) / 8) for name, shape in shapes(TWO_LAYERS).items()}
    if shards == 1:
        save_file(state, root / "model.safetensors")
        return
    placed = {name: f"model-{index % shards + 1:05}-of-{shards:05}.safetensors" for index, name in enumerate(state)}
    for shard in set(placed.values()):
        save_file({name: state[name] for name in state if placed[name] == shard}, root / shard)
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))


# What damages a good directory, and the line that says so.


def configure(**fields: Any) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        (root / "config.json").write_text(json.dumps({**LLAMA, **fields}))

    return damage


def retensor(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        state = load_file(root / "model.safetensors")
        change(state)
        save_file(state, root / "model.safetensors")

    return damage


def reheader(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Rewrites the header of model.safetensors and leaves the data."""

    def damage(root: Path) -> None:
        raw = (root / "model.safetensors").read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        change(header)
        new = json.dumps(header).encode()
        (root / "model.safetensors").write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + length :])

    return damage


def overwrite(name: str, content: bytes) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        (root / name).write_bytes(content)

    return damage


def append(content: bytes) -> Callable[[Path], None]:
    return lambda root: overwrite("model.safetensors", (root / "model.safetensors").read_bytes() + content)(root)


def only(name: str) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        (root / "model.safetensors").rename(root / name)

    return damage


def reshard(change: Callable[[Path, dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        (root / "model.safetensors").unlink()
        write_checkpoint(root, shards=2)
        index = root / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        change(root, content)
        index.write_text(json.dumps(content))

    return damage


NORM, OTHER_NORM = "model.norm.weight", "model.layers.0.input_layernorm.weight"
SECOND = "model-00002-of-00002.safetensors"
WRONG: list[tuple[str, Callable[[Path], Any], str]] = [
    *[
        (f"pickle {name}", only(name), rf"only as pickle \({name}\); pickle is never loaded; convert to safetensors")
        for name in ("pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth", "model.pt")
    ],
    ("no weights", lambda root: (root / "model.safetensors").unlink(), r"model.safetensors is missing; download"),
    ("empty file", overwrite("model.safetensors", b""), r"or corrupt \(it ends within its header\); download"),
    ("a header of nothing", overwrite("model.safetensors", bytes(8)), r"its header is not JSON"),
    ("less than a length", overwrite("model.safetensors", bytes(7)), r"it ends within its header"),
    ("not safetensors", overwrite("model.safetensors", b"PK\x03\x04" * 9), r"corrupt \(it ends within its header\)"),
    ("header not JSON", overwrite("model.safetensors", struct.pack("<Q", 2) + b"{]"), r"its header is not JSON"),
    ("header not UTF-8", overwrite("model.safetensors", struct.pack("<Q", 2) + b"\xff\xff"), r"its header is not JSON"),
    ("header a list", overwrite("model.safetensors", struct.pack("<Q", 2) + b"[]"), r"header is not a JSON object"),
    ("entry broken", reheader(lambda header: header[NORM].pop("dtype")), rf"header entry for {NORM} is broken"),
    ("entry a word", reheader(lambda header: header.update({NORM: "F32"})), rf"header entry for {NORM} is broken"),
    ("shape negative", reheader(lambda header: header[NORM].update(shape=[-8])), rf"entry for {NORM} is broken"),
    ("shape a word", reheader(lambda header: header[NORM].update(shape="ab")), rf"entry for {NORM} is broken"),
    ("bytes for shape", reheader(lambda header: header[NORM].update(shape=[9])), rf"{NORM} has 32 bytes for shape"),
    ("hole", reheader(lambda header: header.pop(NORM)), r"its tensors overlap or leave holes|header promises"),
    ("overlap", reheader(lambda header: header[NORM].update(data_offsets=header[OTHER_NORM]["data_offsets"])),
     r"overlap"),
    ("data appended", append(b"xx"), r"header promises \d+ bytes"),
    ("dtype", retensor(lambda state: state.update({NORM: torch.ones(8, dtype=torch.int8)})), rf"{NORM} has dtype I8"),
    ("tensor missing", retensor(lambda state: state.pop(NORM)), rf"tensor {NORM} is missing; config.json and weights"),
    ("head missing", retensor(lambda state: state.pop("lm_head.weight")), r"tensor lm_head.weight is missing"),
    ("shape", retensor(lambda state: state.update({NORM: torch.ones(7)})), rf"{NORM} has shape \[7\], .* for \[8\]"),
    ("extra", retensor(lambda state: state.update({"model.a.bias": torch.ones(1)})), r"model.a.bias has no place"),
    ("tied differs", configure(tie_word_embeddings=True), r"lm_head.weight differs from the embedding"),
    ("shard missing", reshard(lambda root, _: (root / SECOND).unlink()), rf"shard {SECOND} is missing; download it"),
    ("shard outside", reshard(lambda _, index: index["weight_map"].update(a="../b")), r"shard '../b' lies outside"),
    ("shard cut", reshard(lambda root, _: (root / SECOND).write_bytes(b"1234")), rf"{SECOND}: truncated or corrupt"),
    ("index bare", reshard(lambda _, index: index.pop("weight_map")), r"weight_map is missing or damaged"),
    ("index misplaces", reshard(lambda _, index: index["weight_map"].update(a=SECOND)), rf"{SECOND}: tensor a is"),
]  # fmt: skip


def assert_one_line(problem: UnreadableCheckpoint, root: Path) -> None:
    line = str(problem)
    assert line.startswith(str(root))
    assert "\n" not in line
    assert line.count(str(root)) == 1
    assert re.search(r"; \S|--against", line), f"does not say what to do: {line}"


@pytest.mark.parametrize(("damage", "line"), [entry[1:] for entry in WRONG], ids=[entry[0] for entry in WRONG])
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, damage: Callable[[Path], Any], line: str) -> None:
    write_checkpoint(tmp_path)
    read_checkpoint(tmp_path)
    damage(tmp_path)
    for use in (read_checkpoint, identify):
        with pytest.raises(UnreadableCheckpoint, match=line) as caught:
            use(tmp_path)
        assert_one_line(caught.value, tmp_path)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_weights_that_are_no_numbers_are_refused_where_they_are_read(tmp_path: Path, value: float) -> None:
    write_checkpoint(tmp_path)
    retensor(lambda state: state[NORM].fill_(value))(tmp_path)
    with pytest.raises(UnreadableCheckpoint, match=rf"tensor {NORM} holds NaN or infinity") as caught:
        read_checkpoint(tmp_path)
    assert_one_line(caught.value, tmp_path)


@pytest.mark.parametrize("name", ["nowhere", "config.json"])
def test_no_directory(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path)
    expected = "not a directory; give" if name == "config.json" else "no such directory; give"
    with pytest.raises(UnreadableCheckpoint, match=expected) as caught:
        read_checkpoint(tmp_path / name)
    assert_one_line(caught.value, tmp_path)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 100, 0.3, 0.5, 0.9, -64, -1])
def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path, length: float) -> None:
    write_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[: int(length * len(raw)) if isinstance(length, float) else length])
    with pytest.raises(UnreadableCheckpoint, match=r"model\.safetensors: truncated or corrupt") as caught:
        read_checkpoint(tmp_path)
    assert_one_line(caught.value, tmp_path)
