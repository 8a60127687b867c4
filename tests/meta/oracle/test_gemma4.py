"""Gemma 4: layers with heads of their own sizes, keys and values that layers share, inputs of layers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specverify.backends.base import Unsupported
from specverify.backends.compositions import open_cpu
from specverify.backends.engine.kv.base import CacheSpec
from specverify.backends.engine.model.models import ModelCache
from specverify.cli import main
from specverify.properties.invariants import ALL
from specverify.properties.strategies.models import GALLERY
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.family.gemma4 import Gemma4Settings
from specverify.reference.layout import KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.checkpoint import identify
from specverify.reference.oracle.configuration import read_architecture
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.tree import RankTree, Tree
from specverify.setup.subjects import subject_of
from tests.checkpoints import save_checkpoint
from tests.drawn_families import draw_architecture
from tests.inprocess import in_this_process
from tests.meta.oracle.test_rare_families import case_for, far_apart
from tests.published import CONFIGS
from tests.published import save_model as published

DRAWN = [arch for arch in GALLERY if arch.family == "gemma4"]
SHARING, KEYS_AS_VALUES, EQUAL = DRAWN
PROMPT = (1, 2, 3, 4, 9, 8, 7, 1, 0, 6, 3)


def room(arch: Architecture) -> CacheSpec:
    return ModelCache("cpu").open(Seeded(arch, 1), "float32").room(16, 4)


def test_a_cache_holds_each_layer_s_own_heads_and_none_of_a_layer_that_shares() -> None:
    spec = room(SHARING)
    assert [spec.sizes(layer) for layer in range(3)] == [(1, (4, 4)), (1, (8, 8)), (0, (8, 8))]
    assert [spec.source(layer) for layer in range(3)] == [0, 1, 1]
    assert [spec.empty(5, layer)[0].shape for layer in range(3)] == [(1, 5, 4), (1, 5, 8), (0, 5, 8)]
    assert [room(KEYS_AS_VALUES).sizes(layer)[0] for layer in range(2)] == [2, 1]


def test_a_trace_has_room_for_the_widest_layer_and_zeros_behind_others() -> None:
    case = case_for(SHARING)
    for trace in (Oracle()(case), open_cpu().run(case)):
        step = trace.steps[0]
        assert step.attended is not None
        assert step.committed is not None
        kv = step.committed.before
        assert kv is not None
        assert step.attended.output.shape[1:] == (2, len(step.drafted.tree), 8)  # type: ignore[union-attr]
        assert not step.attended.output[0, ..., 4:].any()
        assert step.attended.output[1, ..., 4:].all()
        assert kv.keys.shape == (3, 1, len(case.prompt) - 1, 8)
        assert not kv.keys[0, ..., 4:].any()
        assert not kv.keys[2].any()  # it reads those of layer 1


@pytest.mark.parametrize("kind", ["sliding", "paged", "static"])
def test_the_head_of_an_eagle_3_draft_reads_states_of_layers(kind: str) -> None:
    layout = KvLayout(kind=kind, page_size=4 if kind == "paged" else KvLayout().page_size)
    shape = RankTree((0, 0, 0, 1), (0, 0, 1, 0))
    draft = Eagle3(shape, HiddenStates((0, 1, 2), shift=1), HeadLayer(2, 1, 4, 12))
    case = Case(Seeded(SHARING, 1), PROMPT, draft, layout, stops=Stops(6), dtype="float32")
    verdict = judge(case, ALL, Oracle(), subject_of(open_cpu()))
    assert verdict.findings == ()
    assert verdict.outcomes["draft.fidelity"] == "checked"
    assert verdict.outcomes["draft.hidden-state-descriptor"] == "checked"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"windows": (4, 0, 4)}, "the last layer of gemma4 has no window"),
        ({"settings": Gemma4Settings(shared_layers=2)}, "leave no layer of a kind to read from"),
        ({"settings": Gemma4Settings(full_head_dim=7)}, "7 is odd"),
        ({"settings": Gemma4Settings(full_kv_heads=3)}, "do not share 3 KV heads evenly"),
        ({"settings": Gemma4Settings(wide_blocks=True)}, "wide_blocks are those of shared_layers"),
        ({"qk_norm": False}, "norms queries and keys"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(Malformed, match=line):
        replace(SHARING, **changes)


def test_a_soft_cap_of_attention_is_declined() -> None:
    with pytest.raises(Unsupported, match="gemma4 with a soft cap of attention"):
        open_cpu().run(case_for(replace(SHARING, score_cap=2.0)))


def test_a_published_config_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["gemma-4-31b"]))
    arch = read_architecture(tmp_path / "config.json")
    assert [arch.layer_heads(layer).kv_heads for layer in (0, 5)] == [4, 1]
    assert [arch.layer_heads(layer).head_dim for layer in (0, 5)] == [16, 32]
    assert (arch.rope.kind, arch.rope.share, arch.widest.kv_heads) == ("proportional", 0.25, 4)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["gemma-4-e2b"]))
    assert read_architecture(tmp_path / "config.json").kv_sources == (0, 1, 2, 3, 2, 3, 2)


def test_stored_keys_and_values_of_layers_that_share_are_left(tmp_path: Path) -> None:
    """Published files hold them, and transformers reads past them."""
    from safetensors.torch import load_file, save_file

    folder = save_checkpoint("gemma4", tmp_path)
    file = folder / "model.safetensors"
    state = load_file(file)
    key_tensors = {name: tensor for name, tensor in state.items() if ".0.self_attn.k" in name}
    state |= {name.replace("layers.0.", "layers.2."): 2 * tensor for name, tensor in key_tensors.items()}
    save_file(state, file, metadata={"format": "pt"})
    case = Case(identify(folder), PROMPT, Scripted((Tree((0, 0, 0), (3, 5, 7)),)), stops=Stops(4), dtype="float32")
    assert judge(case, ALL, Oracle(), subject_of(open_cpu())).findings == ()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 30))
def test_further_configurations_say_what_transformers_says(seed: int) -> None:
    from specverify.campaign.against import TransformersOracle

    for chain in (False, True):
        case = case_for(draw_architecture("gemma4", seed), chain=chain)
        assert far_apart(case, Oracle(), TransformersOracle()) < 1e-9
        assert far_apart(case, Oracle(), open_cpu().run) < 1e-9


FAULTS = {
    "gemma-4-e2b": ("shared-layer-queries-behind-update", "layer-input-of-row-before",
                    "layer-inputs-left-out-of-verification", "proportional-rotary-of-turned-part"),
    "gemma-4-31b": ("values-are-turned-keys", "proportional-rotary-of-turned-part"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma-4-e2b", "gemma-4-e4b", "gemma-4-31b"])
def test_diff_agrees_on_a_checkpoint_and_not_on_faults(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    in_this_process(monkeypatch)
    # Odd seeds have weights whose layers add as much as those of a large model.
    folder = published(name, tmp_path, seed=1)
    for fault in (None, *FAULTS.get(name, ())):
        options = [] if fault is None else ["--fault", fault]
        with pytest.raises(SystemExit) as ended:
            main(["diff", "--model", str(folder), "--cases", "6", "--new-tokens", "8", *options])
        assert ended.value.code == (0 if fault is None else 1), (fault, capfd.readouterr())
