"""Eagle3: an EAGLE-3 head, which fuses a token with states of several layers.

`fc` mixes the target's states to h; attention reads `[norm(embedding(x)); norm(h)]`; the residual is h. The output of
the layer is the state of the next row, and its norm gives the scores through a head of the draft's own, over a part of
the target's vocabulary. Draft id d means target id d + d2t[d]. The embedding is the target's matrix. Further decoder
layers are plain Llama layers on the output of the first (speculators, vLLM); the last one's output is fed back.

P-EAGLE (arXiv 2602.01469; speculators, SpecForge, vLLM) is such a head that scores all levels in one forward. Behind
the root's row stand `mask_slots` rows of a mask token beside a state of the weights: `mask_hidden`, as wide as the
target's states side by side, which `fc` mixes as it mixes those. Row d of them scores the nodes at depth d + 1,
whatever their parents are. The rows are dropped after each proposal, so that no row of a tree is ever kept.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from specverify.reference.architecture import Architecture
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
from specverify.reference.tree import RankTree, Tree

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

MASK_STATE = "mask_hidden"
"""The name of the state beside a mask token in published checkpoints."""

MOST_MASKS = 64
"""Most rows of mask tokens; heads are trained with about 7."""

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
        mask_slots: Rows of mask tokens behind the root's, which score the levels below the first (P-EAGLE); 0 for
            levels that are run one after the other.
        mask_token: The target id that stands in those rows.
    """

    TAG = "eagle3"
    WORD = "EAGLE-3"
    _FLAG = {"type": "boolean"}  # noqa: RUF012 - a part of SCHEMA
    SCHEMA = layer_head_schema(
        {
            "layers": {"type": "integer", "minimum": 1, "maximum": MOST_LAYERS},
            "hidden_size": {"type": "integer", "minimum": 1, "maximum": MOST_HIDDEN},
            "mask_slots": {"type": "integer", "minimum": 0, "maximum": MOST_MASKS},
            "mask_token": {"type": "integer", "minimum": 0, "maximum": 2147483647},
        },
        vocabulary=TOKENS_SCHEMA, norm_before_residual=_FLAG, norm_output=_FLAG,
    )  # fmt: skip

    vocabulary: tuple[int, ...] = ()
    norm_before_residual: bool = False
    norm_output: bool = False
    layers: int = field(default=1, metadata=OMIT_DEFAULT)
    hidden_size: int = field(default=0, metadata=OMIT_DEFAULT)
    mask_slots: int = field(default=0, metadata=OMIT_DEFAULT, kw_only=True)
    mask_token: int = field(default=0, metadata=OMIT_DEFAULT, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(a >= b for a, b in zip(self.vocabulary, self.vocabulary[1:], strict=False)):
            raise Malformed("vocabulary", "target ids must ascend")
        check_layers(self.layers)
        if not 0 <= self.hidden_size <= MOST_HIDDEN:
            raise Malformed("hidden_size", f"{self.hidden_size} is no width from 1 to {MOST_HIDDEN}")
        if not 0 <= self.mask_slots <= MOST_MASKS:
            raise Malformed("mask_slots", f"{self.mask_slots} is no number of rows from 0 to {MOST_MASKS}")
        deepest = self.height if self.expansion is None else self.expansion.depth
        if self.mask_slots and deepest > self.mask_slots + 1:
            raise Malformed(
                "shape", f"a tree of depth {deepest}, and {self.mask_slots} mask tokens reach one level more"
            )

    @property
    def modules(self) -> int:
        """See `LayerHead`."""
        return self.layers

    def tensors(self, target: Architecture) -> dict[str, tuple[int, ...]]:
        """See `Head`; `lm_head` has a row for every target id, of which the rows of `vocabulary` are the head's."""
        hidden = self.hidden_size or target.hidden_size
        return {
            **({EMBEDDING: (target.vocab_size, hidden)} if self.hidden_size else {}),
            "fc.weight": (hidden, self.reads.parts * target.hidden_size),
            **({MASK_STATE: (self.reads.parts * target.hidden_size,)} if self.mask_slots else {}),
            **decoder_layer(LAYER_PREFIX, self.layer, 2 * hidden, hidden),
            **{f"{name}.weight": (hidden,) for name in NORMS},
            "lm_head.weight": (target.vocab_size, hidden),
            **{
                name: shape
                for number in range(1, self.layers)
                for name, shape in further_layer(number, self.layer, hidden)
            },
        }

    @property
    def by_token(self) -> tuple[str, ...]:
        """See `Head`."""
        return ("lm_head.weight", *self.read_by_token)

    @property
    def read_by_token(self) -> tuple[str, ...]:
        """See `Head`."""
        return (EMBEDDING,) if self.hidden_size else ()

    def with_renamed_tokens(self, rename: Callable[[Tokens], Tokens], relabel: int) -> "Eagle3 | None":
        """See `Draft`; the vocabulary must ascend, whatever order the new ids have."""
        head = super().with_renamed_tokens(rename, relabel)
        if head is None:
            return None
        mask_token = rename((self.mask_token,))[0] if self.mask_slots else self.mask_token
        return replace(head, vocabulary=tuple(sorted(rename(self.vocabulary))), mask_token=mask_token)

    @property
    def runs_nodes(self) -> bool:
        """See `LayerHead`; a head with mask tokens runs those in place of nodes."""
        return not self.mask_slots

    def token_fields(self) -> list[tuple[str, Tokens]]:
        """See `Draft`."""
        return [*super().token_fields(), *([("mask_token", (self.mask_token,))] if self.mask_slots else [])]

    def as_chain(self) -> "Eagle3":
        """See `Static`; with mask tokens the chain is no deeper than they reach."""
        if not self.mask_slots:
            return super().as_chain()
        height = min(max(self.height, 2), self.mask_slots + 1)
        return self.with_shapes((RankTree((0, *range(height)), (0,) * (height + 1)),))

    def with_fixed_tree(self, tree: Tree) -> "Eagle3 | None":
        """See `Draft`; None for a tree that is deeper than mask tokens reach."""
        reaches = not self.mask_slots or tree.height <= self.mask_slots + 1
        return super().with_fixed_tree(tree) if reaches else None

    @property
    def open_rows(self) -> int:
        """See `Draft`; with mask tokens, those and the root's row, whatever the tree."""
        return self.mask_slots + 1 if self.mask_slots else super().open_rows

    @property
    def settings_weight(self) -> int:
        """See `Draft`."""
        return self.mask_slots

    @property
    def description(self) -> str:
        """See `Draft`."""
        return f"{super().description}, {self.mask_slots} mask tokens" if self.mask_slots else super().description

    def simpler(self) -> Iterator["Eagle3"]:
        """The head with a smaller dynamic tree, with one layer, without a reduced vocabulary, and without each flag."""
        yield from super().simpler()
        if self.files is None:
            yield from self.with_defaults("layers", "hidden_size", "vocabulary", "norm_before_residual", "norm_output")
            if self.mask_slots:
                yield replace(self, mask_slots=0, mask_token=0)
                least = max((self.height if self.expansion is None else self.expansion.depth) - 1, 1)
                if self.mask_slots > least:
                    yield replace(self, mask_slots=least)
