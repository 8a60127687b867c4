"""Every bad input: one line that says what is wrong, where, and what to do; the right exit code; nothing touched."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from specverify.cli import main
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.case_json import case_to_json
from specverify.reference.draft import LanguageModel
from specverify.reference.oracle.checkpoint import identify
from specverify.reference.sampling import Stops
from specverify.reference.tree import RankTree
from specverify.reference.weights import shapes
from tests.inprocess import in_this_process
from tests.models import ONE_LAYER

ROOT = Path(__file__).resolve().parents[3]
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
EARLIER = '{"id": "earlier", "outcome": "agree"}\n{"id": "cut o'
"""The results of an earlier run, killed while it wrote; a run that fails leaves every byte of them."""


def checkpoint(root: Path) -> Path:
    """A good checkpoint directory whose tokenizer knows the words a to j."""
    root.mkdir()
    (root / "config.json").write_text(json.dumps(CONFIG))
    state = {name: torch.full(shape, len(name) / 8) for name, shape in shapes(ONE_LAYER).items()}
    save_file(state, root / "model.safetensors")
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate([*"abcdefghij?", "zebra"])}, unk_token="?")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(root / "tokenizer.json"))
    (root / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return root


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own to work in, workers in this process, and an earlier result that must survive."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    in_this_process(monkeypatch)
    (tmp_path / ".specverify").mkdir()
    earlier = tmp_path / ".specverify" / "results.jsonl"
    earlier.write_text(EARLIER)
    yield tmp_path
    assert earlier.read_text() == EARLIER
    assert [file.name for file in earlier.parent.iterdir()] == ["results.jsonl"]


def complaint(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit code and the one line that a command ends with."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    out, err = capfd.readouterr()
    assert out == ""
    assert re.fullmatch(r"specverify: [^\n]+\n", err), err
    assert "Traceback" not in err
    assert "internal error" not in err
    assert len(err) < 800
    assert isinstance(ended.value.code, int)
    return ended.value.code, err


def test_a_module_without_its_factory_and_a_misspelt_name_are_recognised(
    work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = work / "my_engine.py"
    engine.write_text(
        "from specverify.adapt import blackbox\nraise SystemExit('it is not run')\nopen_ = blackbox(str)\n"
    )
    for name in ("my_engine", "my_engine.py"):
        code, err = complaint(capfd, "diff", "--backend", name)
        assert code == 2
        assert "my_engine.py is here and has open_; did you mean my_engine:open_?" in err
    engine.write_text("def open_small():\n    pass\n\n\ndef open_(size):\n    pass\n")
    assert "did you mean my_engine:open_small?" in complaint(capfd, "diff", "--backend", "my_engine")[1]
    engine.write_text("def broken(:\n")
    assert "no backend is called 'my_engine': `specverify" in complaint(capfd, "diff", "--backend", "my_engine")[1]
    assert "did you mean cpu-eager" in complaint(capfd, "diff", "--backend", "cpu_eager")[1]
    for name in ("..", "a/b"):
        assert complaint(capfd, "diff", "--backend", name)[0] == 2


USAGE = {
    "no command": (["nope"], "No such command 'nope'"),
    "option": (["diff", "--nope"], "No such option"),
    "no value": (["diff", "--json"], "'--json' requires an argument"),
    "no cases": (["diff", "--cases", "0"], "'--cases': 0 is not in the range"),
    "cases": (["diff", "--cases", "many"], "'--cases': 'many' is not a valid integer"),
    "time": (["diff", "--time-budget", "-1"], "'--time-budget': -1"),
    "dtype": (["diff", "--dtype", "int8"], "'--dtype': 'int8' is not one of 'float64'"),
    "subject": (["list", "nope"], "'nope' is not one of 'backends'"),
    "no file": (["replay"], "Missing argument 'FILE'"),
    "prompts alone": (["diff", "--prompts", "x.txt"], "--prompts needs --model"),
    "device": (["diff", "--backend", "cpu-eager", "--device", "cuda"], "--device cuda contradicts --backend cpu-eager"),
    "backend": (
        ["diff", "--backend", "nope"],
        "no backend is called 'nope': `specverify list backends` names those that there are; others are openai:URL,",
    ),
    "backend to bench": (["bench", "--backend", "nope"], "no backend is called 'nope'"),
    "against": (["diff", "--against", "nope"], "no backend is called 'nope'"),
    "against itself": (["diff", "--model", "x", "--against", "cpu-eager"], "--against cpu-eager is the backend itself"),
    "invariant": (["diff", "--invariant", "cache.*", "--invariant", "cash.*"], "no invariant matches 'cash.*': `spec"),
    "fault": (["diff", "--fault", "nope"], "no fault is called 'nope'; `specverify list faults`"),
    "built-in model": (["diff", "--model", "builtin:nope"], "--model builtin:nope: no such built-in checkpoint (known"),
}


@pytest.mark.parametrize("name", USAGE)
def test_wrong_usage_is_exit_code_2(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    arguments, words = USAGE[name]
    code, line = complaint(capfd, *arguments)
    assert words in line
    assert code == 2


def test_no_command_at_all_prints_the_help(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "\nCommands:\n" in capfd.readouterr().err


STRANGERS = {
    "gone": ("gone.module:make", "cannot import 'gone.module' (No module named 'gone')"),
    "no module": (":make", "importing '' raised ValueError"),
    "relative": (".stranger:make", "importing '.stranger' raised TypeError"),
    "broken": ("broken:make", "importing 'broken' raised SyntaxError"),
    "leaves": ("leaves:make", "importing 'leaves' raised SystemExit: 0"),
    "no factory": ("stranger:nope", "'stranger' has no factory called 'nope'"),
    "no function": ("stranger:number", "'stranger' has no factory called 'number'"),
    "raises": ("stranger:raises", "'raises' raised RuntimeError: no license on two lines"),
    "exits": ("stranger:exits", "'exits' raised SystemExit: 0"),
    "needs": ("stranger:needs", "'needs' raised TypeError"),
    "junk": ("stranger:junk", "what 'junk' returns has no run() and declaration"),
    "half": ("stranger:Half", "what 'Half' returns has no run() and declaration"),
}


@pytest.mark.parametrize("command", ["diff", "bench"])
@pytest.mark.parametrize("name", STRANGERS)
def test_a_strangers_engine_that_cannot_be_opened(
    name: str, command: str, work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (work / "broken.py").write_text("def make(:\n")
    (work / "leaves.py").write_text("raise SystemExit(0)\n")
    (work / "stranger.py").write_text(
        "number = 3\n"
        "def raises(): raise RuntimeError('no license\\non two lines')\n"
        "def exits(): raise SystemExit(0)\n"
        "def needs(x): return x\n"
        "def junk(): return 5\n"
        "class Half:\n    declaration = 'mine'\n    def run(self, case): return case\n"
    )
    backend, words = STRANGERS[name]
    code, line = complaint(capfd, command, "--backend", backend, *(["--jobs", "2"] if command == "diff" else []))
    assert f"backend {backend!r}: {words}" in line
    assert code == 2


def test_a_device_that_is_not_here_is_exit_code_3(capfd: pytest.CaptureFixture[str]) -> None:
    code, line = complaint(capfd, "diff", "--device", "npu")
    assert ("npu" in line, code) == (True, 3)
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    for arguments in (
        ["diff", "--backend", "cuda-eager"],
        ["diff", "--device", "cuda"],
        ["bench", "--backend", "cuda-eager"],
    ):
        code, line = complaint(capfd, *arguments)
        assert "cuda-eager needs an NVIDIA device: " in line
        assert code == 3


def cut_file(name: str) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        raw = (root / name).read_bytes()
        (root / name).write_bytes(raw[: len(raw) // 2])

    return damage


def overwrite(name: str, content: bytes) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        (root / name).write_bytes(content)

    return damage


def pickle_weights(root: Path) -> None:
    (root / "model.safetensors").rename(root / "pytorch_model.bin")


def unsupported(root: Path) -> None:
    (root / "config.json").write_text(json.dumps({**CONFIG, "model_type": "mamba"}))


CHECKPOINTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda root: (root / "config.json").unlink(), "config.json is missing; point to"),
    "cut config": (cut_file("config.json"), "config.json: not JSON; download"),
    "list config": (overwrite("config.json", b"[]"), "config.json: holds no JSON object"),
    "cut weights": (cut_file("model.safetensors"), "model.safetensors: truncated or corrupt"),
    "empty weights": (overwrite("model.safetensors", b""), "model.safetensors: truncated or corrupt"),
    "no weights": (lambda root: (root / "model.safetensors").unlink(), "model.safetensors is missing; download"),
    "pickle": (
        pickle_weights,
        "weights only as pickle (pytorch_model.bin); pickle is never loaded; convert to safetensors",
    ),
    "architecture": (unsupported, "does not compute model_type 'mamba', since its layers have a recurrent state"),
    "tokenizer": (overwrite("tokenizer.json", b'{"version": "1.0", "mod'), "no tokenizer to read the prompts with"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_that_cannot_be_read(name: str, work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    damage, words = CHECKPOINTS[name]
    root = checkpoint(work / "model")
    damage(root)
    (work / "prompts.txt").write_text("a b\n")
    code, line = complaint(capfd, "diff", "--model", str(root), "--prompts", "prompts.txt")
    assert words in line
    assert str(root) in line
    assert code == 2
    if name == "architecture":
        assert "--against transformers" in line


def test_a_checkpoint_that_is_not_there(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (work / "file").write_text("")
    for model, words in ((str(work / "gone"), "gone: no such directory"), ("./file", "file: not a directory")):
        code, line = complaint(capfd, "diff", "--model", model)
        assert words in line
        assert code == 2


PROMPTS: dict[str, tuple[bytes | None, str]] = {
    "gone.txt": (None, "--prompts gone.txt: No such file or directory"),
    "folder": (None, "--prompts folder: Is a directory"),
    "empty.txt": (b"", "--prompts empty.txt: holds no prompt"),
    "blank.txt": (b" \n\n", "--prompts blank.txt: holds no prompt"),
    "empty.json": (b"", "--prompts empty.json: holds no prompt"),
    "latin.txt": ("a é\n".encode("latin-1"), "--prompts latin.txt: not UTF-8 at byte 2"),
    "cut.jsonl": (b'{"prompt": "a"}\n{"prompt": "b', "--prompts cut.jsonl:2: not JSON"),
    "number.jsonl": (b'"a"\n\n3\n', "--prompts number.jsonl:3: neither a string nor an object"),
    "field.jsonl": (b'{"text": "a"}\n', "--prompts field.jsonl:1: neither a string nor an object"),
    "object.json": (b'{"prompt": "a"}', "--prompts object.json: a .json file holds a list"),
    "deep.json": (b"[" * 100_000, "--prompts deep.json: not JSON"),
    "long.txt": (b"a " * 60, "prompt 1 (60 tokens, 2 to come)"),
    "beyond.txt": (b"a\na zebra\n", "prompt 2: token 11 is beyond the 11 of "),
    "half.jsonl": (b'"\\ud800"', "--prompts half.jsonl:1: holds half a character"),
    "digits.jsonl": (b"\n" + b"9" * 5000, "--prompts digits.jsonl:2: not JSON"),
    "builtin:nope": (None, "--prompts builtin:nope: no such built-in prompts (known: builtin:humaneval)"),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_that_cannot_be_used(name: str, work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    content, words = PROMPTS[name]
    (work / "folder").mkdir()
    if content is not None:
        (work / name).write_bytes(content)
    code, line = complaint(
        capfd, "diff", "--model", str(checkpoint(work / "model")), "--prompts", name, "--new-tokens", "2"
    )
    assert words in line
    assert code == 2


def test_more_tokens_than_the_model_has_room_for(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    root = checkpoint(work / "model")
    code, line = complaint(capfd, "diff", "--model", str(root), "--new-tokens", "70")
    assert re.search(r"prompt 1 \(\d+ tokens, 70 to come\): .*the model admits 64; shorten it or lower --new-tok", line)
    assert code == 2


def test_what_a_command_cannot_write_is_said_before_any_case_runs(
    work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (work / "file").write_text("mine")
    (work / "folder").mkdir()
    (work / "case.json").write_text(json.dumps(case_to_json(Case(Seeded(ONE_LAYER, 1), (3, 5)))))
    for arguments, words in (
        (["diff", "--report", "file"], "cannot write file: File exists; choose another place"),
        (["diff", "--report", "file/below"], "cannot write file/below: Not a directory"),
        (["diff", "--json", "folder"], "cannot write folder: it is a directory; give the name of a file"),
        (["diff", "--json", "gone/x.json"], "cannot write gone/x.json: No such file or directory; create the folder"),
        (["diff", "--junit", "file/x.xml"], "cannot write file/x.xml: Not a directory; choose another place"),
        (["diff", "--junit", "a\0b"], "null"),
        (["bench", "--json", "folder"], "cannot write folder: "),
        (["replay", "case.json", "--json", "folder"], "cannot write folder: "),
    ):
        code, line = complaint(capfd, *arguments)
        assert words in line
        assert code == 2
    assert (work / "file").read_text() == "mine"


def good(work: Path) -> dict[str, Any]:
    """A case on a checkpoint, and with a draft on it."""
    here = identify(checkpoint(work / "model"))
    draft = LanguageModel(here, RankTree((0, 0), (0, 0)))
    return case_to_json(Case(here, (3, 5), draft, stops=Stops(2)))


def test_a_case_file_that_cannot_be_read(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    case = good(work)
    texts = {
        "[1, 2]": "a case is a JSON object, not list",
        '{"a": 1': "ends too early, cut off?",
        json.dumps({**case, "schema": 2}): "schema: version 2 is newer than the 1 known here: update specverify",
        json.dumps({"bundle": 2, "case": case}): "bundle: version 2 is newer than the 1 known here: update specverify",
        json.dumps({**case, "extra": 1}): "'extra' was unexpected",
        json.dumps({"bundle": 1, "case": case, "extra": 1}): "extra: no field of a bundle",
        json.dumps({**case, "steps": 2.0}): "steps: 2.0 is not of type 'integer'",
        json.dumps({**case, "schema": 1.0}): "schema: 1.0 is not of type 'integer'",
        json.dumps({**case, "prompt": [3, 99]}): "prompt[1]: 99 is not in the vocabulary of 11",
        json.dumps({**case, "steps": 1}): "id: ",
    }
    for text, words in texts.items():
        (work / "b.json").write_text(text)
        code, line = complaint(capfd, "replay", "b.json")
        assert "cannot read b.json: " in line
        assert words in line
        assert code == 2
    for file, words in (("gone.json", "no such file"), ("model", "a directory")):
        code, line = complaint(capfd, "replay", file)
        assert f"cannot read {file}: {words}" in line
        assert code == 2


def test_a_case_on_weights_that_are_not_here(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    case = good(work)
    root, other_folder = work / "model", work / "other"
    (work / "b.json").write_text(json.dumps(case))
    with pytest.raises(SystemExit) as ended:
        main(["replay", "b.json", "--model", str(root)])
    assert ended.value.code == 0
    assert capfd.readouterr().out.startswith("AGREE")
    # A copy of the weights serves target and draft, wherever they lay; other weights serve neither.
    checkpoint(work / "copy")
    root.rename(work / "gone")
    with pytest.raises(SystemExit) as ended:
        main(["replay", "b.json", "--model", str(work / "copy")])
    assert ended.value.code == 0
    assert capfd.readouterr().out.startswith("AGREE")
    checkpoint(other_folder)
    (other_folder / "config.json").write_text(json.dumps({**CONFIG, "rms_norm_eps": 1e-6}))
    code, line = complaint(capfd, "replay", "b.json", "--model", str(other_folder))
    assert f"{other_folder}: other weights (sha256:" in line
    assert code == 2
    code, line = complaint(capfd, "replay", "b.json", "--model", str(root))
    assert f"{root}: no such directory" in line
    assert code == 2


def test_a_replay_on_what_is_not_here(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (work / "b.json").write_text(json.dumps(case_to_json(Case(Seeded(ONE_LAYER, 1), (3, 5), stops=Stops(1)))))
    for arguments, words in (
        (["--backend", "nope"], "no backend is called 'nope'"),
        (["--backend", "gone:make"], "cannot import 'gone'"),
        (["--fault", "nope"], "no fault is called 'nope'"),
    ):
        code, line = complaint(capfd, "replay", "b.json", *arguments)
        assert words in line
        assert code == 2
    if not torch.cuda.is_available():
        code, line = complaint(capfd, "replay", "b.json", "--backend", "cuda-eager")
        assert code == 3


@pytest.mark.slow
def test_real_workers_complain_in_one_line_too(work: Path) -> None:
    (work / "stranger.py").write_text("def make(): raise RuntimeError('no license\\non two lines')\n")
    command = [sys.executable, "-m", "specverify", "diff", "--backend", "stranger:make", "--jobs", "1"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{work}"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    where = "(stranger.py:1); expected a function without arguments that returns a backend, such as open_ ="
    message = "specverify: backend 'stranger:make': 'make' raised RuntimeError: no license on two lines"
    assert ended.stderr == f"{message} {where} blackbox(generate)\n"
    assert (ended.returncode, ended.stdout) == (2, "")
