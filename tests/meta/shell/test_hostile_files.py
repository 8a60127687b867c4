"""Checkpoints, prompts, worlds and case files of a stranger: one line within bounds, whatever they hold or are."""

import json
import os
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from specverify.checkpoints import prompts
from specverify.checkpoints.opening import open_checkpoint
from specverify.cli import main
from specverify.reference import case_json
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.case_json import case_to_json
from specverify.reference.oracle.checkpoint import UnreadableCheckpoint, identify, read_checkpoint
from specverify.reference.sampling import Stops
from specverify.reference.weights import shapes
from specverify.reports import bundle
from specverify.setup.errors import UnusableInput
from tests.models import ONE_LAYER

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
HANGS_S = 100
"""Seconds after which a read that blocks is broken off, so that a defect is a failure and no endless test."""


@pytest.fixture(autouse=True)
def _awake() -> Iterator[None]:
    def raise_timeout(*_: object) -> None:
        raise TimeoutError(f"no answer after {HANGS_S} s")

    before = signal.signal(signal.SIGALRM, raise_timeout)
    signal.alarm(HANGS_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint directory that nobody changes."""
    return write_checkpoint(tmp_path_factory.mktemp("good"))


def write_checkpoint(root: Path) -> Path:
    """`root` with a good checkpoint in it, in one file."""
    (root / "config.json").write_text(json.dumps(CONFIG))
    save_file(
        {name: torch.full(shape, len(name) / 8) for name, shape in shapes(ONE_LAYER).items()},
        root / "model.safetensors",
    )
    return root


def write_sharded(root: Path) -> Path:
    """`root` with a good checkpoint in it, in an index and one shard."""
    write_checkpoint(root)
    (root / "model.safetensors").rename(root / "a.safetensors")
    index = {"weight_map": dict.fromkeys(shapes(ONE_LAYER), "a.safetensors")}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    return root


def refusal_line(root: Path) -> str:
    """The one line with which a checkpoint is refused, the same for every way of opening it that refuses it."""
    lines = set()
    for use in (read_checkpoint, identify):
        with pytest.raises(UnreadableCheckpoint) as caught:
            use(root)
        lines.add(str(caught.value))
    (line,) = lines
    assert "\n" not in line
    assert len(line) < 800
    return line


def complaint(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line, exit code 2, with which a command ends."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    out, err = capfd.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1), err
    assert len(err) < 800
    return err


DEEP = json.loads("[" * 400 + "]" * 400)
VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "an infinite eps": ({"rms_norm_eps": float("inf")}, "field rms_norm_eps is inf, not a number that a model can"),
    "an infinite size": ({"vocab_size": float("inf")}, "field vocab_size is inf, not a number that a model can"),
    "no number": ({"rope_theta": float("nan")}, "field rope_theta is nan, not a number that a model can"),
    "a theta of 400 digits": ({"rope_theta": 10**400}, "field rope_theta is a number of 401 digits"),
    "a size of 400 digits": ({"hidden_size": 10**400}, "field hidden_size is a number of 401 digits"),
    "an infinite factor": (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [float("inf")] * 2, "long_factor": [1, 1]}},
        "short_factor holds a number that no model can have",
    ),
    "a factor of 400 digits": (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1, 1], "long_factor": [10**400, 1]}},
        "long_factor holds a number that no model can have",
    ),
    "an infinite stretch": ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "field factor is inf"),
    "layer types of lists": ({"layer_types": [[]]}, "layer_types must say full_attention or sliding_attention"),
    "layer types of objects": ({"layer_types": [{}]}, "layer_types must say full_attention or sliding_attention"),
    "a rope type of lists": ({"rope_scaling": {"rope_type": DEEP}}, "rope_type is a list of 1 entries"),
    "a deep activation": ({"hidden_act": DEEP}, "not a list of 1 entries; compare"),
    "a long family": ({"model_type": "x" * 10**6}, "does not compute model_type 'xxx"),
    "a long rope": ({"rope_scaling": "y" * 10**6}, "the rope dictionary is 'yyy"),
    "a long rope field": ({"rope_scaling": {"z" * 10**6: 1}}, "rope field 'zzz"),
    "a million layers": ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, more than the 10000 that are"),
    "a huge vocabulary": ({"vocab_size": 2**40}, "field vocab_size is 1099511627776, more than the 16777216"),
    "a huge context": ({"max_position_embeddings": 2**40}, "is 1099511627776, more than the 16777216 that a case"),
    "sixteen megabytes": ({"more": "x" * 2**24}, "larger than the 16 MiB that are read of such a file"),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_config_that_no_model_can_have_is_one_line(name: str, tmp_path: Path) -> None:
    changed, words = VALUES[name]
    root = write_checkpoint(tmp_path)
    # JSON knows no infinity: 1e400 is how a file says it.
    text = json.dumps({**CONFIG, **changed}).replace("Infinity", "1e400")
    (root / "config.json").write_text(text)
    assert words in refusal_line(root)


def write_header(root: Path, header: Any) -> Path:
    """A checkpoint whose weight file has `header` before no data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (write_checkpoint(root) / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    return root


def entry(**fields: Any) -> dict[str, Any]:
    return {"a\nb" * 99: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0], **fields}}


