"""Multi-head latent attention: cached as latent rows in every layout, refused by name where it is not computed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specverify.backends.base import Unsupported
from specverify.backends.compositions import open_cpu, open_engine
from specverify.backends.engine.columns import AttentionInputs
from specverify.properties.invariants import ALL
from specverify.properties.verdict.judge import judge
from specverify.reference.case import Case
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.layout import KINDS, KvLayout
from specverify.reference.oracle.checkpoint import identify
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.parameters import load
from specverify.setup.subjects import subject_of
from tests.checkpoints import save_checkpoint
from tests.drawn_families import LATENT, listed_architectures
from tests.meta.oracle.test_rare_families import case_for, far_apart
from tests.tiers import gated


def in_latent_rows(family: str, kind: str, dtype: str = "float64") -> Case:
    layout = KvLayout(kind=kind, page_size=4 if KINDS[kind].pages else 0, latent=True, poison="others")
    return case_for(listed_architectures(family)[-1], layout, dtype)


@pytest.mark.parametrize(
    ("family", "kind", "path"),
    gated(
        [(family, kind, path) for path in ("cpu-eager", "cpu-split") for kind in KINDS for family in LATENT],
        lambda index: index in (1, 24),  # over branch, and over pages in split attention
    ),
)
def test_attention_over_latent_rows_is_that_over_keys_and_values(family: str, kind: str, path: str) -> None:
    case, engine = in_latent_rows(family, kind), open_engine(path)
    assert far_apart(case, Oracle(), engine.run) < 1e-9
    arch = listed_architectures(family)[-1]
    commit, step = engine.run(case).steps[1].committed, Oracle()(case).steps[1].committed
    assert commit is not None
    assert step is not None
    assert commit.before is not None
    assert step.before is not None
    length = commit.before.length
    assert commit.before.keys.shape == (arch.layers, 1, length, arch.settings.latent_rank)
    assert commit.before.values.shape == (arch.layers, 1, length, arch.rotary_dim)
    assert np.abs(commit.before.keys - step.before.keys).max() < 1e-9
    assert np.abs(commit.before.values - step.before.values).max() < 1e-9


@pytest.mark.parametrize("kind", gated(list(KINDS), lambda index: False))
def test_every_invariant_holds_over_latent_rows(kind: str) -> None:
    verdict = judge(in_latent_rows("deepseek_v3", kind, "float32"), ALL, Oracle(), subject_of(open_cpu()))
    assert verdict.findings == ()
    assert verdict.outcomes["cache.commit-equivalence"] == "checked"


def test_a_path_for_equal_widths_refuses_others_by_name() -> None:
    case = in_latent_rows("deepseek_v3", "branch", "bfloat16")
    for name in ("ascend-eager-emulated", "ascend-fused-atb-emulated", "triton-interpreted"):
        declared = open_engine(name).declaration
        assert "heads of values of another width than keys in a deepseek_v3 model" in str(declared.outside(case))
        equal = in_latent_rows("deepseek_v2", "branch", "bfloat16")
        assert "KV layout with latent" in str(declared.outside(equal))
    key = torch.zeros(1, 1, 2, 4)
    columns = AttentionInputs(key, key[..., :3], torch.ones(1), torch.zeros(1), None, lambda why: None)
    with pytest.raises(Unsupported, match="v_head_dim: the Triton kernel takes values as wide as keys"):
        columns.refuse_unequal("the Triton kernel")


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "scoring": ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
    "method": ("deepseek-v3", {"topk_method": "greedy"}, "topk_method is 'greedy'"),
    "frequency": ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
    "normed": ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
    "way": ("deepseek-v2", {"topk_method": "noaux_tc"}, "neither greedy nor group_limited_greedy"),
    "groups": ("deepseek-v3", {"n_group": 3}, "4 experts in 3 groups"),
    "shared": ("deepseek-v3", {"num_key_value_heads": 2}, "2 for 4 heads"),
    "rank": ("deepseek-v3", {"kv_lora_rank": 12}, "has shape .*config.json asks for"),
    "queries": ("deepseek-v3", {"q_lora_rank": None}, "tensor .*q_proj.weight is missing"),
    "values": ("deepseek-v3", {"v_head_dim": 8}, "has shape .*config.json asks for"),
    "rotary": ("deepseek-v3", {"head_dim": 4}, "head_dim is 4, and qk_rope_head_dim is 8"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_field_that_is_not_computed_is_refused_in_one_line(wrong: str, tmp_path: Path) -> None:
    family, fields, why = WRONG[wrong]
    folder = _save_changed(family, fields, tmp_path)
    with pytest.raises(UnreadableCheckpoint, match=why) as error:
        identify(folder)
    assert "\n" not in str(error.value)


def test_kimi_is_read_as_deepseek_v3(tmp_path: Path) -> None:
    named = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "model_type": "kimi_k2"}
    folder = _save_changed("deepseek-v3", named, tmp_path)
    model = identify(folder)
    assert load(model, "float64").architecture.family == "deepseek_v3"
    case = replace(
        case_for(listed_architectures("deepseek_v3")[0]), model=model, draft=Case(model, (1,)).draft, prompt=(1, 2, 3)
    )
    assert far_apart(case, Oracle(), open_cpu().run) < 1e-9


def _save_changed(family: str, fields: dict[str, Any], folder: Path) -> Path:
    where = save_checkpoint(family, folder)
    content = json.loads((where / "config.json").read_text())
    (where / "config.json").write_text(json.dumps({**content, **fields}))
    return where
