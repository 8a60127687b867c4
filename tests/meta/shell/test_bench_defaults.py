"""Every bench runs as a user runs it: with its defaults, on a small checkpoint where it needs one."""

import json
from pathlib import Path

import pytest

from tests.checkpoints import readable
from tests.inprocess import exit_code_of
from tests.meta.training import targets

QUICK = ("draft-attention",)
SLOW_BENCHES = ("decode", "throughput", "kv", "attention", "isolation", "growth", "oracle", "heads", "acceptance")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with room for the longest prompts that a default asks for."""
    folder = readable("llama", tmp_path_factory.mktemp("defaults"))
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_no_bench_is_forgotten() -> None:
    from specverify.commands.bench import bench

    assert sorted(bench.commands) == sorted((*QUICK, *SLOW_BENCHES))


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_BENCHES)])
def test_a_bench_runs_with_its_defaults(
    name: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    needed = ["--model", checkpoint] if name in ("decode", "growth", "draft-attention") else []
    needed += ["--draft", f"model:{checkpoint}"] if name == "draft-attention" else []
    if name == "heads":
        target = targets.make_folder(tmp_path)
        needed = ["--model", target / "model", "--text", target / "prompts.jsonl", "--out", "grid"]
    assert exit_code_of("bench", name, *needed, "--json", "out.json", "--html", "out.html") == 0
    out = capsys.readouterr().out
    assert out.strip()
    assert max(map(len, out.splitlines())) <= 80
    assert json.loads(Path("out.json").read_text())
    assert Path("out.html").read_text().startswith("<!DOCTYPE html>")
