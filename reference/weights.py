"""The weights of built-in models, their adapters and draft heads, made from seeds.

The oracle and the engines share these tensors. Seeded ones are exact in every working dtype. Names are those of a
Hugging Face state dict, and for heads the published ones. Stored heads are read by `specverify.reference.draft_files`.
"""

from functools import lru_cache

import numpy as np

from specverify.reference.architecture import Architecture, Model, Seeded
from specverify.reference.draft.head import Head
from specverify.reference.draft_files import stored_head
from specverify.reference.images import Image
from specverify.reference.layer_shapes import layer_shapes
from specverify.reference.trace import Array

ROUTER_GAIN = 3.0
"""Standard deviation of the scores of experts: few rows lie near the border between two choices."""

QUERY_KEY_GAIN = 1.0
"""Scores get standard deviation 1: attention is neither uniform nor one-hot, and every visible row has an effect."""

HEAD_GAIN = 3.0
"""Standard deviation of the logits: large enough that the top two lie far apart compared with float32 noise."""

ROWS_BY_TOKEN = ("model.embed_tokens.weight", "lm_head.weight")
"""The weights of most targets that have a row for each token id."""

GAINS = ("norm.weight", "layer_scalar")
"""The ends of the names of weights that multiply, and lie around the number with which they change nothing."""

ROUTER = ".mlp.gate.weight"
"""The end of the names of routers: the matrix [experts, hidden] whose products say which experts a row takes."""


def representable(values: Array) -> Array:
    """`values` rounded to 8 significant bits, and to 0 below 2**-16 in size.

    The result is exact in float64, float32, bfloat16 and float16, so all working dtypes run the same weights and the
    oracle needs one set.
    """
    # frexp's mantissa lies in [0.5, 1): multiples of 1/256 have 8 significant bits. They still fit float16's
    # subnormals, multiples of 2**-24, at 2**-16.
    mantissa, exponent = np.frexp(values)
    rounded = np.ldexp(np.round(mantissa * 256) / 256, exponent)
    return np.where(np.abs(rounded) < 2.0**-16, 0.0, rounded)


def permutation(seed: int, size: int) -> Array:
    """The renaming of token ids that `seed` stands for: id t becomes `permutation[t]`; seed 0 renames nothing."""
    return np.random.default_rng(seed).permutation(size) if seed else np.arange(size)


@lru_cache(maxsize=128)
def seeded_weights(model: Seeded) -> dict[str, Array]:
    """State dict of a built-in model: read-only float64 arrays, weight matrices as [out, in]."""
    state = _transparent_weights(model) if model.weights == "transparent" else _noisy_weights(model)
    if model.relabel:
        new_id = permutation(model.relabel, model.vocab_size)
        for name in (*ROWS_BY_TOKEN, *model.architecture.words.rows_by_token):
            if name in state:
                renamed_rows = np.empty_like(state[name])
                # Row t of embedding and head becomes row `renamed[t]`; no other weight knows token ids.
                renamed_rows[new_id] = state[name]
                state[name] = renamed_rows
    # The result is cached: a caller that wrote to it would change the model of later cases.
    for array in state.values():
        array.flags.writeable = False
    return state


def shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of the architecture's state dict."""
    hidden = arch.hidden_size
    table: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (arch.vocab_size, hidden)}
    for layer in range(arch.layers):
        table |= layer_shapes(arch, layer)
    table |= arch.words.beside_layers(arch)
    table["model.norm.weight"] = (hidden,)
    if not arch.tied:
        table["lm_head.weight"] = (arch.vocab_size, hidden)
    return table


def _margin_weights(arch: Architecture, seed: int | list[int]) -> dict[str, Array]:
    draw = np.random.default_rng(seed)
    state = {}
    for name, shape in shapes(arch).items():
        noise = draw.normal(size=shape)
        fixed = next((value for end, value in arch.words.fixed.items() if name.endswith(end)), None)
        if fixed is not None:
            values = np.full(shape, fixed)
        elif name.endswith(GAINS):
            # Around the weight with which the family's norm multiplies by 1.
            values = arch.words.resting_gain + 0.1 * noise
            if arch.words.unscaled and name.endswith("q_norm.weight"):
                values /= np.sqrt(shape[-1])
        elif name.endswith("bias"):
            values = 0.3 * noise
        elif name.endswith("base_kernel"):
            values = 0.5 + 0.5 * noise
        elif "embed_tokens" in name:
            # Tied embeddings are also the head: they carry its gain, less what the final norm leaves of it.
            values = noise * (HEAD_GAIN / np.sqrt(shape[-1]) if arch.tied else 1.0)
        else:
            gain = {"q_proj": QUERY_KEY_GAIN, "k_proj": QUERY_KEY_GAIN}.get(name.split(".")[-2], 1.0)
            gain = HEAD_GAIN if name == "lm_head.weight" else gain
            gain = ROUTER_GAIN if name.endswith(ROUTER) else gain
            values = noise * gain / np.sqrt(shape[-1])
        state[name] = representable(values)
    return state


