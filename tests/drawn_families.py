"""Random architectures of the families that are drawn rarely: odd head counts, groups, windows, rotary variants."""

import random
from dataclasses import replace
from typing import Any

from specverify.properties.strategies.models import GALLERY, ROPES
from specverify.reference.architecture import Architecture, Rope
from specverify.reference.family import FAMILIES
from specverify.reference.family.hybrid_delta_rule import Qwen3NextSettings
from specverify.reference.family.hybrid_short_convolution import Lfm2Settings
from specverify.reference.family.hybrid_state_space import FalconH1Settings
from specverify.reference.family.latent import DeepseekV2Settings, DeepseekV3Settings, IndexedSettings
from specverify.reference.family.mimo_v2_flash import MiMoV2FlashSettings
from specverify.reference.family.qwen3_5 import Qwen35MoeSettings, Qwen35Settings
from specverify.reference.family.settings import Settings
from specverify.reference.family.vision_text import VisionTextSettings

RARE = tuple(name for name, family in FAMILIES.items() if family.rare)
"""The families that this file draws."""

ONE_WINDOW = ("mixtral", "ministral3", "phi3")
"""Families whose layers all have the same window or none."""

SOME_WINDOWS = ("cohere2", "mimo_v2_flash", "olmo3", "exaone4", "gemma3", "gemma4", "gpt_oss", "smollm3")
"""Families in which some layers have a window."""

DELTA_RULE = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
"""Families with the gated delta rule."""

HYBRID = (*DELTA_RULE, "lfm2", "falcon_h1")
"""Families in which layers have a recurrent state."""

NORMED = (
    *DELTA_RULE, "lfm2", "qwen3_moe", "olmo2", "olmo3", "exaone4", "hunyuan_v1_dense", "apertus", "gemma3",
    "gemma4",
    "minimax_m2",
)  # fmt: skip
INDEXED = ("deepseek_v32", "glm_moe_dsa")
LATENT = ("deepseek_v2", "deepseek_v3", *INDEXED)
ALWAYS_BIASED = ("qwen2_vl",)
WHOLLY_BIASED = ("ernie4_5",)
"""Families in which feed-forward blocks have biases where attention has."""
BIASED = (
    *LATENT, "seed_oss", "glm4", *DELTA_RULE, "qwen2_moe", "glm4_moe", "granite", "olmo2", "gpt_oss", "qwen3_moe",
    "llama4_text", "falcon_h1", "cohere2", "gemma4",
    "mimo_v2_flash", *WHOLLY_BIASED,
)  # fmt: skip
BIASED_OUTPUT = (
    *LATENT, *DELTA_RULE, "falcon_h1", "granite", "olmo2", "gpt_oss", "qwen3_moe", "llama4_text", "cohere2",
    *WHOLLY_BIASED,
    "gemma4",
)  # fmt: skip


def draw_architecture(family: str, seed: int) -> Architecture:
    """A random architecture of `family`, the same one for the same seed."""
    rng = random.Random(f"{family} {seed}")
    kv_heads, group = rng.randint(1, 3), 1 if family in LATENT else rng.randint(1, 3)
    group *= 2 if family == "mimo_v2_flash" else 1  # layers with a window have twice as many heads of keys
    heads, layers = kv_heads * group, rng.randint(2 if family in HYBRID else 1, 5 if family == "gemma4" else 3)
    biased = family in ALWAYS_BIASED or (family in BIASED and rng.random() < 0.6)
    head_dim = rng.choice((6, 8, 10) if "rotary_dim" in vars(FAMILIES[family].settings()) else (4, 6, 8, 10))
    arch = Architecture(
        family=family,
        vocab_size=rng.randint(5, 60),
        hidden_size=heads * rng.randint(3, 6),
        intermediate_size=rng.randint(5, 24),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        windows=_windows(family, layers, rng),
        chunks=_chunks(family, layers, rng),
        rope=ROPES["theta" if family == "phi3" else rng.choice(tuple(ROPES))],
        norm_eps=rng.choice((1e-6, 1e-5)),
        max_positions=1024,
        tied=rng.random() < 0.5,
        qkv_bias=biased,
        output_bias=biased and family in BIASED_OUTPUT,
        mlp_bias=biased and family in WHOLLY_BIASED,
        qk_norm=family in NORMED or (family in ("glm4_moe", "llama4_text") and rng.random() < 0.5),
        settings=_first_settings(family, head_dim),
    )
    if family == "mimo_v2_flash":
        arch = replace(arch, rope=ROPES[rng.choice(("default", "theta"))])
    if family == "ministral3" and not arch.rope.original:
        arch = replace(arch, rope=replace(ROPES["yarn"], original=rng.choice((4, 8))))
    if family == "gemma4" and rng.random() < 0.5:
        arch = replace(arch, rope=Rope(1e6, "proportional", rng.choice((1.0, 3.0)), share=rng.choice((0.25, 0.5, 0.9))))
    if family in ("olmo3", "gemma3", "gemma4"):  # transformers reads `truncate` for no kind of layer
        arch = replace(arch, rope=replace(arch.rope, truncate=True))
    bare = _unrotated_layers(arch, rng)
    if family == "llama4_text" and bare:
        arch = replace(arch, unrotated=bare, floor_scale=rng.choice((0, 1, 3)), attn_scale=rng.choice((0.1, 0.7)))
    return replace(arch, unrotated=bare, settings=_settings(arch, rng))


