"""A low-rank adapter (LoRA, arXiv 2106.09685): its words.

A server holds the weights of one model, and each request may name an adapter. A projection W [out, in] that the adapter
names computes W x + (alpha / rank) B A x, with A [rank, in] and B [out, rank]. `specverify.reference.weights`
makes A and B from the seed.
"""

from dataclasses import dataclass

from specverify.reference.malformed import Malformed

PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
"""The projections that an adapter may name: `q` is `q_proj`, and so on."""

ADAPTED = ("llama", "pangu", "qwen2", "qwen3", "mistral", "seed_oss", "smollm3")
"""Families whose layers all have these projections as matrices of their own."""

MOST_RANK = 64
"""The largest rank of an adapter: a case file is small."""


@dataclass(frozen=True)
class Adapter:
    """A low-rank adapter of a built-in model.

    Attributes:
        rank: Rows of A, and columns of B.
        alpha: The product B A counts alpha / rank times.
        projections: The projections that it changes, in the order of PROJECTIONS; the same ones in every layer.
        seed: The seed of A and B.
    """

    rank: int
    alpha: float
    projections: tuple[str, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= MOST_RANK:
            raise Malformed("rank", f"{self.rank} is not from 1 to {MOST_RANK}")
        # `not (low < x <= high)` refuses NaN too.
        if not 0 < self.alpha <= 1024:
            raise Malformed("alpha", f"{self.alpha} is not above 0 and at most 1024")
        if not self.projections or list(self.projections) != [p for p in PROJECTIONS if p in self.projections]:
            raise Malformed("projections", f"some of {', '.join(PROJECTIONS)}, in this order, each once")
        if self.seed < 0:
            raise Malformed("seed", "seeds are not negative")

    @property
    def scale(self) -> float:
        """The factor of the product B A."""
        return self.alpha / self.rank

    def names(self, weight: str) -> bool:
        """Whether the adapter changes the weight of this name, which is that of a state dict."""
        module = weight.removesuffix(".weight").rsplit(".", 1)[-1]
        return weight.endswith("_proj.weight") and module.removesuffix("_proj") in self.projections
