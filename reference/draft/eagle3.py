"""Eagle3: an EAGLE-3 head, which fuses a token with states of several layers.

`fc` mixes the target's states to h; attention reads `[norm(embedding(x)); norm(h)]`; the residual is h. The output of
the layer is the state of the next row, and its norm gives the scores through a head of the draft's own, over a part of
the target's vocabulary. Draft id d means target id d + d2t[d]. The embedding is the target's matrix. Further decoder
layers are plain Llama layers on the output of the first (speculators, vLLM); the last one's output is fed back.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from specverify.reference.architecture import Architecture, Model, Seeded
from specverify.reference.draft.base import Tokens
from specverify.reference.draft.head import TOKENS_SCHEMA
from specverify.reference.draft.layer_head import (
    MOST_LAYERS,
    LayerHead,
    check_layers,
    decoder_layer,
    further_layer,
    layer_head_schema,
)
from specverify.reference.malformed import Malformed
from specverify.reference.rules import OMIT_DEFAULT

LAYER_PREFIX = "midlayer"
"""The prefix of the decoder layer in published checkpoints."""

NORMS = (
    f"{LAYER_PREFIX}.input_layernorm",
    f"{LAYER_PREFIX}.hidden_norm",
    f"{LAYER_PREFIX}.post_attention_layernorm",
    "norm",
)
"""The norms of the embedding, of h, after attention, and of the output."""


def layer_prefix(number: int) -> str:
    """The prefix of the decoder layer `number`, the first of which is AT."""
    return f"layers.{number}" if number else LAYER_PREFIX


EMBEDDING = "embed_tokens.weight"
"""The name of a head's own embedding."""

MOST_HIDDEN = 65536
"""The largest width of a head's rows."""


@dataclass(frozen=True)
class Eagle3(LayerHead):
    """An EAGLE-3 head.

    Attributes:
        vocabulary: Target ids that the head can name, ascending, by draft id; empty for all of them.
        norm_before_residual: Whether the residual is the normed h in place of h.
        norm_output: Whether the normed output is the state of the next row (EAGLE 3.1).
        layers: The number of decoder layers, all of the sizes of `layer`.
        hidden_size: The width of the head's rows where it is not the target's, 0 where it is. Such a head has an
            embedding of its own.
    """

    TAG = "eagle3"
    WORD = "EAGLE-3"
    _FLAG = {"type": "boolean"}  # noqa: RUF012 - a part of SCHEMA
    SCHEMA = layer_head_schema(
        {
            "layers": {"type": "integer", "minimum": 1, "maximum": MOST_LAYERS},
            "hidden_size": {"type": "integer", "minimum": 1, "maximum": MOST_HIDDEN},
        },
        vocabulary=TOKENS_SCHEMA, norm_before_residual=_FLAG, norm_output=_FLAG,
    )  # fmt: skip

    vocabulary: tuple[int, ...] = ()
    norm_before_residual: bool = False
    norm_output: bool = False
    layers: int = field(default=1, metadata=OMIT_DEFAULT)
    hidden_size: int = field(default=0, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(a >= b for a, b in zip(self.vocabulary, self.vocabulary[1:], strict=False)):
            raise Malformed("vocabulary", "target ids must ascend")
        check_layers(self.layers)
        if not 0 <= self.hidden_size <= MOST_HIDDEN:
            raise Malformed("hidden_size", f"{self.hidden_size} is no width from 1 to {MOST_HIDDEN}")

    @property
    def modules(self) -> int:
        """See `LayerHead`."""
        return self.layers

    def check_target(self, target: Model) -> None:
        """See `Draft`; the embeddings of an image are as wide as the target's."""
        super().check_target(target)
        if self.sees_images and self.hidden_size and isinstance(target, Seeded):
            width = target.architecture.hidden_size
            if self.hidden_size != width:
                raise Malformed("sees_images", f"rows of {self.hidden_size}, and an image's embeddings have {width}")

    def tensors(self, target: Architecture) -> dict[str, tuple[int, ...]]:
        """See `Head`; `lm_head` has a row for every target id, of which the rows of `vocabulary` are the head's."""
        hidden = self.hidden_size or target.hidden_size
        return {
            **({EMBEDDING: (target.vocab_size, hidden)} if self.hidden_size else {}),
            "fc.weight": (hidden, self.reads.parts * target.hidden_size),
            **decoder_layer(LAYER_PREFIX, self.layer, 2 * hidden, hidden),
            **{f"{name}.weight": (hidden,) for name in NORMS},
            "lm_head.weight": (target.vocab_size, hidden),
            **{
                name: shape
                for number in range(1, self.layers)
                for name, shape in further_layer(number, self.layer, hidden)
            },
        }

    def by_token(self, target: Architecture) -> tuple[str, ...]:
        """See `Head`."""
        return ("lm_head.weight", *self.read_by_token)

    @property
    def read_by_token(self) -> tuple[str, ...]:
        """See `Head`."""
        return (EMBEDDING,) if self.hidden_size else ()

    def with_renamed_tokens(self, rename: Callable[[Tokens], Tokens], relabel: int) -> "Eagle3 | None":
        """See `Draft`; the vocabulary must ascend, whatever order the new ids have."""
        head = super().with_renamed_tokens(rename, relabel)
        return None if head is None else replace(head, vocabulary=tuple(sorted(rename(self.vocabulary))))

    def simpler(self) -> Iterator["Eagle3"]:
        """The head with a smaller dynamic tree, with one layer, without a reduced vocabulary, and without each flag."""
        yield from super().simpler()
        if self.files is None:
            yield from self.with_defaults("layers", "hidden_size", "vocabulary", "norm_before_residual", "norm_output")
