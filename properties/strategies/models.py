"""Built-in models: a gallery over families, head counts, GQA ratios, windows, rotary variants and odd vocabularies."""

from functools import cache

from hypothesis import strategies as st

from reference.architecture import Architecture, Rope, Seeded

MAX_POSITIONS = 1024

SEEDS = 2
"""Seeds per architecture; few, so that engines find the model on their shelf."""

ROPES = {
    "default": Rope(),
    "theta": Rope(theta=500000.0),
    "linear": Rope(kind="linear", factor=2.0),
    "dynamic": Rope(kind="dynamic", factor=2.0),
    "yarn": Rope(kind="yarn", factor=4.0, original=64),
    "yarn-mscale": Rope(kind="yarn", factor=8.0, original=128, mscale=0.7, mscale_all_dim=1.1, truncate=False),
    "llama3": Rope(kind="llama3", factor=8.0, original=64),
}


def _arch(
    family: str, vocab: int, heads: int, kv_heads: int, head_dim: int, windows: tuple[int, ...], rope: str = "default",
    hidden: int = 16, tied: bool = False, chunks: tuple[int, ...] = (), unrotated: tuple[int, ...] = (), floor: int = 0,
    cap: float = 0.0,
) -> Architecture:  # fmt: skip
    biased = family == "pangu"
    return Architecture(
        family=family,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=24,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        windows=windows,
        rope=ROPES[rope],
        norm_eps=1e-6 if family in ("qwen2", "qwen3") else 1e-5,
        max_positions=MAX_POSITIONS,
        tied=tied,
        qkv_bias=biased or family == "qwen2",
        output_bias=biased,
        qk_norm=family in ("qwen3", "llama4"),
        chunks=chunks,
        unrotated=unrotated,
        floor_scale=floor,
        attn_scale=0.5 if floor else 0.1,
        score_cap=cap,
    )


GALLERY: tuple[Architecture, ...] = (
    _arch("llama", 5, 1, 1, 4, (0,)),
    _arch("llama", 17, 2, 1, 4, (0, 0)),
    _arch("pangu", 11, 2, 2, 4, (0,)),
    _arch("qwen2", 13, 2, 1, 8, (0, 4)),
    _arch("qwen3", 19, 2, 1, 8, (0, 0)),
    _arch("mistral", 23, 2, 1, 4, (5, 5)),
    _arch("llama", 31, 4, 2, 4, (0, 0), "llama3", tied=True),
    _arch("llama", 101, 6, 3, 8, (0, 0, 0), "theta", hidden=18),
    _arch("llama", 3, 4, 4, 4, (0,), "linear"),
    _arch("llama", 64, 4, 1, 8, (0, 0), "yarn", hidden=24),
    _arch("llama", 29, 2, 2, 6, (0, 0), "dynamic"),
    _arch("pangu", 47, 4, 2, 4, (0, 0), "yarn-mscale"),
    _arch("pangu", 127, 4, 1, 8, (0, 0), hidden=20, tied=True),
    _arch("qwen2", 37, 4, 4, 4, (0, 0), "yarn"),
    _arch("qwen2", 59, 6, 2, 4, (0, 7, 7), "theta", hidden=24, tied=True),
    _arch("qwen3", 7, 1, 1, 8, (0,)),
    _arch("qwen3", 67, 4, 2, 6, (0, 6), "linear", tied=True),
    _arch("qwen3", 97, 8, 2, 4, (3, 0, 3), "theta", hidden=24),
    _arch("mistral", 2, 2, 2, 4, (3, 3)),
    _arch("mistral", 41, 4, 2, 8, (16, 16), "theta"),
    _arch("mistral", 73, 4, 1, 4, (1, 1), hidden=20),
    _arch("mistral", 89, 3, 1, 6, (0, 0), "llama3", hidden=18, tied=True),
    _arch("llama4", 15, 2, 1, 4, (0, 0), chunks=(4, 0), unrotated=(1,)),
    _arch("llama4", 43, 4, 2, 4, (0, 0, 0), "theta", tied=True, chunks=(8, 0, 8), unrotated=(1,), floor=5),
    _arch("llama4", 9, 2, 2, 8, (0, 0), chunks=(8, 8)),
    _arch("llama", 21, 2, 1, 4, (0, 0), cap=1.0),
    _arch("qwen2", 35, 4, 2, 4, (0, 6), "theta", cap=1.5),
)
"""Simplest first, so that shrinking ends there."""

QUICK = 10
"""Architectures drawn twice as often as the others."""

CHUNKED = tuple(at for at, arch in enumerate(GALLERY) if any(arch.chunks))
"""Those that attend in chunks, drawn twice as often too: few they are, and much goes wrong at the end of a chunk."""

CAPPED = tuple(at for at, arch in enumerate(GALLERY) if arch.score_cap)
"""Those whose attention has a soft cap, drawn twice as often for the same reason: nothing else shows a dropped one."""


def targets() -> st.SearchStrategy[Seeded]:
    """Target models."""
    index = st.sampled_from((*range(QUICK), *CHUNKED, *CAPPED, *range(len(GALLERY))))
    return st.builds(lambda at, seed: Seeded(GALLERY[at], seed), index, st.integers(0, SEEDS - 1))


@cache
def small(vocab: int, which: int) -> Seeded:
    """A draft model for a vocabulary: one layer, or two with a window."""
    if which == 0:
        return Seeded(_arch("llama", vocab, 1, 1, 4, (0,)), 7)
    return Seeded(_arch("mistral", vocab, 2, 1, 4, (4, 4)), 8)


def drafts(target: Seeded) -> st.SearchStrategy[Seeded]:
    """Draft models for `target`: strangers, or the target itself, whose every guess is right."""
    return st.sampled_from((small(target.vocab_size, 0), small(target.vocab_size, 1), target, target))
