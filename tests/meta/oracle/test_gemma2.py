"""Gemma 2 enters through the family wall: three product files, from a checkpoint and drawn, within 1e-9 everywhere."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specverify.backends.base import Unsupported
from specverify.backends.compositions import open_cpu
from specverify.backends.registry import open_backend
from specverify.backends.shipped import ROWS
from specverify.campaign.against import TransformersOracle
from specverify.properties.invariants import ALL
from specverify.properties.strategies.models import GALLERY
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.case_json import case_from_json, case_to_json
from specverify.reference.draft import LanguageModel
from specverify.reference.family import FAMILIES
from specverify.reference.family.gemma2 import Gemma2Settings
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.layout import KINDS, KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.checkpoint import identify
from specverify.reference.oracle.configuration import read_architecture
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.parameters import load
from specverify.reference.sampling import Stops
from specverify.reference.tree import RankTree
from specverify.reference.weights import probe_architecture
from specverify.setup.subjects import subject_of
from tests.checkpoints import save_checkpoint
from tests.meta.engine.test_soft_cap import computed_and_refused
from tests.meta.oracle.test_against_transformers import assert_same_trace, case_of

DRAWN = [arch for arch in GALLERY if arch.family == "gemma2"]
PROMPT = (1, 2, 3, 4, 9, 8, 7, 1, 0, 6, 3)
CONTEXT_EXACT = tuple(invariant for invariant in ALL if invariant.name == "attention.context-exact")

PUBLISHED: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
    "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "initializer_range": 0.02,
    "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8,
    "num_hidden_layers": 26, "num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "float32",
    "use_cache": True, "vocab_size": 256000,
}  # fmt: skip
"""The config.json of google/gemma-2-2b."""


def case_for(arch: Architecture, layout: KvLayout, dtype: str = "float64") -> Case:
    prompt = tuple(token % arch.vocab_size for token in PROMPT)
    draft = LanguageModel(Seeded(arch, 1), RankTree((0, 0, 0, 1, 2, 1), (0, 0, 1, 0, 0, 1)))
    return Case(Seeded(arch, 1), prompt, draft, layout, stops=Stops(5), dtype=dtype)


def reading(folder: Path, **changed: Any) -> Architecture:
    """The architecture of PUBLISHED with some fields changed; those changed to Ellipsis are left out."""
    fields = {name: value for name, value in {**PUBLISHED, **changed}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(fields))
    return read_architecture(folder / "config.json")


def test_it_lies_in_three_product_files() -> None:
    root = Path(__file__).parents[3]
    rooms = ("reference", "backends", "properties", "reports", "specverify")
    engines = root / "backends" / "adapt" / "engines"  # which families the engines of others load is their affair
    wide_heads = root / "properties" / "strategies" / "models.py"  # the sizes that engines of others ask for
    naming = {
        path.relative_to(root).as_posix()
        for room in rooms
        for path in (root / room).rglob("*.py")
        if engines not in path.parents and path != wide_heads
        if path.name == "gemma2.py" or '"gemma2"' in path.read_text()
    }
    assert naming == {
        "reference/family/gemma2.py",
        "reference/oracle/family/gemma2.py",
        "backends/engine/model/family/gemma2.py",
    }


def test_the_published_config_is_read(tmp_path: Path) -> None:
    arch = reading(tmp_path)
    assert arch == Architecture(
        "gemma2", 256000, 2304, 9216, 8, 4, 256, (4096, 0) * 13, norm_eps=1e-6, max_positions=8192, tied=True,
        score_cap=50.0, settings=Gemma2Settings(30.0, 256.0),
    )  # fmt: skip
    names = ("attn_logit_softcapping", "final_logit_softcapping", "head_dim", "query_pre_attn_scalar", "sliding_window")
    assert reading(tmp_path, **dict.fromkeys(names, ...)) == arch  # the defaults of transformers
    bare = reading(tmp_path, attn_logit_softcapping=None, final_logit_softcapping=None, tie_word_embeddings=False)
    assert (bare.score_cap, Gemma2Settings.of(bare).logit_cap, bare.tied) == (0.0, 0.0, False)
    named = reading(tmp_path, num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"])
    assert named.windows == (0, 4096)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"hidden_activation": "gelu"}, "computes hidden_activation 'gelu_pytorch_tanh', not 'gelu'"),
        ({"attn_logit_softcapping": 0.0}, "attn_logit_softcapping is 0.0, no soft cap"),
        ({"final_logit_softcapping": -1}, "final_logit_softcapping is -1.0, no soft cap"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        ({"layer_types": ["full_attention"]}, "layer_types must say"),
        ({"sliding_window": 0}, "sliding_window is 0; correct it"),
        ({"query_pre_attn_scalar": "256"}, "query_pre_attn_scalar is '256', not a number"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_computed_is_refused(changed: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableCheckpoint, match=line):
        reading(tmp_path, **changed)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_checkpoint_says_what_transformers_says(dtype: str, tmp_path: Path) -> None:
    """Its hidden size is no square: in bfloat16 the factor of embeddings is rounded as transformers rounds it."""
    folder = save_checkpoint("gemma2", tmp_path)
    assert_same_trace(
        Oracle()(case_of(folder, understood=True, dtype=dtype)), TransformersOracle()(case_of(folder, dtype=dtype))
    )
    assert load(identify(folder), "bfloat16").embedding_scale == 5.65625
    looking = judge(case_of(folder, understood=True, dtype=dtype), ALL, Oracle(), subject_of(open_cpu()))
    assert looking.findings == ()
    assert looking.outcomes["attention.context-exact"] == "checked"


@pytest.mark.parametrize("arch", DRAWN, ids=lambda arch: f"vocabulary {arch.vocab_size}")
def test_a_built_in_says_what_transformers_says(arch: Architecture) -> None:
    assert len(DRAWN) == 2
    case = case_for(arch, KvLayout(), "float32")
    assert_same_trace(Oracle()(case), TransformersOracle()(case))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", DRAWN, ids=lambda arch: f"vocabulary {arch.vocab_size}")
def test_every_layout_is_within_a_billionth(arch: Architecture, kind: str) -> None:
    case = case_for(arch, KvLayout(kind=kind, page_size=4 if KINDS[kind].pages else KvLayout().page_size))
    engine_trace, oracle_trace = open_cpu().run(case), Oracle()(case)
    assert engine_trace.output == oracle_trace.output
    for engine_step, true_step in zip(engine_trace.steps, oracle_trace.steps, strict=True):
        for name, field in (("scored", "logits"), ("attended", "output")):
            actual, expected = (getattr(getattr(step, name), field) for step in (engine_step, true_step))
            np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-9)


def test_every_setting_changes_the_logits() -> None:
    """Else the comparisons above would not see it dropped."""

    def logits(arch: Architecture) -> Any:
        scored = Oracle()(case_for(arch, KvLayout())).steps[0].scored
        assert scored is not None
        return scored.logits[0]  # the root's: its token is that of the prompt, whatever the draft proposes

    arch = DRAWN[0]
    actual = logits(arch)
    for without in (
        {"score_cap": 0.0},
        {"settings": Gemma2Settings(logit_cap=4.0)},
        {"settings": Gemma2Settings(query_scalar=6.0)},
        {"windows": (0, 0)},
    ):
        assert np.abs(logits(replace(arch, **without)) - actual).max() > 0.01, without


def test_every_backend_computes_it_or_refuses_it_by_name() -> None:
    here = [row.name for row in ROWS if row.device == "cpu" and row.name != "triton-interpreted"]
    computed, refused = computed_and_refused(here, lambda dtype: case_for(DRAWN[0], KvLayout(), dtype))
    assert "cpu-eager" in computed
    assert {name for name in refused if "fused" in name}
    # Without a soft cap nothing stands in the way of a fused path; compiling one and interpreting one take long.
    for name in refused - {"cpu-fused-flex-compiled", "triton-interpreted"}:
        backend = open_backend(name)
        plain = case_for(replace(DRAWN[0], score_cap=0.0), KvLayout(), backend.declaration.dtypes[0])
        verdict = judge(plain, CONTEXT_EXACT, Oracle(), subject_of(backend))
        assert (verdict.unsupported, verdict.findings) == (None, ()), name
        assert verdict.outcomes == {"attention.context-exact": "checked"}, name


def test_the_transparent_probe_sees_through_four_norms() -> None:
    model = Seeded(probe_architecture(DRAWN[1]), 0, "transparent", 1)
    state = load(model, "float64")
    assert state.architecture.settings == DRAWN[1].settings
    mask = tuple(
        invariant for invariant in ALL if invariant.name in ("attention.no-leakage", "structure.mask-is-ancestry")
    )
    verdict = judge(case_for(DRAWN[1], KvLayout(), "float32"), mask, Oracle(), subject_of(open_cpu()))
    assert verdict.findings == ()
    assert set(verdict.outcomes.values()) == {"checked"}


def test_a_case_file_holds_its_settings() -> None:
    case = case_for(DRAWN[0], KvLayout())
    content = json.loads(json.dumps(case_to_json(case)))
    assert content["model"]["architecture"]["settings"] == [["logit_cap", 4.0], ["query_scalar", 6.0]]
    assert case_from_json(content) == case
    assert "settings" not in case_to_json(case_for(GALLERY[0], KvLayout()))["model"]["architecture"]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ((("logit_caps", 1.0),), "gemma2 has no 'logit_caps'; it has logit_cap, query_scalar"),
        ((("query_scalar", 1.0), ("logit_cap", 1.0)), "ascending"),
        ((("logit_cap", 1.0), ("logit_cap", 1.0)), "each once"),
        ((("logit_cap", 0.0),), "only says the default"),
        ((("logit_cap", float("nan")),), "not from 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: Any, line: str) -> None:
    with pytest.raises(Malformed, match=line):
        FAMILIES["gemma2"].read_settings(settings)
    with pytest.raises(Malformed, match=r"llama has no 'logit_cap'; it has none"):
        FAMILIES["llama"].read_settings((("logit_cap", 1.0),))
    with pytest.raises(Malformed, match=r"settings: Gemma2Settings are not those of llama"):
        replace(GALLERY[0], settings=Gemma2Settings())


def test_transformers_takes_whole_numbers_alone() -> None:
    arch = replace(DRAWN[0], settings=Gemma2Settings(query_scalar=2.5))
    with pytest.raises(Unsupported, match=r"query_scalar of 2\.5"):
        open_cpu().run(case_for(arch, KvLayout()))
