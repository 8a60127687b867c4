"""Rules of architectures, rotary variants and seeded models: each limit is met, and passed by one step."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from specverify.reference.architecture import Architecture, Rope, Seeded
from specverify.reference.malformed import Malformed

ARCH = Architecture("llama", 5, 8, 8, 2, 1, 4, (0, 3), max_positions=64)
CHUNKED = replace(ARCH, family="llama4", windows=(0, 0), chunks=(4, 0))
PROBE = Architecture("llama", 9, 12, 2, 2, 1, 4, (0, 0))
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim", "max_positions")

# 2^22 weights: 1024 wide, times 960 tokens in and out and a layer of 2 * (2 + 2) * 8 + 3 * 704.
LARGE = Architecture("llama", 960, 1024, 704, 2, 2, 8, (0,))


def arch(**changes: object) -> Callable[[], object]:
    return lambda: replace(ARCH, **changes)  # type: ignore[arg-type]


def chunked(**changes: object) -> Callable[[], object]:
    return lambda: replace(CHUNKED, **changes)  # type: ignore[arg-type]


def rope(kind: str, **changes: object) -> Callable[[], object]:
    return lambda: Rope(**{"kind": kind, "factor": 2.0, "original": 16, **changes})  # type: ignore[arg-type]


def seeded(architecture: Architecture = ARCH, **changes: object) -> Callable[[], object]:
    return lambda: Seeded(architecture, **{"seed": 0, **changes})  # type: ignore[arg-type]


def longrope(short: int, long: int) -> Callable[[], object]:
    return arch(rope=Rope(kind="longrope", original=16, short_factor=(1.0,) * short, long_factor=(1.0,) * long))


ALLOWED: dict[str, Callable[[], object]] = {
    "sizes of one": lambda: Architecture("llama", 1, 1, 1, 1, 1, 2, (0,), max_positions=1),
    "a window of one": arch(windows=(1, 0)),
    "an epsilon of 1": arch(norm_eps=1.0),
    "a window beside a chunk": chunked(windows=(0, 3)),
    "a chunk of one": chunked(chunks=(1, 0)),
    "all layers unrotated": chunked(unrotated=(0, 1)),
    "a temperature every token": chunked(unrotated=(1,), floor_scale=1),
    "the largest attn_scale": chunked(attn_scale=100.0),
    "factors for every pair": longrope(2, 2),
    "factors of another variant": arch(rope=Rope(short_factor=(1.0,))),
    "a base just above 1": lambda: Rope(theta=1.01),
    "a factor of 1": rope("linear", factor=1.0),
    "longrope by less than 1": rope("longrope", factor=0.5),
    "a factor that default ignores": rope("default", factor=0.5),
    "an original of 2": rope("yarn", original=2),
    "no original for linear": rope("linear", original=0),
    "no original for dynamic": rope("dynamic", original=0),
    "the last layer probed": seeded(PROBE, weights="transparent", probed_layer=1),
    "seeds of nothing": seeded(relabel=0),
    "the longest": seeded(replace(ARCH, max_positions=4096)),
    "the largest": seeded(LARGE),
    "a wider probe": seeded(replace(PROBE, hidden_size=13), weights="transparent"),
}

BROKEN: dict[str, tuple[Callable[[], object], str]] = {
    **{f"{name} of 0": (arch(**{name: 0}), f"{name}: 0 is not a size") for name in SIZES},
    "a family that there is not": (arch(family="gpt"), "family: 'gpt' is none"),
    "no layer": (arch(windows=()), "windows: a model has at least one"),
    "a negative window": (arch(windows=(0, -1)), "windows: a window is a number"),
    "heads that share unevenly": (arch(heads=3, kv_heads=2), "kv_heads: 3 heads do not share 2"),
    "an epsilon of 0": (arch(norm_eps=0.0), "norm_eps: 0.0 is not above 0"),
    "an epsilon above 1": (arch(norm_eps=1.01), "norm_eps: 1.01 is not"),
    "a chunk too few": (chunked(chunks=(4,)), "chunks: 1 entries for 2 layers"),
    "a negative chunk": (chunked(chunks=(4, -1)), "chunks: a chunk is a number"),
    "no chunk at all": (chunked(chunks=(0, 0)), "chunks: no layer has a chunk"),
    "a window and a chunk": (chunked(windows=(3, 0)), "chunks[0]: a layer has a window or a chunk"),
    "an unrotated layer past the last": (chunked(unrotated=(2,)), "unrotated: layers 0..1"),
    "a negative unrotated layer": (chunked(unrotated=(-1,)), "unrotated: layers 0..1"),
    "unrotated layers that descend": (chunked(unrotated=(1, 0)), "unrotated: layers 0..1"),
    "an unrotated layer twice": (chunked(unrotated=(1, 1)), "unrotated: layers 0..1"),
    "a negative temperature": (chunked(unrotated=(1,), floor_scale=-1), "floor_scale: -1 is negative"),
    "a temperature of no layer": (chunked(floor_scale=1), "floor_scale: scales the queries of unrotated"),
    "an attn_scale of 0": (chunked(attn_scale=0.0), "attn_scale: 0.0 is not"),
    "an attn_scale above 100": (chunked(attn_scale=100.5), "attn_scale: 100.5 is not"),
    "a short factor too few": (longrope(1, 2), "rope.short_factor: 1 factors for 2"),
    "a long factor too many": (longrope(2, 3), "rope.long_factor: 3 factors for 2"),
    "a variant that there is not": (rope("ntk"), "kind: 'ntk' is none"),
    "a base of 1": (lambda: Rope(theta=1.0), "theta: 1.0 is not a rotary base"),
    **{
        f"{kind} by less than 1": (rope(kind, factor=0.99), "factor: 0.99 does not stretch")
        for kind in ("linear", "dynamic", "yarn", "llama3")
    },
    **{
        f"{kind} of an original of 1": (rope(kind, original=1), f"original: {kind} needs")
        for kind in ("yarn", "llama3", "longrope")
    },
    "weights that there are not": (seeded(weights="zero"), "weights: 'zero' is neither"),
    "a probe past the last layer": (seeded(probed_layer=2), "probed_layer: 2 is not one of 2"),
    "a negative probe": (seeded(probed_layer=-1), "probed_layer: -1 is not"),
    "a negative seed": (seeded(seed=-1), "seed: seeds are not negative"),
    "a negative relabel": (seeded(relabel=-1), "relabel: seeds are not negative"),
    "one longer": (seeded(replace(ARCH, max_positions=4097)), "architecture.max_positions: 4097; a built-in"),
    "one larger": (seeded(replace(LARGE, vocab_size=961)), "architecture: 4196352 weights"),
    "a probe of another vocabulary": (
        seeded(replace(PROBE, vocab_size=10), weights="transparent"),
        "weights: transparent weights need",
    ),
    "a probe too narrow": (
        seeded(replace(PROBE, hidden_size=11), weights="transparent"),
        "weights: transparent weights need",
    ),
    "a tied probe": (seeded(replace(PROBE, tied=True), weights="transparent"), "weights: transparent weights need"),
}


def test_what_a_limit_allows_is_made() -> None:
    for make in ALLOWED.values():
        make()
    assert LARGE.weights == 2**22


@pytest.mark.parametrize("name", BROKEN)
def test_what_passes_a_limit_is_refused_where_it_stands(name: str) -> None:
    make, line = BROKEN[name]
    with pytest.raises(Malformed) as error:
        make()
    assert str(error.value).startswith(line)
