"""A replay opens no path and asks no hub because a file says so: each checkpoint is named on the command line."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from specverify.backends.base import Unsupported
from specverify.backends.engine.model.models import ModelCache
from specverify.cli import main
from specverify.properties.tally import Failure
from specverify.properties.verdict.finding import Finding, Verdict
from specverify.reference.architecture import Architecture, Checkpoint, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.oracle.checkpoint import identify
from specverify.reference.sampling import Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Stage
from specverify.reference.tree import RankTree
from specverify.reference.weights import shapes
from specverify.reports import bundle
from tests.inprocess import in_this_process

ARCH = Architecture("llama", 11, 8, 12, 2, 1, 4, (0,), max_positions=128)
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
SHAPE = RankTree((0, 0), (0, 0))


def checkpoint(root: Path, seed: int = 1, **config: Any) -> Checkpoint:
    """A good checkpoint in `root`, whose weights are those of `seed`."""
    root.mkdir()
    (root / "config.json").write_text(json.dumps({**CONFIG, **config}))
    draw = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(shape, generator=draw) for name, shape in shapes(ARCH).items()}
    save_file(state, root / "model.safetensors", metadata={"format": "pt"})
    return identify(root)


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, workers in this process, and a hub that must not be asked."""

    def refuse_download(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.chdir(tmp_path)
    in_this_process(monkeypatch)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse_download)
    return tmp_path


def failure(case: Case, model: str | None) -> Failure:
    """`case`, said to have failed, as `diff --model` saves it."""
    finding = Finding("lossless.greedy-match", Stage.EMITTED, 0, {"position": 0}, 1, 2)
    verdict = Verdict(case, "cpu-eager", {finding.invariant: "failed"}, (finding,))
    return Failure(verdict, finding, case.id, backend="cpu-eager", model=model)


def save_bundle(case: Case, model: str | None = None) -> str:
    """The file of such a bundle."""
    return str(bundle.save(".", failure(case, model), {}))


def run_replay(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and what was printed, on either stream."""
    with pytest.raises(SystemExit) as ended:
        main(["replay", *arguments])
    assert isinstance(ended.value.code, int)
    out, err = capfd.readouterr()
    return ended.value.code, out + err


@pytest.mark.parametrize("model", ["org/name", "/etc", "here", None])
def test_the_model_of_a_file_is_opened_only_if_the_user_names_it(
    model: str | None, work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    here = checkpoint(work / "here")
    file = save_bundle(Case(replace(here, source="org/other"), (3, 5), stops=Stops(2)), model)
    code, line = run_replay(capfd, file)
    assert line == (
        f"specverify: {file}: runs the checkpoint {model or 'org/other'} ({here.digest[:19]}...), and a name in a file "
        f"opens nothing: add --model {model or 'org/other'}, or the folder where these weights lie\n"
    )
    assert code == 2
    code, words = run_replay(capfd, file, "--model", "here")
    assert (code, words.split()[0]) == (0, "FIXED")


def of_mate(draft: LanguageModel, case: Case) -> Case:
    mates = (Mate((4, 2), draft, stops=Stops(2)),)
    return replace(case, session=Session(mates, (Action("add", (0,)), Action("add", (1,)), Action("step", (0, 1)))))


def of_switch(draft: LanguageModel, case: Case) -> Case:
    actions = (Action("add", (0,)), Action("switch", (0,), draft), Action("step", (0,)))
    return replace(case, session=Session((), actions))


def of_draft(draft: LanguageModel, case: Case) -> Case:
    return replace(case, draft=draft)


@pytest.mark.parametrize("place", [of_draft, of_mate, of_switch])
@pytest.mark.parametrize("target", ["built-in", "checkpoint"])
def test_so_is_the_model_of_a_draft_wherever_it_stands(
    place: Any, target: str, work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other_model = checkpoint(work / "other", 2)
    model = Seeded(ARCH, 1) if target == "built-in" else checkpoint(work / "here")
    named = [] if target == "built-in" else ["--model", "here"]
    case = place(LanguageModel(other_model, SHAPE), Case(model, (3, 5), Scripted(), stops=Stops(2)))
    file = save_bundle(case)
    code, line = run_replay(capfd, file, *named)
    assert line.endswith(
        "a name in a file opens nothing: add --model other, or the folder where these weights lie\n".replace(
            "other", shlex.quote(other_model.source)
        )
    )
    assert code == 2
    (work / "other").rename(work / "moved")
    code, words = run_replay(capfd, file, *named, "--model", "moved")
    assert (code, words.split()[0]) == (0, "FIXED"), words


def test_the_printed_command_names_every_checkpoint(work: Path) -> None:
    here, other_model = checkpoint(work / "here"), checkpoint(work / "other", 2)
    case = Case(here, (3, 5), LanguageModel(other_model, SHAPE), stops=Stops(2))
    command = bundle.replay_command(replace(failure(case, "org/name"), file="b.json"))
    assert command == f"specverify replay b.json --backend cpu-eager --model org/name --model {work / 'other'}"
    drafted = Case(Seeded(ARCH, 1), (3, 5), LanguageModel(other_model, SHAPE), stops=Stops(2))
    command = bundle.replay_command(replace(failure(drafted, None), file="b.json"))
    assert command == f"specverify replay b.json --backend cpu-eager --model {work / 'other'}"


def test_a_failure_found_on_a_checkpoint_is_replayed_by_the_printed_command(
    work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint(work / "here")
    command = ["diff", "--model", "here", "--cases", "1", "--new-tokens", "8", "--temperature", "1.5"]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--invariant", "cache.*", "--fault", "kv-truncated-not-gathered", "--json", "found.json"])
    assert ended.value.code == 1
    (finding,) = json.loads(Path("found.json").read_text())["findings"]
    program, subcommand, *arguments = shlex.split(finding["replay"])
    assert (program, subcommand) == ("specverify", "replay")
    capfd.readouterr()
    code, words = run_replay(capfd, *arguments)
    assert (code, words.splitlines()[-1].split()[0]) == (1, "FAILED")


def test_a_config_fetches_no_attention_kernel(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import modeling_utils

    def refuse_fetch(*_: object, **__: object) -> None:
        raise AssertionError("a kernel was fetched")

    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", refuse_fetch)
    here = checkpoint(work / "here", attn_implementation="kernels-community/flash-attn")
    assert ModelCache("cpu").open(here, "float32").model.config._attn_implementation == "specverify"


def test_a_config_that_transformers_refuses_is_declined(work: Path) -> None:
    here = checkpoint(work / "here")
    for field, value in (("hidden_size", "x"), ("torch_dtype", []), ("model_type", "llama4_text")):
        (work / "here" / "config.json").write_text(json.dumps({**CONFIG, field: value}))
        with pytest.raises(Unsupported, match=r"transformers (refuses|cannot open) "):
            ModelCache("cpu").open(here, "float32")
