"""Small built-in models that many tests judge, and architectures of checkpoints that they write."""

from specverify.properties.strategies.models import GALLERY
from specverify.reference.architecture import Architecture, Seeded

TINY_LLAMA = Seeded(GALLERY[0], 0)
"""One layer, one head, 5 tokens."""

LLAMA = Seeded(GALLERY[1], 0)
"""Two layers of two heads over one KV head, 17 tokens."""

OTHER_LLAMA = Seeded(GALLERY[1], 3)
"""The architecture of LLAMA with other weights."""

LARGE_LLAMA = Seeded(GALLERY[7], 0)
"""Three layers of six heads over three KV heads, 101 tokens."""

ONE_LAYER = Architecture("llama", 11, 8, 12, 2, 1, 4, (0,), max_positions=64)
"""Eleven tokens."""

TWO_LAYERS = Architecture("llama", 11, 8, 12, 2, 1, 4, (0, 0), max_positions=64)
"""ONE_LAYER with a second layer."""

ELEVEN_TOKENS = Seeded(ONE_LAYER, 1)
"""ONE_LAYER with weights."""

FOUR_TOKENS = Seeded(Architecture("llama", 4, 8, 8, 1, 1, 4, (0,), max_positions=12), 1)
"""One layer, one head, 12 positions."""
