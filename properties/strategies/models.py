"""Strategies for built-in models: a gallery of small architectures.

The gallery covers families, head counts, GQA ratios, windows, chunks, rotary variants and odd vocabularies.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache

from hypothesis import strategies as st

from specverify.properties.strategies.swarm import GRAMMARS, LARGE_VOCABULARY, SHARES, WIDE_HEADS, Swarm
from specverify.properties.target_traits import TRAITS
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Architecture, Rope, Seeded
from specverify.reference.family import FAMILIES
from specverify.reference.malformed import Malformed
from specverify.reference.parallel import RANKS, sharding_refusal

MAX_POSITIONS = 1024
"""Positions of the models of the gallery."""

FAR_POSITIONS = 4096
"""Positions of the models for long prompts; `specverify.reference.architecture` admits no more."""

SEEDS = 2
"""Weight seeds per architecture; few, so that engines find most models already loaded."""

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
    # Parameters that a family fixes follow from its name; the others are arguments.
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


HEAD_DIMS = (16, 64, 128, 32, 80, 96, 256)
"""Widths of heads of real models, and of the tiles of their kernels."""

SPELLING = 24
"""Token ids with which every language of drawn grammars is spelt."""

VOCABULARIES = (300, 2_049) * 10 + (32_000, 151_936)
"""Sizes of large vocabularies: beyond a byte, a block of 1,024 ids twice, and two of real models, which are dear."""

LARGEST_SAMPLED = 32_000
"""The largest vocabulary from whose laws a drawn request samples, on an engine that also decodes greedily."""

LISTED = 2_049
"""The largest vocabulary for each of whose ids a case lists a piece of text, a place in a grammar or a draft's id."""

LOADING = ("families", "soft_caps", "sinks", "indexed", "unequal_widths", "least_window", "ropes", "head_multiple")
"""The fields of abilities that `Abilities.not_loaded` reads."""

WIDEST_ROWS = 512
"""Most width of all heads together in a drawn model."""


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
    *(
        Architecture(name, **{"max_positions": MAX_POSITIONS, **fields, "rope": Rope(**fields.get("rope", {}))})
        for rare in (False, True)
        for name, family in FAMILIES.items()
        for fields in family.drawn
        if family.rare == rare
    ),
)
"""All architectures, simplest first, so that shrinking ends there; last, those that the family files list."""

DENSE_FAR = (
    GALLERY[0],
    _arch("llama", 17, 2, 1, 4, (0,)),
    _arch("pangu", 11, 2, 2, 4, (0,)),
    _arch("mistral", 7, 2, 1, 4, (600,)),
)
"""Architectures of one layer for long prompts: further layers cost the oracle most at 1,024 columns.

Where kernels split a prefix of 1,024 columns, the window of 600 columns begins inside one of the parts.
"""


def _shallowest(trait: str) -> Architecture:
    """The architecture with a trait that has the fewest layers."""
    return min((arch for arch in GALLERY if TRAITS[trait](arch)), key=lambda arch: arch.layers)


TRAITS_FAR = tuple(
    dict.fromkeys(_shallowest(name) for name, has_trait in TRAITS.items() if not any(map(has_trait, DENSE_FAR)))
)
"""For each trait that these lack an architecture that has it."""

FAR: tuple[Architecture, ...] = tuple(
    replace(arch, max_positions=FAR_POSITIONS) for arch in (*DENSE_FAR, *DENSE_FAR, *TRAITS_FAR)
)
"""Models for long prompts, the dense ones of one layer twice as often."""

WIDE: tuple[Architecture, ...] = (
    _arch("llama", 5, 1, 1, 16, (0,)),
    _arch("llama", 17, 2, 1, 16, (0, 0)),
    _arch("qwen2", 13, 2, 1, 16, (0, 0)),
    _arch("qwen3", 19, 2, 1, 32, (0, 0)),
    _arch("mistral", 23, 2, 1, 16, (0, 0), "theta", hidden=24),
    _arch("llama", 31, 4, 2, 16, (0, 0), "theta", tied=True),
    _arch("qwen2", 59, 4, 4, 16, (0,), tied=True),
    _arch("qwen3", 101, 2, 2, 16, (0, 0), "theta", hidden=24),
    _arch("pangu", 11, 2, 2, 16, (0,)),
    _arch("mistral", 41, 4, 2, 16, (5, 5)),
)
"""Models with heads of 16 or 32 for engines whose kernels take no narrower ones; no other engine's cases draw them."""