def _noisy_weights(model: Seeded) -> dict[str, Array]:
    """The margin weights of the seed with the model's share of noise, of the same standard deviation; norms stay."""
    state = _margin_weights(model.architecture, model.seed)
    if not model.noise:
        return state
    noise = _margin_weights(model.architecture, [model.seed, 1])
    margin_share = np.sqrt(1.0 - model.noise**2)
    for name, values in state.items():
        if not name.endswith(GAINS):
            state[name] = representable(margin_share * values + model.noise * noise[name])
    return state


PROBE_CODES = 32
"""Number of rows that one forward of the transparent probe can tell apart."""


def probe_architecture(arch: Architecture) -> Architecture:
    """`arch` resized so that its transparent weights can name PROBE_CODES rows; heads, windows and chunks stay."""
    num_codes = PROBE_CODES
    return Architecture(
        family=arch.family,
        vocab_size=arch.heads * num_codes + 1,
        hidden_size=_probe_width(arch, num_codes),
        # The feed-forward weights are zero, so the width does not matter.
        intermediate_size=2,
        heads=arch.heads,
        kv_heads=arch.kv_heads,
        head_dim=num_codes,
        windows=arch.windows,
        norm_eps=arch.norm_eps,
        max_positions=arch.max_positions,
        qkv_bias=arch.qkv_bias,
        output_bias=arch.output_bias,
        mlp_bias=arch.mlp_bias,
        qk_norm=arch.qk_norm,
        chunks=arch.chunks,
        unrotated=arch.unrotated,
        floor_scale=arch.floor_scale,
        attn_scale=arch.attn_scale,
        score_cap=arch.score_cap,
        settings=arch.settings.probed(num_codes),
    )


