"""Gemma 3, text model (arXiv 2503.19786; transformers `models/gemma3`).

Gemma 2 without soft caps and with norms of queries and keys. Five layers of six have a sliding window, and rotary
embedding to a base of their own.
"""

from dataclasses import dataclass

from specverify.reference.family.base import Family
from specverify.reference.family.gemma2 import GEMMA2, Gemma2Settings
from specverify.reference.family.settings import ArchitectureFields
from specverify.reference.malformed import Malformed


@dataclass(frozen=True)
class Gemma3Settings(Gemma2Settings):
    """Gemma 2's, and the base of rotary embedding in layers with a window; 0 for that of the others."""

    local_theta: float = 0.0

    def check(self, arch: ArchitectureFields) -> None:
        """See `Settings.check`."""
        base = self.local_theta
        if base and not base > 1:
            reason = f"local_theta of {base} is not a rotary base (more than 1), nor 0 for the model's"
            raise Malformed("settings", reason)


GEMMA3 = Family(
    "gemma3",
    norms=GEMMA2.norms,
    resting_gain=0.0,
    rare=True,
    settings=Gemma3Settings,
    drawn=(
        {
            "vocab_size": 25, "hidden_size": 16, "intermediate_size": 24, "heads": 2, "kv_heads": 1, "head_dim": 4,
            "windows": (4, 0), "norm_eps": 1e-6, "tied": True, "qk_norm": True,
            "rope": {"theta": 1000000.0, "kind": "linear", "factor": 8.0},
            "settings": Gemma3Settings(query_scalar=6.0, local_theta=100.0),
        },
        {
            "vocab_size": 53, "hidden_size": 16, "intermediate_size": 24, "heads": 4, "kv_heads": 2, "head_dim": 8,
            "windows": (5, 5, 0), "norm_eps": 1e-6, "qk_norm": True, "settings": Gemma3Settings(local_theta=50.0),
        },
    ),
)  # fmt: skip
