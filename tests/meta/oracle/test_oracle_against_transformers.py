"""The oracle's model agrees with transformers' own, made truly float64, on every family and rotary variant."""

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, modeling_rope_utils

from specverify.reference.architecture import Architecture, Rope, Seeded
from specverify.reference.case import Case
from specverify.reference.family.gemma2 import Gemma2Settings
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.formulas.rotary import frequencies, table, turn
from specverify.reference.oracle.model import PathByPath
from specverify.reference.oracle.parameters import Parameters, load
from specverify.reference.oracle.shared_prefix import SharedPrefix
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Array
from specverify.reference.tree import Tree
from specverify.reference.weights import representable, seeded_weights

# Pangu is Llama with biases; transformers has no model of that name.
MODULE_OF = {
    "llama": "Llama", "pangu": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "llama4": "Llama4",
    "gemma2": "Gemma2",
}  # fmt: skip
TOLERANCE = 1e-9

# The root with three children (two of them twins), a branch of depth 3, rows not in order of depth.
TREE = Tree((0, 0, 1, 0, 2, 0, 5), (3, 7, 1, 7, 9, 2, 2))
CONTEXT = tuple(int(token) for token in np.random.default_rng(0).integers(16, size=18))


class _Float64Torch(ModuleType):
    """The torch module with float32 meaning float64, to be looked up by one module's code."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


@pytest.fixture(autouse=True)
def truly_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Transformers computes norms, rotary tables and softmax in float32 whatever the model's dtype; here it does not.

    The code that runs stays Hugging Face's own; only the names it looks up mean something wider.
    """
    wide = _Float64Torch("torch")
    monkeypatch.setattr(modeling_rope_utils, "torch", wide)
    for family in set(MODULE_OF.values()):
        module = importlib.import_module(f"transformers.models.{family.lower()}.modeling_{family.lower()}")
        monkeypatch.setattr(module, "torch", wide)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    with torch.no_grad():
        yield


def rope_parameters(rope: Rope) -> dict[str, Any]:
    """The dictionary in which Hugging Face writes `rope`."""
    content: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        content["factor"] = rope.factor
    if rope.kind in ("yarn", "llama3", "longrope"):
        content["original_max_position_embeddings"] = rope.original
    if rope.attention_factor:
        content["attention_factor"] = rope.attention_factor
    names = {
        "yarn": ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "longrope": ("short_factor", "long_factor"),
    }.get(rope.kind, ())
    values = {name: getattr(rope, name) for name in names}
    return content | {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def hugging_face(arch: Architecture, seed: int) -> Any:
    """Transformers' model of the same architecture and seeded weights, in float64."""
    name = MODULE_OF[arch.family]
    module = importlib.import_module(f"transformers.models.{name.lower()}")
    kind = getattr(module, f"{name}TextConfig" if name == "Llama4" else f"{name}Config")
    fields: dict[str, Any] = {
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.intermediate_size,
        "num_hidden_layers": arch.layers,
        "num_attention_heads": arch.heads,
        "num_key_value_heads": arch.kv_heads,
        "head_dim": arch.head_dim,
        "rms_norm_eps": arch.norm_eps,
        "max_position_embeddings": arch.max_positions,
        "tie_word_embeddings": arch.tied,
        "rope_parameters": rope_parameters(arch.rope),
        "attn_implementation": "eager",
        "pad_token_id": None,
    }
    if name in ("Llama", "Qwen3"):
        fields["attention_bias"] = arch.qkv_bias
    if name == "Llama":
        fields["mlp_bias"] = arch.mlp_bias
    if name == "Llama4":
        fields |= {
            "moe_layers": [],
            "intermediate_size_mlp": arch.intermediate_size,
            "use_qk_norm": arch.qk_norm,
            "attention_bias": arch.qkv_bias,
            "no_rope_layers": [int(layer not in arch.unrotated) for layer in range(arch.layers)],
            "attention_chunk_size": max(arch.chunks, default=1),  # a chunk even where no layer has one
            "layer_types": ["chunked_attention" if chunk else "full_attention" for _, chunk in arch.reaches],
            "attn_temperature_tuning": arch.floor_scale > 0,
            "floor_scale": arch.floor_scale or 1,
            "attn_scale": arch.attn_scale,
        }
    elif name == "Gemma2":
        fields |= {
            "attention_bias": arch.qkv_bias,
            "query_pre_attn_scalar": int(Gemma2Settings.of(arch).query_scalar) or arch.head_dim,
            "attn_logit_softcapping": arch.score_cap or None,
            "final_logit_softcapping": Gemma2Settings.of(arch).logit_cap or None,
            "sliding_window": max(arch.windows) or 1,  # asked for even where no layer has one
            "layer_types": ["sliding_attention" if window else "full_attention" for window in arch.windows],
        }
    elif name == "Mistral":
        fields["sliding_window"] = arch.windows[0] or None
    elif any(arch.windows):
        fields["use_sliding_window"] = True
        fields["sliding_window"] = max(arch.windows)
        fields["layer_types"] = ["sliding_attention" if window else "full_attention" for window in arch.windows]
    model = getattr(module, f"{name}ForCausalLM")(kind(**fields)).double().eval()
    if name == "Gemma2":  # its buffer was a float32 before it was widened
        model.model.embed_tokens.embed_scale = torch.tensor(arch.hidden_size, dtype=torch.float64).sqrt()
    state = {key: torch.tensor(value) for key, value in seeded_weights(Seeded(arch, seed)).items()}
    if name == "Llama4":
        state = {key.replace(".mlp.", ".feed_forward."): value for key, value in state.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if arch.tied else [])
    return model


def run(model: Any, tokens: tuple[int, ...]) -> tuple[Array, Array, Array, Array]:
    """Logits [V] and attended [layers, heads, d] of the last position, keys and values [layers, kv_heads, T, d]."""
    cache = DynamicCache()  # without a config it keeps every row, windows or not
    attended: list[Any] = []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _module, args: attended.append(args[0][0, -1]))
        for layer in model.model.layers
    ]
    logits = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits[0, -1]
    for hook in hooks:
        hook.remove()
    heads = torch.stack(attended).reshape(len(attended), model.config.num_attention_heads, -1)
    keys, values = (torch.cat([getattr(layer, which) for layer in cache.layers]) for which in ("keys", "values"))
    assert logits.dtype == keys.dtype == torch.float64
    return logits.numpy(), heads.numpy(), keys.numpy(), values.numpy()


