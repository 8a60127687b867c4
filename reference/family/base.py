"""Family: what the words of a case know of a model family, before anyone computes with it.

A family's formulas stand in `reference.oracle.family`, and how the engine opens its model stands in
`backends.engine.model.family`, each in a file of the family.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LayerNorms:
    """The norms of one decoder layer, by their names in a state dict; None where the family has none there.

    Attributes:
        before_attention: Of the input of attention.
        before_feed_forward: Of the input of the feed-forward block.
        after_attention: Of what attention adds to the residual stream.
        after_feed_forward: Of what the feed-forward block adds to the residual stream.
    """

    before_attention: str = "input_layernorm"
    before_feed_forward: str = "post_attention_layernorm"
    after_attention: str | None = None
    after_feed_forward: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names that the family has."""
        every = (self.before_attention, self.before_feed_forward, self.after_attention, self.after_feed_forward)
        return tuple(name for name in every if name is not None)


@dataclass(frozen=True)
class Family:
    """A family of decoder-only transformers.

    Attributes:
        name: Its name in case files.
        norms: The norms of each layer.
        resting_gain: The weight of a norm that multiplies by 1: seeded weights of norms lie around it.
        query_key_gains: Whether the norms of queries and keys, where a model has them, have weights.
        settings: The numbers that this family alone has, each with its default; `Architecture.settings` holds those
            of one model that differ.
        drawn: Architectures that generated cases run, as fields of `Architecture` without `family`, the simplest
            first. The families whose list is empty are drawn from `properties.strategies.models.GALLERY`.
    """

    name: str
    norms: LayerNorms = LayerNorms()
    resting_gain: float = 1.0
    query_key_gains: bool = True
    settings: Mapping[str, float] = field(default_factory=dict)
    drawn: tuple[Mapping[str, Any], ...] = ()
