"""A config.json file means to the oracle what it means to transformers, whatever one of its fields says."""

from pathlib import Path
from typing import Any

import pytest

from specverify.reference.family import FAMILIES as WORDS
from specverify.reference.oracle.configuration import BY_TYPE, fields_read
from tests.config_files import ADDED, Content, changes, difference, full_content, older, shrunk_config
from tests.published import CONFIGS
from tests.tiers import each, first

CLOSE = 1e-9

BY_MODEL_TYPE = {config["model_type"]: name for name, config in reversed(CONFIGS.items())}
"""The first published config of each model type."""

FORMS = {"transformers 5": full_content, "transformers 4": older}


def with_fields(name: str, **fields: Any) -> Content:
    """The published config `name` with these fields; `...` leaves a field out."""
    content = {**shrunk_config(name), **fields}
    return {field: value for field, value in content.items() if value is not ...}


def with_rope_fields(name: str, **fields: Any) -> Content:
    """The published config `name` with these fields in its rope dictionary."""
    content = shrunk_config(name)
    return {**content, "rope_parameters": {**content["rope_parameters"], **fields}}


ROWS: dict[str, tuple[Content, bool]] = {
    "ministral 3, default": (with_rope_fields("ministral-3-8b", rope_type="default"), True),
    "ministral 3, linear": (with_rope_fields("ministral-3-8b", rope_type="linear"), True),
    "ministral 3, dynamic": (with_rope_fields("ministral-3-8b", rope_type="dynamic"), True),
    "falcon-h1 without epsilon": (with_fields("falcon-h1-0.5b", rms_norm_eps=...), True),
    "deepseek v3, null weights": (with_fields("deepseek-v3", norm_topk_prob=None), True),
    "deepseek v3, null pairs": (with_fields("deepseek-v3", rope_interleave=None), True),
    "qwen3-next, null rotary": (
        {**older(shrunk_config("qwen3-next-80b-a3b")), "partial_rotary_factor": None}, True,
    ),
    "glm-4.5, null rotary": ({**older(shrunk_config("glm-4.5")), "partial_rotary_factor": None}, True),
    "gpt-oss, null window": (with_fields("gpt-oss-20b", sliding_window=None), False),
    "gpt-oss, null ramp": (with_rope_fields("gpt-oss-20b", truncate=None), True),
    "gemma 2, null window": (with_fields("gemma-2-2b", sliding_window=None), False),
    "gemma 3, null window": (with_fields("gemma-3-270m", sliding_window=None), False),
    "olmo 3, null window": (with_fields("olmo-3-7b", sliding_window=None), False),
    "null epsilon": (with_fields("llama-3.1-8b", rms_norm_eps=None), False),
    "null base": ({**older(shrunk_config("llama-3.1-8b")), "rope_theta": None}, False),
    "no causal mask": (with_fields("llama-3.1-8b", is_causal=False), False),
    "qwen2-moe, windows": (with_fields("qwen1.5-moe-a2.7b", use_sliding_window=True, sliding_window=5), True),
    "qwen2-moe, window of one layer": (
        with_fields("qwen1.5-moe-a2.7b", use_sliding_window=True, sliding_window=5,
                layer_types=["full_attention", "sliding_attention"]), True,
    ),
    "qwen3-moe, windows": (with_fields("qwen3-30b-a3b", use_sliding_window=True, sliding_window=5), True),
    "lfm2, first release": (
        with_fields("lfm2-1.2b", intermediate_size=..., layer_types=..., block_ff_dim=90, full_attn_idxs=[1],
                tie_embedding=True, tie_word_embeddings=...), True,
    ),
    "lfm2, null multiplier": (with_fields("lfm2-1.2b", block_ffn_dim_multiplier=None), False),
    "lfm2, untied by its first name": (with_fields("lfm2-1.2b", tie_embedding=False), True),
    "olmo 3, yarn by the older name alone": (
        with_fields("olmo-3-7b", rope_parameters=..., rope_scaling={"type": "yarn", "factor": 8.0}), False,
    ),
    "gemma 3, no base of windows": ({**older(shrunk_config("gemma-3-270m")), "rope_local_base_freq": 0.0}, False),
    "gemma 2, no scale of scores": (with_fields("gemma-2-2b", query_pre_attn_scalar=0), False),
    "hunyuan, no width of heads": (with_fields("hunyuan-1.8b", head_dim=...), False),
    "mixtral, dynamic without the width of heads": (
        with_fields("mixtral-8x7b", head_dim=..., rope_parameters={"rope_type": "dynamic", "factor": 2.0}), False,
    ),
    "deepseek v3, no number of key heads": (with_fields("deepseek-v3", num_key_value_heads=...), False),
    "deepseek v2, no experts for a token": (with_fields("deepseek-v2", num_experts_per_tok=...), False),
    "phi 3, null rotary": ({**older(shrunk_config("phi-4-mini")), "partial_rotary_factor": None}, False),
    "llama, a hidden size that heads do not divide": (with_fields("llama-3.1-8b", hidden_size=65, head_dim=16), False),
    "llama 3, bands of width 0": (with_rope_fields("llama-3.1-8b", low_freq_factor=0.0), False),
    "gemma 4, fewer heads of keys without a window": (with_fields("gemma-4-31b", num_global_key_value_heads=2), True),
    "gemma 4, such heads of keys that do not serve as values": (
        with_fields("gemma-4-31b", attention_k_eq_v=False, num_global_key_value_heads=2), True,
    ),
    "gemma 4, a window in the last layer": (
        with_fields("gemma-4-31b", layer_types=["full_attention", "sliding_attention"]), True,
    ),
    "gemma 4, wide blocks and no layer that shares": (with_fields("gemma-4-31b", use_double_wide_mlp=True), True),
    "gemma 4, nothing left to read from": (with_fields("gemma-4-e2b", num_kv_shared_layers=3), False),
    "gemma 4, experts": (
        with_fields("gemma-4-31b", enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=16),
        False,
    ),
    "gemma 4, sees what follows": (with_fields("gemma-4-31b", use_bidirectional_attention="all"), False),
    "falcon-h1, kinds of layers": (with_fields("falcon-h1-0.5b", layer_types=["full_attention"] * 2), False),
}  # fmt: skip
"""Fields that were once read in another way than transformers reads them; and whether the file is read, or refused."""


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_read_as_transformers_reads_it_or_refused(row: str, tmp_path: Path) -> None:
    content, is_read = ROWS[row]
    answer = difference({name: value for name, value in content.items() if value is not ...}, tmp_path)
    if is_read:
        assert isinstance(answer, float), answer
        assert answer < CLOSE
    else:
        assert answer == "refused"