def assert_agrees(arch: Architecture, seed: int, context: tuple[int, ...] = CONTEXT) -> None:
    model, parameters = hugging_face(arch, seed), load(Seeded(arch, seed), "float64")
    rows = [run(model, (*context, *TREE.tokens_to(node))) for node in range(len(TREE))]
    logits = np.stack([row[0] for row in rows])
    assert np.ptp(logits, axis=0).max() > 0.1, "all nodes look alike: this model tests nothing"
    for oracle in (PathByPath(parameters), SharedPrefix(parameters)):
        nodes = oracle.nodes(context, TREE)
        np.testing.assert_allclose(nodes.logits, logits, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(nodes.attended, np.stack([row[1] for row in rows], axis=2), rtol=0, atol=TOLERANCE)
        tokens = (*context, *TREE.tokens_to(4))
        kv = oracle.kv(tokens)
        np.testing.assert_allclose(kv.keys, rows[4][2], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(kv.values, rows[4][3], rtol=0, atol=TOLERANCE)


def small(family: str = "llama", **fields: Any) -> Architecture:
    base: dict[str, Any] = {
        "vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "heads": 4, "kv_heads": 2, "head_dim": 8,
        "windows": (0, 0), "max_positions": 64,
    }  # fmt: skip
    biased = {"pangu": {"qkv_bias": True, "output_bias": True}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}
    biased["llama4"] = {"qk_norm": True}
    return Architecture(**{"family": family, **base, **biased.get(family, {}), **fields})


MODELS = {
    "llama": small(),
    "llama-mha": small(kv_heads=4),
    "llama-mqa": small(kv_heads=1),
    "llama-six-heads-on-two": small(heads=6, kv_heads=2, hidden_size=12),
    "llama-wide-heads": small(head_dim=14),
    "llama-tied": small(tied=True),
    "llama-attention-bias": small(qkv_bias=True, output_bias=True),
    "llama-mlp-bias": small(mlp_bias=True),
    "llama-eps": small(norm_eps=0.5),
    "llama-three-layers": small(windows=(0, 0, 0)),
    "pangu": small("pangu", rope=Rope(theta=16e6)),
    "pangu-tied": small("pangu", tied=True),
    "qwen2": small("qwen2", rope=Rope(theta=1e6)),
    "qwen2-tied": small("qwen2", tied=True),
    "qwen2-windows": small("qwen2", windows=(0, 5)),
    "qwen3": small("qwen3", norm_eps=0.1),
    "qwen3-tied-wide-heads": small("qwen3", tied=True, head_dim=12),
    "qwen3-bias": small("qwen3", qkv_bias=True, output_bias=True),
    "qwen3-windows": small("qwen3", windows=(7, 0)),
    "mistral": small("mistral"),
    "mistral-window": small("mistral", windows=(6, 6)),
    "mistral-window-within-the-tree": small("mistral", windows=(2, 2)),
    "mistral-window-of-one": small("mistral", windows=(1, 1)),
    "llama4": small("llama4", qk_norm=False),
    "llama4-norm": small("llama4", norm_eps=0.1),
    "llama4-bias-tied": small("llama4", qkv_bias=True, output_bias=True, tied=True),
    "llama4-chunk-ends-in-the-tree": small("llama4", chunks=(20, 0)),
    "llama4-chunks": small("llama4", chunks=(4, 4)),
    "llama4-chunk-of-one": small("llama4", chunks=(0, 1)),
    "llama4-unrotated": small("llama4", chunks=(8, 8, 0), windows=(0, 0, 0), unrotated=(2,)),
    "llama4-tempered": small("llama4", chunks=(8, 0), unrotated=(1,), floor_scale=4, attn_scale=0.7),
    "llama4-all-tempered": small("llama4", unrotated=(0, 1), floor_scale=1),
    "gemma2": small("gemma2"),
    "gemma2-caps": small("gemma2", score_cap=0.7, settings=Gemma2Settings(logit_cap=3.0), windows=(5, 0)),
    "gemma2-scalar": small("gemma2", settings=Gemma2Settings(query_scalar=3.0), windows=(0, 0, 0), norm_eps=0.1),
    "gemma2-odd-width-tied": small("gemma2", hidden_size=20, tied=True, score_cap=50.0, windows=(2, 2)),
    "gemma2-bias": small("gemma2", qkv_bias=True, output_bias=True, rope=Rope(kind="linear", factor=3.0)),
    "llama4-yarn": small("llama4", rope=Rope(theta=100.0, kind="yarn", factor=4.0, original=16, truncate=False)),
}

SHORT, LONG = (1.0, 1.1, 1.7, 2.0), (1.5, 4.0, 9.0, 20.0)
ROPES = {
    "default": Rope(theta=50.0),
    "linear": Rope(kind="linear", factor=3.0),
    "dynamic": Rope(kind="dynamic", factor=3.0),
    "yarn": Rope(theta=100.0, kind="yarn", factor=4.0, original=16),
    "yarn-real": Rope(theta=100.0, kind="yarn", factor=4.0, original=16, truncate=False),
    "yarn-betas": Rope(theta=500.0, kind="yarn", factor=8.0, original=200, beta_fast=20.0, beta_slow=0.5),
    "yarn-attention": Rope(kind="yarn", factor=4.0, original=16, attention_factor=0.7),
    "yarn-mscale": Rope(kind="yarn", factor=4.0, original=16, mscale=0.7, mscale_all_dim=1.3),
    "yarn-one-mscale": Rope(kind="yarn", factor=4.0, original=16, mscale=0.7),
    "yarn-factor-one": Rope(kind="yarn", factor=1.0, original=64),
    "yarn-tiny-original": Rope(theta=10.0, kind="yarn", factor=4.0, original=2),
    "yarn-ramp-beyond-the-pairs": Rope(theta=30.0, kind="yarn", factor=4.0, original=400),
    "yarn-ramp-to-the-last-dimension": Rope(theta=2.0, kind="yarn", factor=4.0, original=2000, beta_fast=300.0),
    "yarn-no-ramp": Rope(theta=100.0, kind="yarn", factor=4.0, original=16, beta_fast=1.0, truncate=False),
    "llama3": Rope(theta=100.0, kind="llama3", factor=8.0, original=32),
    "llama3-band": Rope(theta=40.0, kind="llama3", factor=2.0, original=20, low_freq_factor=0.5, high_freq_factor=2.0),
    "longrope-short": Rope(kind="longrope", factor=4.0, original=40, short_factor=SHORT, long_factor=LONG),
    "longrope-long": Rope(kind="longrope", factor=4.0, original=16, short_factor=SHORT, long_factor=LONG),
    "longrope-attention": Rope(
        kind="longrope", factor=4.0, original=16, attention_factor=1.3, short_factor=SHORT, long_factor=LONG
    ),
    "longrope-factor-below-one": Rope(kind="longrope", factor=0.5, original=40, short_factor=SHORT, long_factor=LONG),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_family_agrees(name: str) -> None:
    assert_agrees(MODELS[name], seed=len(name))


@pytest.mark.parametrize("name", ROPES)
def test_every_rotary_variant_agrees(name: str) -> None:
    assert_agrees(small(rope=ROPES[name]), seed=len(name))


@pytest.mark.parametrize("family", MODULE_OF)
def test_the_root_alone_agrees_without_a_context(family: str) -> None:
    assert_agrees(small(family), seed=3, context=())


@pytest.mark.parametrize("name", [name for name in ROPES if name not in ("default", "dynamic")])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_frequencies_agree_at_real_widths(name: str, head_dim: int) -> None:
    rope = ROPES[name]
    if rope.kind == "longrope":
        stretch = {which: tuple(np.linspace(1, end, head_dim // 2)) for which, end in (("short", 2), ("long", 30))}
        rope = Rope(**{**vars(rope), "short_factor": stretch["short"], "long_factor": stretch["long"]})
    elif rope.original:
        rope = Rope(**{**vars(rope), "original": 4096, "theta": 10000.0})
    config = hugging_face_config(rope, head_dim)
    for length in (20, 50):
        oracle_frequencies, scaling = frequencies(rope, head_dim, 64, length)
        transformers_frequencies, attention = modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope.kind](
            config, None, seq_len=length
        )
        np.testing.assert_allclose(oracle_frequencies, transformers_frequencies.numpy(), rtol=1e-14)
        assert scaling == pytest.approx(attention, rel=1e-15)


def hugging_face_config(rope: Rope, head_dim: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        max_position_embeddings=64,
        rope_parameters=rope_parameters(rope),
    )


@pytest.mark.parametrize("name", MODELS)
def test_as_many_weights_as_transformers_has(name: str) -> None:
    matrices = [parameter for parameter in hugging_face(MODELS[name], 1).parameters() if parameter.ndim == 2]
    assert MODELS[name].weights == sum(matrix.numel() for matrix in matrices)


def test_weights_are_the_same_numbers_in_every_dtype() -> None:
    """Rounded to 8 bits; the smallest that stays is 2^-16, and what is smaller becomes 0."""
    least = 2.0**-16
    values = np.array([0.0, least, -least, 0.99 * least, -0.99 * least, least / 2, 1.00390625, 1.005859375, -0.3, 7.77])
    expected = [0.0, least, -least, 0.0, 0.0, 0.0, 1.0, 1.0078125, -0.30078125, 7.78125]
    assert representable(values).tolist() == expected
    drawn = np.random.default_rng(5).normal(size=2000) * 2.0 ** np.random.default_rng(6).integers(-18, 4, 2000)
    rounded = representable(drawn)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        np.testing.assert_array_equal(torch.tensor(rounded).to(dtype).double().numpy(), rounded)
    nonzero = rounded != 0
    np.testing.assert_allclose(rounded[nonzero], drawn[nonzero], rtol=2.0**-8)
    assert (np.abs(drawn[~nonzero]) < least).all()
    assert 100 < (~nonzero).sum() < 500


def test_rotation_is_by_relative_position() -> None:
    rng = np.random.default_rng(1)
    inv_freq, scaling = frequencies(Rope(), 8, 64, 20)
    query, key = rng.normal(size=(2, 3, 5, 8))
    turned = {shift: table(np.arange(5) + shift, inv_freq, scaling) for shift in (0, 2, 9, 11)}
    near = turn(query, *turned[0]) * turn(key, *turned[2])
    far = turn(query, *turned[9]) * turn(key, *turned[11])
    np.testing.assert_allclose(near.sum(-1), far.sum(-1), atol=1e-12)


def test_the_comparison_would_see_a_missing_bias() -> None:
    """A guard on this file itself: an oracle that forgets one tensor does not agree."""
    arch = small("pangu")
    state = dict(seeded_weights(Seeded(arch, 1)))
    del state["model.layers.1.self_attn.o_proj.bias"]
    forgetful = PathByPath(Parameters(arch, state)).nodes(CONTEXT, TREE)
    logits = run(hugging_face(arch, 1), (*CONTEXT, 3))[0]
    assert np.abs(forgetful.logits[0] - logits).max() > 1e-3


@pytest.mark.parametrize("family", MODULE_OF)
def test_the_log_probabilities_of_a_prompt_agree(family: str) -> None:
    arch = small(family)
    case = Case(
        Seeded(arch, 3),
        CONTEXT,
        sampling=Sampling(temperature=0.7, prompt_logprobs=True),
        stops=Stops(1),
        dtype="float64",
    )
    rows = torch.log_softmax(hugging_face(arch, 3)(torch.tensor([CONTEXT])).logits[0].double(), dim=-1)
    true = [float(rows[place, token]) for place, token in enumerate(CONTEXT[1:])]
    np.testing.assert_allclose(Oracle()(case).prompt_logprobs or (), true, rtol=0, atol=TOLERANCE)