def _probe_width(arch: Architecture, num_codes: int) -> int:
    """One block for the codes, and one for each head; Llama's config wants a multiple of the number of heads.

    Where norms subtract the mean each block has a negative twin.
    """
    width = -(-(1 + arch.heads) * num_codes // arch.heads) * arch.heads
    return 2 * width if arch.words.centred_norms else width


def _transparent_weights(model: Seeded) -> dict[str, Array]:
    """Weights of the transparent probe, for a `probe_architecture`.

    Token c in 1..head_dim embeds to the c-th unit vector of a block that only the value projection reads; token 0
    embeds to zero. Queries and keys are zero, so attention is uniform over what is visible. Only `probed_layer`
    writes, each head into a block of its own, and the head reads those blocks: logit h * head_dim + (c - 1) is
    nonzero exactly if head h of that layer sees a row holding token c.
    """
    arch = model.architecture
    num_codes = arch.head_dim
    blocks = (1 + arch.heads) * num_codes
    if arch.hidden_size < blocks or arch.tied:
        raise ValueError("transparent weights need the architecture that probe_architecture makes")
    state = {name: np.zeros(shape) for name, shape in shapes(arch).items()}
    for name in state:
        if name.endswith(GAINS):
            state[name][:] = arch.words.resting_gain
    state["model.embed_tokens.weight"][1 : num_codes + 1, :num_codes] = np.eye(num_codes)
    # All other layers have a zero output projection: the residual stream passes them unchanged.
    prefix = f"model.layers.{model.probed_layer}.self_attn"
    if arch.words.projections is not None:  # latent vectors hold the codes, and each head's values are their latents
        state[f"{prefix}.kv_a_proj_with_mqa.weight"][:num_codes, :num_codes] = np.eye(num_codes)
        by_head = state[f"{prefix}.kv_b_proj.weight"].reshape(arch.heads, -1, num_codes)
        by_head[:, -num_codes:] = np.eye(num_codes)
    else:
        source = arch.kv_sources[model.probed_layer]
        name = "k" if arch.settings.keys_serve_as_values(arch, source) else "v"
        values = state[f"model.layers.{source}.self_attn.{name}_proj.weight"]
        for head in range(arch.layer_heads(source).kv_heads):
            values[head * num_codes : (head + 1) * num_codes, :num_codes] = np.eye(num_codes)
    state[f"{prefix}.o_proj.weight"][num_codes:blocks] = np.eye(arch.heads * num_codes)
    state["lm_head.weight"][: arch.heads * num_codes, num_codes:blocks] = np.eye(arch.heads * num_codes)
    if arch.words.centred_norms:  # whatever is written is written to a twin with the other sign: the mean is zero
        half = arch.hidden_size // 2
        embedding, written = state["model.embed_tokens.weight"], state[f"{prefix}.o_proj.weight"]
        embedding[:, half:] = -embedding[:, :half]
        written[half:] = -written[:half]
    return state


ADAPTER_GAIN = 0.5
"""Standard deviation of the entries of B A beside those of W; alpha / rank multiplies it."""


@lru_cache(maxsize=128)
def low_rank(model: Seeded) -> dict[str, tuple[Array, Array]]:
    """The matrices A [rank, in] and B [out, rank] of the model's adapter for each weight that it changes.

    They are read-only float64, and exact in every working dtype. A model without an adapter has none.
    """
    adapter = model.adapter
    if adapter is None:
        return {}
    # The seed of the model enters as well, so that two models have unlike adapters.
    draw = np.random.default_rng((adapter.seed, model.seed, adapter.rank))
    matrices = {}
    for name, (rows, columns) in ((n, s) for n, s in shapes(model.architecture).items() if adapter.names(n)):
        down = representable(draw.normal(size=(adapter.rank, columns)) / np.sqrt(columns))
        up = representable(draw.normal(size=(rows, adapter.rank)) * ADAPTER_GAIN / np.sqrt(adapter.rank))
        for array in (down, up):
            array.flags.writeable = False
        matrices[name] = down, up
    return matrices


@lru_cache(maxsize=128)
def image_embeddings(image: Image, width: int) -> Array:
    """The embeddings of the tokens of `image` in a model of hidden size `width`: read-only float64 [tokens, width].

    They are those of `Image.seed`, which is not 0, and exact in every working dtype. A block that is cut short has the
    first ones.
    """
    draw = np.random.default_rng((image.seed, width))
    rows = representable(draw.normal(size=(image.end - image.start, width)))
    rows.flags.writeable = False
    return rows


@lru_cache(maxsize=128)
def _draw_head(head: Head, target: Seeded) -> dict[str, Array]:
    # The seed of the target enters as well, so that two targets have unlike heads.
    draw = np.random.default_rng((head.seed, target.seed, len(head.TAG)))
    state = {}
    by_token = head.by_token(target.architecture)
    for name, shape in head.tensors(target.architecture).items():
        noise = draw.normal(size=shape)
        if name.endswith("norm.weight"):
            values = head.resting_gain(target.architecture) + 0.1 * noise
        elif name.endswith("bias"):
            values = 0.3 * noise
        else:
            gain = ROUTER_GAIN if name.endswith(ROUTER) else HEAD_GAIN if name in by_token else 1.0
            values = noise * gain / np.sqrt(shape[-1])
        state[name] = representable(values)
    for name in by_token:
        renamed_rows = np.empty_like(state[name])
        # Row t becomes row `renamed[t]`, as in the embedding of the target.
        renamed_rows[permutation(target.relabel, target.vocab_size)] = state[name]
        # A head reads every token of the target, and scores those of its vocabulary.
        is_reduced = bool(head.vocabulary) and name not in head.read_by_token
        state[name] = renamed_rows[list(head.vocabulary)] if is_reduced else renamed_rows
    if head.vocabulary:
        vocabulary = np.array(head.vocabulary)
        # Offsets, as published files have them: target id = draft id + d2t[draft id].
        state["d2t"] = vocabulary - np.arange(len(vocabulary))
        state["t2d"] = np.isin(np.arange(target.vocab_size), vocabulary)
    for array in state.values():
        array.flags.writeable = False
    return state


def seeded_head(head: Head, target: Seeded) -> dict[str, Array]:
    """The weights of `head` on `target`: read-only float64, matrices as [out, in]; d2t int64 and t2d bool if reduced.

    The tree of the head changes no weight.
    """
    return _draw_head(head.weights, target)


def head_weights(head: Head, target: Model) -> dict[str, Array]:
    """The weights of `head` on `target`, stored or seeded; see `seeded_head`.

    Raises:
        UnreadableCheckpoint: stored weights cannot be read, or are not those of the case.
    """
    if head.files is not None:
        return stored_head(head.weights, target)
    assert isinstance(target, Seeded), "a seeded head is made for a built-in target"
    return seeded_head(head, target)