@pytest.mark.parametrize(("name", "form"), each([(name, form) for name in CONFIGS for form in FORMS], 11))
def test_a_published_config_is_read_in_both_forms(name: str, form: str, tmp_path: Path) -> None:
    answer = difference(FORMS[form](shrunk_config(name)), tmp_path)
    assert isinstance(answer, float), answer
    assert answer < CLOSE


@pytest.mark.parametrize(("kind", "form"), first([(kind, form) for kind in BY_MODEL_TYPE for form in FORMS], 0))
def test_one_field_at_a_time_gives_equal_numbers_or_a_refusal(kind: str, form: str, tmp_path: Path) -> None:
    base = FORMS[form](shrunk_config(BY_MODEL_TYPE[kind]))
    known_names, wrong = {*fields_read(BY_TYPE[kind]), *ADDED, "rope_parameters", "rope_scaling"}, []
    for number, (words, content) in enumerate(changes(base)):
        folder = tmp_path / str(number)
        folder.mkdir()
        answer = difference(content, folder)
        # A field that neither reads may make transformers refuse: there are no numbers then to be wrong.
        is_refused_for_nothing = answer == "refused by transformers" and words.split()[0] not in known_names
        if not is_refused_for_nothing and (answer == "refused by transformers" or not _is_right(answer)):
            wrong.append(f"{words}: {answer}")
    assert not wrong


def _is_right(answer: float | str) -> bool:
    return answer < CLOSE if isinstance(answer, float) else answer in ("refused", "large")


def test_every_family_that_reads_files_has_a_published_config() -> None:
    read = {name for name, family in BY_TYPE.items() if family.name in WORDS}
    elsewhere = {"PanguEmbedded", "pangu_embedded", "kimi_k2"}  # transformers knows no such model
    assert read - elsewhere <= set(BY_MODEL_TYPE)
