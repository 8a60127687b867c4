"""`bench attention`: every path that it times computes the same attention; one that is not here is said, not timed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator

from specverify.backends.engine.attention.measured.table import (
    Shape,
    Sizes,
    WrongTable,
    device_name,
    nearest,
    read_table,
    schema,
    table_of,
)
from specverify.bench import attention
from specverify.bench import attention as ways
from specverify.bench.attention import SETTINGS, _attend, measure, paths, scenes
from specverify.cli import main
from specverify.properties.strategies.models import GALLERY

SMALL = replace(SETTINGS["cpu"], prefixes=(16, 32), nodes=(5,), batches=(1, 2), dim=8)


def test_paths_compute_the_same() -> None:
    for _, scene in scenes(SMALL, "cpu"):
        outs = {name: _attend(path, scene) for name, path in paths("cpu").items() if not isinstance(path, str)}
        assert set(outs) == {"eager", "split", "sdpa", "flex"}
        for out in outs.values():
            torch.testing.assert_close(out, outs["sdpa"], atol=1e-5, rtol=1e-5)


def test_figures_are_ratios_of_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(attention.SETTINGS, "cpu", SMALL)
    monkeypatch.setattr(attention, "REPETITIONS", 1)
    file = tmp_path / "out.json"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "attention", "--json", str(file)])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "triton: not measured\n  on the CPU the kernel is only interpreted" in out
    assert max(map(len, out.splitlines())) <= 80
    figures = json.loads(file.read_text())
    places = {(row["batch"], row["prefix"], row["nodes"]) for row in figures["rows"]}
    assert places == {(batch, prefix, 5) for batch in (1, 2) for prefix in (16, 32)}
    for place in places:
        line = {row["path"]: row for row in figures["rows"] if (row["batch"], row["prefix"], row["nodes"]) == place}
        assert set(line) == {"eager", "split", "sdpa", "flex", "read"}
        for row in line.values():
            assert row["ratio"] == pytest.approx(row["us"] / line["sdpa"]["us"])
            assert row["over_read"] == pytest.approx(row["us"] / line["read"]["us"])


def test_a_device_that_is_not_here_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        assert measure("cuda", 1)["rows"]
        return
    with pytest.raises(SystemExit) as ended:
        main(["bench", "attention", "--device", "cuda"])
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (3, "", 1)
    assert "bench attention --device cuda" in err


def wrote(file: Path, *options: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "attention", "--table", str(file), *options])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_table_holds_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention.SETTINGS, "cpu", SMALL)
    monkeypatch.setattr(attention, "REPETITIONS", 2)
    file, figures = tmp_path / "table.json", tmp_path / "figures.json"
    assert wrote(file, "--json", str(figures), "--dtype", "bfloat16") == 0
    content = json.loads(file.read_text())
    Draft202012Validator(schema()).validate(content)
    assert {path.name for path in tmp_path.iterdir()} == {"table.json", "figures.json"}
    table, bench_result = read_table(file), json.loads(figures.read_text())
    assert (table.kind, table.device, table.threads) == ("cpu", device_name("cpu"), torch.get_num_threads())
    (scenes,) = table.shapes.values()
    assert [*table.shapes] == [Shape("bfloat16", 8, 2, 8)]
    assert table.ways == ("eager", "flex", "sdpa", "split")
    for scene in scenes:
        times = {
            row["path"]: round(row["us"], 1)
            for row in bench_result["rows"]
            if (row["batch"], row["prefix"], row["nodes"]) == (scene.sizes.batch, scene.sizes.prefix, scene.sizes.nodes)
        }
        assert times.pop("read")
        assert scene.us == times
        assert [times[way] for way in scene.fastest_first] == sorted(times.values())


def test_a_table_of_drawn_models_has_the_heads_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "REPETITIONS", 1)
    monkeypatch.setattr(ways, "SMALL", ((8,), (1,), (1,)))
    monkeypatch.setattr(ways, "GALLERY", GALLERY[:3] + tuple(arch for arch in GALLERY if "deep" in arch.family))
    assert wrote(tmp_path / "table.json", "--model", "drawn") == 0
    shapes = {(shape.heads, shape.kv_heads, shape.head_dim) for shape in read_table(tmp_path / "table.json").shapes}
    assert {(1, 1, 4), (2, 1, 4), (2, 2, 4)} < shapes
    assert (2, 1, 10) in shapes  # latent rows: a rank of 8 and 2 rotated numbers


def test_a_table_of_a_checkpoint_has_its_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention.SETTINGS, "cpu", SMALL)
    monkeypatch.setattr(attention, "REPETITIONS", 1)
    (tmp_path / "model").mkdir()
    config = {"model_type": "llama", "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48,
              "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 1,
              "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "hidden_act": "silu"}  # fmt: skip
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert wrote(tmp_path / "table.json", "--model", str(tmp_path / "model")) == 0
    assert [*read_table(tmp_path / "table.json").shapes] == [Shape("float32", 4, 1, 8)]
    assert wrote(tmp_path / "table.json", "--model", str(tmp_path / "none")) == 2


def test_nothing_is_measured_for_a_table_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wrote(tmp_path / "no" / "table.json") != 0
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "table.json" in err


SCENE = {"batch": 1, "prefix": 8, "nodes": 1, "us": {"sdpa": 2.0, "split": 1.0}}
SHAPE = {"dtype": "float32", "heads": 2, "kv_heads": 1, "head_dim": 4, "scenes": [SCENE]}
TABLE = {
    "attention_table": 1,
    "kind": "cpu",
    "device": "a processor",
    "threads": 1,
    "versions": {"specverify": "1", "torch": "2"},
    "repetitions": 1,
    "absent": {},
    "shapes": [SHAPE],
}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"attention_table": 2}, "version 2 of the format; this program reads 1"),
        ({"kind": "npu"}, "kind: 'npu' is not one of"),
        ({"shapes": []}, "shapes: "),
        ({"shapes": [SHAPE, SHAPE]}, "float32, 2 heads on 1 KV of 4 stands twice"),
        ({"shapes": [{**SHAPE, "scenes": [SCENE, SCENE]}]}, "float32, 2 heads on 1 KV of 4 has a scene"),
        ({"shapes": [{**SHAPE, "scenes": [{**SCENE, "us": {"magic": 1.0}}]}]}, "shapes[0].scenes[0].us"),
        ({"shapes": [{**SHAPE, "scenes": [{**SCENE, "us": {"sdpa": 0}}]}]}, "scenes[0].us.sdpa: 0"),
    ],
)
def test_a_wrong_table_is_refused_in_one_line(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(WrongTable) as error:
        table_of({**TABLE, **changed})
    assert why in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongTable, match="it cannot be read"):
        read_table(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"attention_table": 1, "kind"')
    with pytest.raises(WrongTable, match="it is no JSON"):
        read_table(tmp_path / "half.json")


def test_the_nearest_scene_is_nearest_in_powers_of_two() -> None:
    places = [(1, 15, 1), (1, 15, 64), (8, 1023, 8), (8, 15, 8)]
    scenes = [
        {"batch": batch, "prefix": prefix, "nodes": nodes, "us": {"sdpa": 1.0}} for batch, prefix, nodes in places
    ]
    table = table_of({**TABLE, "shapes": [{**SHAPE, "scenes": scenes}]})
    shape = Shape("float32", 2, 1, 4)

    def nearest_sizes(*sizes: int) -> tuple[int, int, int]:
        scene = nearest(table, shape, Sizes(*sizes))
        assert scene is not None
        return (scene.sizes.batch, scene.sizes.prefix, scene.sizes.nodes)

    assert [nearest_sizes(*place) for place in places] == places
    assert nearest_sizes(1, 0, 1) == (1, 15, 1)
    assert nearest_sizes(1, 15, 9) == (1, 15, 64)  # 3.2 powers of two from 1, 2.8 from 64
    assert nearest_sizes(4, 100, 8) == (8, 15, 8)  # 2.7 powers of two from 15 + 1, 3.3 from 1023 + 1
    assert nearest_sizes(4, 200, 8) == (8, 1023, 8)
    assert nearest_sizes(1, 15, 8) == (1, 15, 1)  # 8 lies amid 1 and 64: the first scene
    assert nearest(table, Shape("float64", 2, 1, 4), Sizes(1, 15, 1)) is None