def _first_settings(family: str, head_dim: int) -> Settings:
    """Settings that are replaced later, where the family's defaults do not fit a small model."""
    settings: dict[str, Settings] = {
        "qwen3_next": Qwen3NextSettings(attention_every=2),
        "qwen3_5": Qwen35Settings(attention_every=2),
        "qwen3_5_moe": Qwen35MoeSettings(attention_every=2),
        "lfm2": Lfm2Settings(attention_layers=2),
        "falcon_h1": FalconH1Settings(mixer_heads=2),
        "qwen2_vl": VisionTextSettings(head_dim // 2, 0, 0),
        "mimo_v2_flash": MiMoV2FlashSettings(value_dim=4),
        "deepseek_v2": DeepseekV2Settings(rotary_dim=2),
        "deepseek_v3": DeepseekV3Settings(rotary_dim=2),
        "deepseek_v32": IndexedSettings(rotary_dim=2),
        "glm_moe_dsa": IndexedSettings(rotary_dim=2),
    }
    return settings.get(family, Settings())


def _windows(family: str, layers: int, rng: random.Random) -> tuple[int, ...]:
    width = rng.randint(1, 9)
    if family in ONE_WINDOW:
        return (width * rng.randint(0, 1),) * layers
    if family in SOME_WINDOWS:
        windows = tuple(width * rng.randint(0, 1) for _ in range(layers))
        return (*windows[:-1], 0) if family == "gemma4" else windows
    return (0,) * layers


def _chunks(family: str, layers: int, rng: random.Random) -> tuple[int, ...]:
    if family != "llama4_text":
        return ()
    size = rng.randint(1, 9)
    drawn = tuple(size * rng.randint(0, 1) for _ in range(layers))
    return drawn if any(drawn) else ()


def _unrotated_layers(arch: Architecture, rng: random.Random) -> tuple[int, ...]:
    if arch.family == "cohere2" or (arch.family == "exaone4" and any(arch.windows)):
        return tuple(layer for layer, window in enumerate(arch.windows) if not window)
    if arch.family in ("smollm3", "llama4_text"):
        return tuple(layer for layer in range(arch.layers) if rng.random() < 0.4)
    return ()


def _settings(arch: Architecture, rng: random.Random) -> Settings:
    experts, groups = rng.randint(2, 5), 1
    if arch.family in ("glm4_moe", "mimo_v2_flash", *LATENT) and rng.random() < 0.5:
        groups = rng.randint(2, 3)
        experts = 2 * groups
    open_groups = rng.randint(1, groups)
    if arch.family == "qwen3_next" and rng.random() < 0.5:
        experts = 0
    key_heads = rng.randint(1, 2)
    pairs = arch.head_dim // 2
    by_time = rng.randint(0, pairs)
    by_height = rng.randint(0, pairs - by_time)
    values = {
        "attention_layers": rng.randint(1, 2**arch.layers - 1),
        "attention_every": rng.randint(1, arch.layers),
        "key_heads": key_heads,
        "value_heads": key_heads * rng.randint(1, 2),
        "key_width": rng.randint(1, 5),
        "value_width": rng.randint(1, 5),
        "conv_width": rng.randint(2, 5),
        "experts": experts,
        "experts_per_token": rng.randint(1, max(1, open_groups * (experts // groups))),
        "expert_size": rng.randint(3, 12),
        "shared_size": rng.randint(3, 12),
        "shared_experts": rng.randint(1, 2),
        "norm_topk": rng.randint(0, 1),
        "sparse_step": rng.randint(1, 2),
        "end_layer": rng.randint(0, arch.layers - 1),
        "norm_min": rng.choice((1e-12, 0.6)),
        "dense_layers": rng.randint(0, 1),
        "groups": groups,
        "top_groups": open_groups,
        "routed_scale": rng.choice((1.0, 2.5)),
        "rotary_dim": rng.choice(_rotary_widths(arch)),
        "query_rank": rng.choice((0, rng.randint(3, 9))),
        # transformers' DeepSeek-V2 turns pairs in place, and refuses rows of an odd width.
        "latent_rank": rng.randint(2, 6) * 2 + (arch.family == "deepseek_v3" and rng.random() < 0.5),
        "value_dim": rng.choice((arch.head_dim, rng.randint(2, 9))),
        "interleaved": rng.randint(0, 1),
        "value_scale": rng.choice((1.0, 0.6)),
        "scale_beta": rng.choice((0.1, 0.5)),
        "scale_original": 0,
        "embedding_multiplier": rng.choice((1.0, 3.0)),
        "attention_multiplier": rng.choice((0.125, 0.4)),
        "residual_multiplier": rng.choice((1.0, 0.22)),
        "logits_scaling": rng.choice((1.0, 0.3)),
        "logit_scale": rng.choice((0.0625, 1.7)),
        "logit_cap": rng.choice((0.0, 5.0)),
        "query_scalar": rng.choice((0, 5)),
        "local_theta": rng.choice((0.0, 100.0)),
        "gate_alpha": rng.choice((1.702, 0.9)),
        "gate_limit": rng.choice((7.0, 0.8)),
        "time_pairs": by_time,
        "height_pairs": by_height,
        "width_pairs": pairs - by_time - by_height,
    }
    if arch.family == "falcon_h1":
        defaults = vars(FalconH1Settings())
        values |= {name: rng.choice((1.0, 0.6, 1.7)) for name in defaults if name.endswith("_multiplier")}
        values |= {name: rng.randint(0, 1) for name, default in defaults.items() if isinstance(default, bool)}
        groups = rng.randint(1, 2)
        values |= {"mixer_groups": groups, "mixer_heads": groups * rng.randint(1, 2)}
        values |= {"mixer_width": rng.randint(1, 4), "state_width": rng.randint(1, 5)}
    if arch.family == "gemma4":
        values |= _gemma4_values(arch, rng)
    if arch.family in INDEXED:
        values |= {
            "index_heads": rng.randint(10, 14),  # with few, whole rows of rectified scores are 0, and columns tie
            "index_width": values["rotary_dim"] + rng.randint(0, 4),
            "index_columns": rng.randint(1, 9),
            "following_layers": 2 * rng.randrange(2 ** (arch.layers - 1)) if arch.family == "glm_moe_dsa" else 0,
            "query_rank": rng.randint(3, 9),
            "interleaved": True,
        }
    return replace(arch.settings, **{name: values[name] for name in vars(arch.settings)})


def _gemma4_values(arch: Architecture, rng: random.Random) -> dict[str, Any]:
    kinds = [bool(window) for window in arch.windows]
    shareable = [count for count in range(arch.layers) if set(kinds[: arch.layers - count]) == set(kinds)]
    shared, keys_as_values = rng.choice(shareable), rng.randint(0, 1)
    divisors = [heads for heads in range(1, arch.heads + 1) if arch.heads % heads == 0]
    return {
        "full_head_dim": 0 if arch.rope.kind == "longrope" else rng.choice((0, 4, 6, 12)),
        "full_kv_heads": rng.choice((0, *divisors)),
        "keys_as_values": keys_as_values,
        "shared_layers": shared,
        "wide_blocks": rng.randint(0, 1) if shared else 0,
        "layer_input_width": rng.choice((0, 3, 4)),
    }


def _rotary_widths(arch: Architecture) -> tuple[int, ...]:
    # transformers divides by the number of turned dimensions less 2 for `dynamic`.
    narrow = 4 if arch.rope.kind == "dynamic" else 2
    if arch.family in LATENT:
        return narrow, arch.head_dim - 2
    return 0, narrow % 4, arch.head_dim - 2


def listed_architectures(family: str) -> list[Architecture]:
    """The architectures of `family` that cases draw."""
    return [arch for arch in GALLERY if arch.family == family]