def write_index(**placed: str) -> Callable[[Path], Path]:
    def damage(root: Path) -> Path:
        (write_sharded(root) / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
        return root

    return damage


WEIGHTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a dtype of lists": (lambda root: write_header(root, entry(dtype=[])), "has dtype [], not BF16"),
    "a long dtype": (lambda root: write_header(root, entry(dtype="x" * 10**6)), "has dtype xxx"),
    "a thousand axes": (lambda root: write_header(root, entry(shape=[1] * 1000)), "header entry for a?ba?b"),
    "a size of 4000 digits": (
        lambda root: write_header(root, entry(shape=[10**4000, 10**4000])),
        "header entry for a?ba?b",
    ),
    "a size of 5000 digits": (
        lambda root: write_header(root, b'{"a": ' + b"9" * 5000 + b"}"),
        "its header is not JSON",
    ),
    "20,000 shards": (
        write_index(**{str(number): str(number) for number in range(20_000)}),
        "20000 tensors in 20000 files; at most 1000000 in 10000 are read",
    ),
    "half a letter": (write_index(a="\ud800"), "shard ? is missing; download it"),
    "a name with an end": (write_index(a="a\0b"), "shard a?b is missing; download it"),
    "a long name": (write_index(a="x" * 5000), "xxx… is missing; download it"),
    "an adapter": (
        lambda root: (write_checkpoint(root) / "adapter_config.json").write_text(
            '{"base_model_name_or_path": "org/name"}'
        ),
        "adapter_config.json: asks for an adapter and for the weights of another model",
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_that_no_file_can_hold_are_one_line(name: str, tmp_path: Path) -> None:
    damage, words = WEIGHTS[name]
    damage(tmp_path)
    assert words in refusal_line(tmp_path)


FILES = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "a.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "additional_chat_templates/a.jinja",
)


@pytest.mark.parametrize("name", FILES)
def test_a_fifo_in_place_of_a_file_of_a_checkpoint_is_one_line(name: str, tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path) if name == "model.safetensors" else write_sharded(tmp_path)
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).unlink(missing_ok=True)
    os.mkfifo(root / name)
    line = refusal_line(root)
    assert f"{root / name}: it is a FIFO, not a regular file" in line
    with pytest.raises(UnreadableCheckpoint, match="it is a FIFO"):
        identify(root, understood=False)


