"""Case files mutated as a disk, an editor or a stranger would: `replay` answers each with a verdict or one line."""

import json
import random
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, seed
from safetensors.torch import save_file

from specverify.checkpoints import opening
from specverify.cli import main
from specverify.properties.strategies import cases
from specverify.properties.strategies.settings import drawing_settings
from specverify.properties.tally import Failure
from specverify.properties.verdict.finding import Finding, Verdict
from specverify.reference.architecture import ROPE_KINDS, Architecture, Checkpoint, Rope, Seeded
from specverify.reference.case import DTYPES, Case
from specverify.reference.case_json import case_to_json
from specverify.reference.draft import LanguageModel, Ngram, Scripted
from specverify.reference.family import FAMILIES
from specverify.reference.layout import COMMITS
from specverify.reference.oracle.checkpoint import identify
from specverify.reference.sampling import Stops
from specverify.reference.trace import Stage
from specverify.reference.tree import RankTree, Tree
from specverify.reference.weights import shapes
from specverify.reports.bundle import bundle_content
from tests.models import ONE_LAYER
from tests.tiers import each

KINDS = ("scripted", "ngram", "model", "checkpoint")
EACH = 18
"""Mutated files of each kind."""

SLOWEST_S = 120.0
"""Seconds one replay may take, on a machine that others use too."""

CONFIG = {
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

WORDS = (
    *FAMILIES,
    *ROPE_KINDS,
    *DTYPES,
    *COMMITS,
    "transparent",
    "ngram",
    "model",
    "checkpoint",
    "cpu-eager",
    "emitted",
)

ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 7, 64, 65, 4096, 65536, 2**22, 2**24, 2**31 - 1, 2**31, -(2**70),
    0.0, 0.5, -0.5, 2.0, 1e-300, 1e8, 1e300, -1e300, "", "x", "é\n", "\ud800", "\x00", "os:getcwd", "org/name",
    "sha256:" + "0" * 64, [], [0], [0, 0], [[]], {}, {"kind": "scripted", "trees": []}, {"kind": "x"},
)  # fmt: skip