BROAD: tuple[Architecture, ...] = (
    _arch("llama", 5, 1, 1, 32, (0,), hidden=32),
    _arch("llama", 17, 2, 1, 32, (0, 0), hidden=64),
    _arch("qwen2", 13, 2, 1, 32, (0, 0), hidden=64),
    _arch("qwen3", 101, 2, 2, 32, (0, 0), "theta", hidden=24),
    _arch("mistral", 41, 2, 1, 32, (5, 5), hidden=24),
    _arch("llama", 31, 4, 2, 32, (0, 0), "llama3", hidden=32, tied=True),
    _arch("qwen2", 127, 1, 1, 32, (0,), "theta", hidden=32, tied=True),
    _arch("mistral", 113, 3, 1, 32, (0, 0), "theta", hidden=24),
    replace(_arch("llama", 64, 2, 1, 32, (0, 0), hidden=24), rope=Rope(kind="yarn", factor=4.0, original=256)),
    _arch("llama", 3, 2, 2, 32, (0,), "linear", hidden=24),
    _arch("pangu", 47, 2, 1, 32, (0, 0), hidden=24),
    _arch("qwen2", 29, 2, 2, 32, (0,), "dynamic", hidden=64),
    *(replace(arch, head_dim=32) for arch in GALLERY if arch.family == "gemma2"),
)
"""Models with heads of 32 for engines whose kernels take no narrower ones; no other engine's cases draw them.

Qwen2's hidden rows are as wide as its heads together: engines derive the width of a head from them.
Yarn stretches its original context to all positions of the model: engines make a table of that length.
"""

FIRST_RARE = next(index for index, arch in enumerate(GALLERY) if arch.words.rare)
"""The index from which on stand the architectures of families with `rare` set."""

FIRST_OF_FAMILY = tuple(
    index for index in range(FIRST_RARE, len(GALLERY)) if GALLERY[index].family != GALLERY[index - 1].family
)
"""Indices of the first of them of each family."""

LATENT = tuple(index for index, arch in enumerate(GALLERY) if arch.settings.latent_rank)
"""Indices of models with latent attention, whose rows are cached, paged and moved in a form of their own."""

RECURRENT = tuple(index for index, arch in enumerate(GALLERY) if arch.recurrent)
"""Indices of models with a recurrent state: about one case in 20."""

BESIDE_ATTENTION = tuple(index for index in RECURRENT if GALLERY[index].words.beside_attention)
"""Indices of models with a recurrent state beside attention."""

WITHOUT_ATTENTION = tuple(index for index in RECURRENT if index not in BESIDE_ATTENTION)
"""Indices of models with a recurrent state in place of attention; every second of them is drawn twice as often."""

SINKS = tuple(index for index, arch in enumerate(GALLERY) if arch.words.sinks)
"""Indices of models with attention sinks."""