def test_other_files_that_would_block_or_never_end_are_one_line(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    os.mkfifo("pipe.jsonl")
    for pipe in ("pipe", "pipe.jsonl"):
        assert f"cannot read {pipe}: it is a FIFO, not" in complaint(capfd, "replay", pipe)
        assert f"--world {pipe}: it is a FIFO, not" in complaint(capfd, "law", "chain", "--world", pipe)
    for source, words in (("pipe", "a FIFO"), ("pipe.jsonl", "a FIFO"), ("/dev/zero", "a device")):
        with pytest.raises(UnusableInput, match=f"--prompts {source}: it is {words}, not a regular file"):
            prompts.read_prompts(source)
    for command in (["replay", "/dev/zero"], ["law", "chain", "--world", "/dev/zero"]):
        assert "it is a device, not a regular file" in complaint(capfd, *command)
    Path("large").write_bytes(b"a" * (2**21 + 1))
    monkeypatch.setattr(bundle, "LARGEST", 2**20)
    assert "larger than the 1 MiB" in complaint(capfd, "replay", "large")
    monkeypatch.setattr(prompts, "LARGEST_PROMPTS", 2**21)
    with pytest.raises(UnusableInput, match="larger than the 2 MiB"):
        prompts.read_prompts("large")


@pytest.mark.parametrize("model", ["/" + "x" * 5000, "x" * 5000, "./a\0b"])
def test_a_model_with_a_name_that_no_file_can_have_is_one_line(model: str) -> None:
    with pytest.raises(UnusableInput, match="no such directory; give the path of a Hugging Face checkpoint directory"):
        open_checkpoint(model)


def test_a_long_list_is_looked_through_once_and_a_too_long_one_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The validator alone takes 40 microseconds for an entry: 40 seconds for the longest prompt."""
    case = case_to_json(Case(Seeded(ONE_LAYER, 1), (3, 5), stops=Stops(1)))
    file = tmp_path / "b.json"
    lists: list[object] = []
    descend = case_json.Validator.descend

    def count_descents(self: object, *arguments: Any, **named: Any) -> Any:
        lists.append(arguments[0])
        return descend(self, *arguments, **named)

    monkeypatch.setattr(case_json.Validator, "descend", count_descents)
    for prompt, words in (
        ([0] * 5000, "needs up to 5001 positions"),
        ([0] * (2**20 + 1), "prompt: 1048577 entries; at most 1048576 may stand here"),
        ([0] * 1000 + [-1, 0.5, "x"] * 1000, r"prompt\[1000\]: -1 is less than the minimum"),
        ([0, True, *[0] * 5000], r"prompt\[1\]: True is not of type 'integer'"),
    ):
        file.write_text(json.dumps({**case, "prompt": prompt}))
        with pytest.raises(bundle.Unreadable, match=words):
            bundle.load(file)
    assert len(lists) < 1000


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.sampled_from([10**400, -(10**400), 2**63, 10**6, float("inf"), float("nan"), -0.0, 1e308, 5e-324])
    | st.sampled_from(
        ["", "llama", "qwen3", "mistral", "yarn", "longrope", "sliding_attention", "silu", "\ud800", "a\0b"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rope_type", "factor", "a"]), inner),
    max_leaves=6,
)
FIELDS = (
    *CONFIG, "head_dim", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "hidden_act",
    "tie_word_embeddings", "attention_bias", "mlp_bias", "bias", "rope_theta", "rope_scaling", "rope_parameters",
    "partial_rotary_factor", "original_max_position_embeddings", "quantization_config",
)  # fmt: skip
ROPE = st.dictionaries(
    st.sampled_from(["rope_type", "factor", "short_factor", "long_factor", "beta_fast", "attention_factor", "truncate",
                     "original_max_position_embeddings", "rope_theta", "low_freq_factor", "high_freq_factor"]),
    JSON | st.sampled_from(["yarn", "llama3", "longrope", "linear", "dynamic"]),
)  # fmt: skip


def one_line(use: Callable[[], object]) -> None:
    """Call `use`, which may refuse its file in one line and do nothing else wrong."""
    try:
        use()
    except (UnreadableCheckpoint, bundle.Unreadable) as why:
        line = str(why)
        assert ("\n" not in line, len(line) < 800) == (True, True), line


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=3), ROPE | st.none())
def test_a_config_of_any_values_is_read_or_refused(good: Path, changed: dict[str, Any], rope: Any) -> None:
    content = {**CONFIG, **({} if rope is None else {"rope_scaling": rope}), **changed}
    (good / "config.json").write_text(json.dumps(content))
    for understood in (True, False):
        one_line(lambda understood=understood: identify(good, understood))  # type: ignore[misc]


@given(st.dictionaries(st.sampled_from(sorted(shapes(ONE_LAYER))), JSON | st.fixed_dictionaries(
    {"dtype": JSON | st.just("F32"), "shape": st.lists(JSON, max_size=9), "data_offsets": st.lists(JSON, max_size=3)}
), min_size=1), st.binary(max_size=9))  # fmt: skip
def test_a_header_of_any_values_is_read_or_refused(good: Path, header: dict[str, Any], data: bytes) -> None:
    raw = json.dumps(header).encode()
    (good / "config.json").write_text(json.dumps(CONFIG))
    (good / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    for understood in (True, False):
        one_line(lambda understood=understood: identify(good, understood))  # type: ignore[misc]


@given(st.data())
def test_a_case_file_of_any_values_is_read_or_refused(good: Path, data: st.DataObject) -> None:
    content: Any = json.loads(json.dumps(case_to_json(Case(Seeded(ONE_LAYER, 1), (3, 5), stops=Stops(1)))))
    content = {"bundle": 1, "case": content, "backend": "cpu-eager", "model": None}
    holder = content
    while True:
        key = data.draw(st.sampled_from(sorted(holder)))
        if not isinstance(holder[key], dict) or not holder[key] or data.draw(st.integers(0, 9)) == 0:
            break
        holder = holder[key]
    holder[key] = data.draw(JSON)
    file = good / "b.json"
    file.write_text(json.dumps(content))
    one_line(lambda: bundle.load(file))