def draw_cases() -> list[Case]:
    """A few small cases of each kind of draft, as `diff` draws them: draws of one seed resemble each other."""
    small_cases: list[Case] = []

    @drawing_settings(25)
    @given(cases())
    def draw(case: Case) -> None:
        nodes = sum(map(len, case.draft.shapes))
        assert isinstance(case.model, Seeded)
        if len(case.prompt) < 16 and nodes < 10 and case.model.architecture.layers < 3:
            small_cases.append(case)

    for number in range(40):
        seed(number)(draw)()
        kinds = Counter(type(case.draft) for case in small_cases)
        if min(kinds[kind] for kind in (Scripted, Ngram, LanguageModel)) >= 2:
            return small_cases
    raise AssertionError(f"40 seeds drew {kinds}")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Case]]:
    """Cases of each kind, those on a checkpoint included."""
    root = tmp_path_factory.mktemp("checkpoint")
    (root / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(1)
    state = {name: torch.randn(shape, generator=generator) for name, shape in shapes(ONE_LAYER).items()}
    save_file(state, root / "model.safetensors")
    here = identify(root)
    shape = RankTree((0, 0, 0, 1), (0, 0, 1, 0))
    some = draw_cases()
    return {
        "scripted": [case for case in some if isinstance(case.draft, Scripted)],
        "ngram": [case for case in some if isinstance(case.draft, Ngram)],
        "model": [case for case in some if isinstance(case.draft, LanguageModel)],
        "checkpoint": [
            Case(here, (3, 5, 3), Ngram(shape), stops=Stops(6)),
            Case(here, (3, 5, 3), LanguageModel(here, shape), stops=Stops(6), dtype="float64"),
        ],
    }


def saved_content(case: Case, draw: random.Random) -> Any:
    """What a file holds: a bundle, or the bare case."""
    if draw.random() < 0.3:
        return json.loads(json.dumps(case_to_json(case)))
    finding = Finding("lossless.greedy-match", Stage.EMITTED, 0, {"position": 0}, 1, 2)
    verdict = Verdict(case, "cpu-eager", {finding.invariant: "failed"}, (finding,))
    failure = Failure(verdict, finding, case.id, backend="cpu-eager")
    return json.loads(json.dumps(bundle_content(failure, {"python": "3.11"})))


def spots(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside a JSON value."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [spot for key, value in items for spot in [(*path, key), *spots(value, (*path, key))]]


def spot(content: Any, draw: random.Random) -> tuple[Any, ...]:
    """A place to change: every field is as likely as any other, so that long lists do not take all."""
    paths = spots(content)
    named = sorted({tuple(key for key in path if isinstance(key, str)) for path in paths})
    chosen = draw.choice(named)
    return draw.choice([path for path in paths if tuple(key for key in path if isinstance(key, str)) == chosen])


def alike(value: Any, draw: random.Random) -> Any:
    """Another value of the same type: what a reader may take for good."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        near = (value + 1, value - 1, value * 2, -value, value / 2 if isinstance(value, float) else value // 2)
        return draw.choice([*near, *near, *(odd_value for odd_value in ODD if type(odd_value) is type(value))])
    if isinstance(value, str):
        return draw.choice(WORDS)
    return draw.choice([value * 2, value[::-1], value[:-1], value[1:]]) if isinstance(value, list) else value


def change_value(content: Any, draw: random.Random) -> None:
    """Change, remove, rename, retype or nest one value."""
    *path, last = spot(content, draw)
    holder = content
    for key in path:
        holder = holder[key]
    how = draw.choice(["alike"] * 8 + ["retype", "retype", "remove", "rename", "nest"])
    if how == "alike":
        holder[last] = alike(holder[last], draw)
    elif how == "remove":
        del holder[last]
    elif how == "rename" and isinstance(holder, dict):
        holder[f"{last}_"] = holder.pop(last)
    elif how == "nest":
        holder[last] = draw.choice([[holder[last]], {str(last): holder[last]}])
    else:
        holder[last] = draw.choice(ODD)


def redigest(content: Any) -> None:
    """Give an edited case the id that it would have, so that what lies behind the digest is reached."""
    from specverify.reference import case_json

    try:
        content["id"] = case_json.build_case(content).id
    except Exception:
        return


def mutate_file(case: Case, draw: random.Random) -> bytes:
    """A damaged file; one in ten is left whole, so that replays are met whatever the damage does."""
    content = saved_content(case, draw)
    if draw.random() < 0.1:
        return json.dumps(content).encode()
    how = draw.choice(["flip", "cut", "splice", "change", "change", "change", "change", "change", "change"])
    if how == "change":
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            change_value(content, draw)
        inner = content.get("case", content)
        if isinstance(inner, dict) and draw.random() < 0.9:
            redigest(inner)
            if "dtype" in content and "dtype" in inner:
                content["dtype"] = inner["dtype"]
        return json.dumps(content).encode()
    raw = bytearray(json.dumps(content, indent=draw.choice([None, 1])).encode())
    if how == "flip":
        for _ in range(draw.choice([1, 2, 8])):
            raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    elif how == "cut":
        del raw[draw.randrange(len(raw)) :]
    else:
        target_offset, source_offset = draw.randrange(len(raw)), draw.randrange(len(raw))
        raw[target_offset : target_offset + 20] = raw[source_offset : source_offset + 20]
    return bytes(raw)


@pytest.mark.parametrize("kind", each(KINDS, 2))
def test_no_mutated_file_gets_more_than_a_verdict_or_one_line(
    kind: str,
    originals: dict[str, list[Case]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_hub(model: str) -> Path:
        pytest.fail(f"the file asked the hub for {model}")

    monkeypatch.setattr(opening, "_from_hub", no_hub)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "b.json"
    draw = random.Random(f"replays of {kind}")
    model = originals[kind][0].model
    named = ["--model", model.source] if isinstance(model, Checkpoint) else []
    ends: Counter[int] = Counter()
    for number in range(EACH):
        file.write_bytes(mutate_file(draw.choice(originals[kind]), draw))
        began = time.monotonic()
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("default")
                main(["replay", "b.json", *named])
        except SystemExit as ended:
            code = ended.code
        except BaseException as why:
            pytest.fail(f"mutation {number} of {kind}: {type(why).__name__}: {why}\n{file.read_text()[:3000]}")
        out, err = capfd.readouterr()
        message = f"mutation {number} of {kind} gave exit code {code!r}\n{err}\n{file.read_bytes()[:3000]!r}"
        assert time.monotonic() - began < SLOWEST_S, message
        assert isinstance(code, int), message
        assert code in (0, 1, 2, 3), message
        assert err.count("\n") <= 1, message
        assert [str(warning.message) for warning in warned if warning.category is not DeprecationWarning] == [], message
        assert "Traceback" not in err + out, message
        assert (out == "") == (code == 2 or err != ""), message
        ends[code] += 1
    assert ends[2] > EACH // 4
    assert ends[0] + ends[3] > 0


QWEN2 = Architecture("qwen2", 11, 8, 12, 2, 1, 4, (0,), max_positions=64, qkv_bias=True)
PLAIN = replace(ONE_LAYER, max_positions=64)
FAINT = Rope(kind="yarn", factor=4.0, original=16, attention_factor=1e-300)
CHAIN = Scripted((Tree((0, 0, 1), (5, 7, 8)),))

MENDED_MODELS: dict[str, tuple[Seeded, int, str]] = {
    "tensors that transformers' class has not": (Seeded(replace(QWEN2, qkv_bias=False), 1), 3, "UNJUDGED"),
    "a shape that transformers refuses": (Seeded(replace(PLAIN, hidden_size=9), 1), 3, "UNJUDGED"),
    "a vocabulary that is renamed already": (Seeded(PLAIN, 1, relabel=65), 0, "AGREE"),
    "keys of size zero": (Seeded(replace(QWEN2, rope=FAINT), 1), 0, "AGREE"),
}
"""Cases that mutation came upon, each of which once had a wrong end."""


@pytest.mark.parametrize("name", MENDED_MODELS)
def test_what_mutation_found_stays_mended(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, code, word = MENDED_MODELS[name]
    for dtype in ("float32", "float64"):
        file = tmp_path / f"{dtype}.json"
        file.write_text(json.dumps(case_to_json(Case(model, (3, 5), CHAIN, stops=Stops(3), dtype=dtype))))
        with pytest.raises(SystemExit) as ended:
            main(["replay", str(file)])
        out, err = capfd.readouterr()
        assert (out.split()[0], err) == (word, ""), out
        assert ended.value.code == code


def test_a_whole_number_may_stand_for_a_fraction(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    case = case_to_json(Case(Seeded(replace(ONE_LAYER, norm_eps=1.0), 1), (3, 5), stops=Stops(1)))
    case["model"]["architecture"]["norm_eps"] = 1
    case["sampling"]["temperature"] = 0
    (tmp_path / "b.json").write_text(json.dumps(case))
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(tmp_path / "b.json")])
    assert (ended.value.code, capfd.readouterr().out.split()[0]) == (0, "AGREE")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 2**20}, "model.architecture: 16777696 weights; a built-in model has at most 4194304"),
        ({"max_positions": 2**20}, "model.architecture.max_positions: 1048576; a built-in model has at most 4096"),
        ({"norm_eps": 1e300}, "model.architecture.norm_eps: 1e+300 is not above 0 and at most 1"),
        ({"windows": [0] * 65}, "model.architecture.windows: "),
        ({"hidden_size": 2**24, "heads": 2**24, "head_dim": 2**24}, "model.architecture: "),
    ],
)
def test_a_small_file_cannot_ask_for_a_large_machine(
    change: dict[str, Any], words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    case = case_to_json(Case(Seeded(ONE_LAYER, 1), (3, 5), stops=Stops(1)))
    case["model"]["architecture"] |= change
    (tmp_path / "b.json").write_text(json.dumps(case))
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(tmp_path / "b.json")])
    out, err = capfd.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert words in err
