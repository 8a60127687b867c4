"""The timed parts of a first contact in sizes that a host computes in seconds: its times say nothing of a device."""

from dataclasses import replace

import pytest

from specverify.bench import attention
from specverify.first_contact import figures, parts, speed
from specverify.properties.strategies.draft.head import LAYERS
from tests.models import TINY_LLAMA

SPEED = {
    "TIMED_MODEL": TINY_LLAMA,
    "HEAD": replace(speed.HEAD, layer=LAYERS[0]),
    "TIMED_BACKEND": {"cuda": "cuda-fused-sdpa"},
    "DTYPE": "float32",
    "TOKENS": 2,
    "REPEATS": 1,
    "STEPS": 1,
}


def make_timed_parts_small(patch: pytest.MonkeyPatch) -> None:
    """Give forwards, heads, grids and ways of attention the smallest model and few sizes."""
    small = replace(attention.SETTINGS["cuda"], prefixes=(16,), nodes=(3,), batches=(1,), heads=2, kv_heads=1, dim=16)
    patch.setitem(attention.SETTINGS, "cuda", small)
    patch.setattr(figures, "TARGET", TINY_LLAMA)
    patch.setattr(figures, "TOKENS", 4)
    for name, value in SPEED.items():
        patch.setattr(speed, name, value)
    patch.setattr(parts, "TREES", {"nodes": (1, 3), "batch": (1, 2), "prefix": (4,)})
    patch.setattr(parts, "CONTEXTS", {"nodes": (3,), "batch": (1,), "prefix": (4, 9)})