RARE = (
    *LATENT,
    *SINKS * 2,
    *(index for index in (*range(FIRST_RARE, len(GALLERY)), *FIRST_OF_FAMILY) if index not in BESIDE_ATTENTION),
    *(
        BESIDE_ATTENTION[index // 2] if index % 2 == 0 and index // 2 < len(BESIDE_ATTENTION) else alone
        for index, alone in enumerate(WITHOUT_ATTENTION)
    ),
)
"""Indices of these architectures, as often as they are drawn beside four times all others: one case in five.

The first of each family, and models with latent attention, are drawn twice as often as the others. Models with sinks,
which alone reveal a forgotten sink, have two shares more than they would have.
"""

NARROW = 6
"""How many times more models with latent attention, without experts and an indexer, are drawn in 16 bits.

The kernels for latent rows run there alone.
"""

QUICK = 10
"""Architectures drawn twice as often as the others."""

CHUNKED = tuple(index for index, arch in enumerate(GALLERY) if any(arch.chunks))
"""Indices of models with chunked attention; drawn twice as often, since they are few and chunk ends are error-prone."""

CAPPED = tuple(index for index, arch in enumerate(GALLERY[:FIRST_RARE]) if arch.score_cap)
"""Indices of models with a soft cap of attention; drawn twice as often, since only they reveal a dropped cap."""


@cache  # Hypothesis validates a strategy once, which takes longer than to draw from it
def targets(within: Abilities | None = None, dtype: str = "float32") -> st.SearchStrategy[Seeded]:
    """Target models that an engine loads, for cases of the working dtype `dtype`."""
    if within is not None and within.head_multiple > 2:
        return st.builds(Seeded, st.sampled_from(_narrow(wide(within), dtype)), st.integers(0, SEEDS - 1))
    indices = (*(*range(QUICK), *CHUNKED, *CAPPED, *range(FIRST_RARE)) * 4, *RARE)
    architectures = _narrow([GALLERY[index] for index in indices if _can_load(within, GALLERY[index])], dtype)
    return st.builds(Seeded, st.sampled_from(architectures), st.integers(0, SEEDS - 1))


def loading_limits(within: Abilities | None) -> Abilities | None:
    """The abilities that decide which models an engine loads; rounds that differ in others share their strategies."""
    return within and Abilities(dtypes=within.dtypes, **{name: getattr(within, name) for name in LOADING})


@lru_cache(maxsize=256)
def targets_of_traits(
    within: Abilities | None, dtype: str, traits: tuple[str, ...], in_parts: bool = False
) -> st.SearchStrategy[Seeded]:
    """The targets of `targets` that have one of `traits`, each architecture as often; any where none has.

    With `in_parts` they are those of them that can be shared out among ranks, where there are any; those for the most
    ranks are few, and twice as frequent.
    """
    pool = wide(within) if within is not None and within.head_multiple > 2 else GALLERY
    loading = [arch for arch in pool if _can_load(within, arch)]
    fitting = [arch for arch in loading if any(TRAITS[trait](arch) for trait in traits)]
    parted = [arch for arch in fitting or loading for count in RANKS[1:] if sharding_refusal(arch, count) is None]
    if in_parts and parted:
        fitting = parted
    if not fitting:
        return targets(within, dtype)
    return st.builds(Seeded, st.sampled_from(fitting), st.integers(0, SEEDS - 1))


@st.composite
def swarm_targets(draw: st.DrawFn, within: Abilities | None, dtype: str, swarm: Swarm) -> Seeded:
    """A target of one of the swarm's traits, or any, with wide heads or a large vocabulary where the swarm has them.

    A family that cannot have such a size keeps its own. Where the swarm favours several ranks, or has no others, the
    target can be shared out among them.
    """
    limits = loading_limits(within)
    in_parts = SHARES in swarm.favours or (within is not None and 1 not in within.ranks)
    chosen = swarm.traits or in_parts
    model = draw(targets_of_traits(limits, dtype, swarm.traits, in_parts) if chosen else targets(limits, dtype))
    if swarm.has(WIDE_HEADS):
        model = _resized(model, draw(st.sampled_from(swarm.head_dims or HEAD_DIMS)), within)
    if swarm.has(LARGE_VOCABULARY):
        vocabulary = draw(st.sampled_from(swarm.vocabularies or VOCABULARIES))
        # A head of its own would have as many weights again.
        model = _changed(
            model, lambda arch: replace(arch, vocab_size=vocabulary, tied=arch.tied or vocabulary > LISTED), within
        )
    if GRAMMARS in swarm.favours and model.vocab_size < SPELLING:
        model = _changed(model, lambda arch: replace(arch, vocab_size=SPELLING), within)
    return model


def _resized(model: Seeded, head_dim: int, within: Abilities | None) -> Seeded:
    """The model with heads of `head_dim`, narrower where all heads together would be wider than WIDEST_ROWS."""
    while model.architecture.heads * head_dim > WIDEST_ROWS:
        head_dim //= 2
    return _changed(model, lambda arch: widened(arch, head_dim), within)


def _changed(model: Seeded, change: Callable[[Architecture], Architecture], within: Abilities | None) -> Seeded:
    """The model with another architecture; as it is where that is refused, or the engine loads no such model."""
    try:
        changed = replace(model, architecture=change(model.architecture))
    except Malformed:
        return model
    return changed if _can_load(within, changed.architecture) else model


def can_list_ids(model: Seeded) -> bool:
    """Whether the vocabulary is so small that a case may list something for each of its ids."""
    return model.vocab_size <= LISTED


def _narrow(architectures: Sequence[Architecture], dtype: str) -> Sequence[Architecture]:
    """The members of `architectures`, and in 16 bits those with latent attention and no choices NARROW times more."""
    if dtype not in ("bfloat16", "float16"):
        return architectures
    latent = {
        arch for arch in architectures if arch.settings.latent_rank and not arch.mixes_rows and not arch.words.indexed
    }
    return [*architectures, *sorted(latent, key=architectures.index) * NARROW]


def wide(within: Abilities) -> tuple[Architecture, ...]:
    """The architectures of WIDE and of GALLERY that an engine loads; of BROAD for one that takes no head of 16.

    For heads of more than 32, those of BROAD are widened to them, and some to twice as wide ones.
    """
    if within.head_multiple <= WIDE[0].head_dim:
        architectures = (*WIDE, *GALLERY)
    elif within.head_multiple <= BROAD[0].head_dim:
        architectures = (*BROAD, *GALLERY)
    else:
        multiple = within.head_multiple
        architectures = tuple(_of_width(BROAD, multiple)) + tuple(_of_width(BROAD[:3], 2 * multiple))
    return tuple(architecture for architecture in architectures if _can_load(within, architecture))


def _of_width(architectures: Sequence[Architecture], head_dim: int) -> Iterator[Architecture]:
    """The architectures with heads of `head_dim`, without those that cannot have them: no head is of an odd width."""
    for architecture in architectures:
        with suppress(Malformed):
            yield Seeded(widened(architecture, head_dim), 0).architecture


def drawn_architectures(within: Abilities | None) -> tuple[Architecture, ...]:
    """Every architecture on which cases of an engine are drawn, sizes of a swarm aside; none where it loads none."""
    if within is not None and within.head_multiple > 2:
        return wide(within)
    return tuple(architecture for architecture in GALLERY if _can_load(within, architecture))


def widened(arch: Architecture, head_dim: int) -> Architecture:
    """The architecture with heads of `head_dim`, and with rows of all heads together where it has such rows."""
    # Engines derive the width of a head from such rows (see BROAD).
    hidden = arch.heads * head_dim if arch.heads * arch.head_dim == arch.hidden_size else arch.hidden_size
    settings = arch.settings.with_wider_heads(head_dim / arch.head_dim)
    return replace(arch, head_dim=head_dim, hidden_size=hidden, settings=settings)


@cache
def far_targets(within: Abilities | None = None, traits: tuple[str, ...] = ()) -> st.SearchStrategy[Seeded]:
    """Target models for prompts of up to 2050 tokens, of the families in `within`, with one of `traits` if any is."""
    every = far_architectures(within)
    fitting = tuple(arch for arch in every if any(TRAITS[trait](arch) for trait in traits))
    return st.builds(Seeded, st.sampled_from(fitting or every), st.integers(0, SEEDS - 1))


def far_architectures(within: Abilities | None) -> tuple[Architecture, ...]:
    """The architectures of FAR that an engine loads; none for an engine of other families."""
    return tuple(architecture for architecture in FAR if _can_load(within, architecture))


def _can_load(within: Abilities | None, architecture: Architecture) -> bool:
    return within is None or within.not_loaded(architecture) is None


@cache
def small_draft(vocab: int, number: int, positions: int = MAX_POSITIONS, width: int = 4) -> Seeded:
    """A draft model for a vocabulary, with heads of `width`: one layer, or two with a window."""
    if number == 0:
        arch, seed = _arch("llama", vocab, 1, 1, width, (0,), tied=vocab > LISTED), 7
    else:
        arch, seed = _arch("mistral", vocab, 2, 1, width, (4, 4), tied=vocab > LISTED), 8
    return Seeded(replace(arch, max_positions=positions), seed)


def candidates(target: Seeded) -> tuple[Seeded, ...]:
    """Draft models for `target`: two small unrelated models, and the target itself, which always guesses right."""
    vocab = target.vocab_size
    positions = target.architecture.max_positions
    # An engine that takes wide heads alone takes no narrower ones of a draft.
    width = target.architecture.head_dim if target.architecture.head_dim % 16 == 0 else 4
    return small_draft(vocab, 0, positions, width), small_draft(vocab, 1, positions, width), target


NOISES = (0.05, 0.1, 0.02, 0.05, 0.15)
"""Shares of noise in the weights of a draft that is to be accepted often, but not always."""


UNRELATED_SEED = 9
"""The weight seed of draft models with a trait; no target has it."""

TRAITED_SHARE = 3
"""Draft models of a round's traits, for each that is the target and each that is the target with noise."""


@lru_cache(maxsize=256)
def drafts_of_traits(within: Abilities | None, traits: tuple[str, ...] = ()) -> tuple[Architecture, ...]:
    """For each of `traits`, or for every one if that is empty, the architecture of least cost that an engine loads.

    A trait that no model of the engine has adds none.
    """
    loaded = sorted(drawn_architectures(within), key=lambda arch: (arch.layers, arch.heads * arch.head_dim))
    chosen = (next((arch for arch in loaded if TRAITS[name](arch)), None) for name in traits or TRAITS)
    return tuple(dict.fromkeys(arch for arch in chosen if arch is not None))


def unrelated_drafts(
    target: Seeded, within: Abilities | None = None, traits: tuple[str, ...] = ()
) -> tuple[Seeded, ...]:
    """Draft models of other weights for `target`: the two small ones, and of one architecture for each trait.

    With `traits` there are those of these traits alone, if there are any. Target and draft model may be of any two
    families: a small hybrid drafts for a dense target.
    """
    vocab = target.vocab_size
    small = candidates(target)[:2]
    of_traits: list[Seeded] = []
    for arch in drafts_of_traits(within, traits):
        tied = arch.tied or vocab > LISTED
        with suppress(Malformed):
            fitted = replace(arch, vocab_size=vocab, tied=tied, max_positions=target.architecture.max_positions)
            if _can_load(within, fitted):
                of_traits.append(Seeded(fitted, UNRELATED_SEED))
    if not traits:
        return (*small, *of_traits)
    return tuple(of_traits) or unrelated_drafts(target, within)


def drafts(target: Seeded, within: Abilities | None = None, traits: tuple[str, ...] = ()) -> st.SearchStrategy[Seeded]:
    """A draft model for `target`: the target itself or the target with noise, each a third of the time, or another.

    What a draft keeps between steps shows where some of its tokens are accepted. With `traits` another, which has one
    of them, is likelier.
    """
    noisy = st.sampled_from(NOISES).map(lambda noise: replace(target, noise=noise))
    unrelated = st.sampled_from(unrelated_drafts(target, within, traits))
    others = (unrelated,) * (TRAITED_SHARE if traits else 1)
    return st.sampled_from((*others, st.just(target), noisy)).flatmap(lambda kind: kind)


def close_drafts(target: Seeded) -> st.SearchStrategy[Seeded]:
    """The target with noise on its weights, so that engines accept about half of the tokens, or one in 16 unrelated.

    An unrelated draft is hardly ever accepted, and the target itself is never rejected: with those alone, most of
    verification would not be reached.
    """
    close = st.sampled_from(NOISES).map(lambda noise: replace(target, noise=noise))
    unrelated = st.sampled_from(candidates(target)[:2])
    return st.integers(0, 15).flatmap(lambda choice: unrelated if choice == 15 else close)


def other_drafts(target: Seeded, model: Seeded) -> st.SearchStrategy[Seeded]:
    """A draft model for `target` other than `model`."""
    return st.sampled_from([candidate for candidate in candidates(target) if candidate != model])
