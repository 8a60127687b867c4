"""LayerHead: the base of heads that run a decoder layer over tokens beside states.

A row holds the token x_{i+1} beside the state s_i, and its output scores the token after x_{i+1}. The row of a node of
the tree holds the node's token beside the output of its parent's row.

Engines differ in two conventions, and either choice of each is sound. No token's state stands before the first one: its
row is skipped, so that row i holds x_{i+1} (SafeAILab, vLLM, SGLang), or x_0 stands beside its own state s_0, so that
row i holds x_i (arXiv 2508.08192, section 3.4). A row then follows from the tokens up to its own number, as a column of
the target does, and pages of both hold the same tokens. After a verification the rows of all emitted tokens are run
beside the target's states, or those alone that the head has not run for the tree: accepted nodes with such a row keep
it, with the state that the head put out itself (the same section: the last token and its state alone).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from specverify.reference.architecture import Model, Rope, Seeded
from specverify.reference.draft.base import Tokens
from specverify.reference.draft.head import NOTHING, Head, head_schema
from specverify.reference.malformed import Malformed
from specverify.reference.rules import OMIT_DEFAULT

MOST_LAYERS = 8
"""Most decoder layers of a head; published heads have one to three."""

FIRST_TOKENS = ("skipped", "own-state")
"""What becomes of the first token: it has no row, or a row beside its own state."""

ALIGNMENTS = ("accepted", "last")
"""The rows that are run beside the target's states after a verification.

Those of all accepted tokens and the last one, or the last one's and that of an accepted node that the head did not run.
"""

ROPES = ("linear", "llama3", "yarn")
"""The variants of rotary embedding that a head's layer may have: those whose table is one for all lengths."""


@dataclass(frozen=True)
class HeadLayer:
    """The sizes of a head's decoder layer, whose hidden size is the target's.

    Attributes:
        theta: The base of the rotary embedding.
        rope: The variant of the rotary embedding, one of ROPES, with the same base; None for the plain one.
        sections: How many rotary pairs turn by the axes time, height and width (`mrope_section` of published configs),
            the pairs of the highest frequencies first; empty for a layer whose rows have one position.
    """

    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    theta: float = 10000.0
    norm_eps: float = 1e-5
    rope: Rope | None = field(default=None, metadata=OMIT_DEFAULT)
    sections: tuple[int, ...] = field(default=(), metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim", "intermediate_size"):
            if getattr(self, name) < 1:
                raise Malformed(name, f"{getattr(self, name)} is not a size")
        if self.heads % self.kv_heads:
            raise Malformed("kv_heads", f"{self.heads} heads do not share {self.kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise Malformed("head_dim", f"{self.head_dim} is odd; rotary embedding turns pairs")
        # `not a > b` instead of `a <= b`: NaN is refused too.
        if not self.theta > 1:
            raise Malformed("theta", f"{self.theta} is not a rotary base (more than 1)")
        if not 0 < self.norm_eps <= 1:
            raise Malformed("norm_eps", f"{self.norm_eps} is not above 0 and at most 1")
        if self.rope is not None and (self.rope.kind not in ROPES or self.rope.theta != self.theta):
            raise Malformed("rope", f"{self.rope.kind} to the base {self.rope.theta}: heads have {', '.join(ROPES)}")
        pairs = self.head_dim // 2
        if self.sections and (len(self.sections) != 3 or min(self.sections) < 0 or sum(self.sections) != pairs):
            raise Malformed(
                "sections", f"{list(self.sections)}: three numbers that share {pairs} rotary pairs, or none"
            )


SEEDED_SIZES = {"heads": 256, "kv_heads": 256, "head_dim": 256, "intermediate_size": 4096}
"""The largest sizes of seeded weights: a case file is small and must not ask for the memory of a machine."""

LAYER_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["heads", "kv_heads", "head_dim", "intermediate_size"],
    "properties": {
        **{name: {"type": "integer", "minimum": 1, "maximum": 4096} for name in ("heads", "kv_heads", "head_dim")},
        "intermediate_size": {"type": "integer", "minimum": 1, "maximum": 1048576},
        "theta": {"type": "number"},
        "norm_eps": {"type": "number"},
        "rope": {"$ref": "#/$defs/rope"},
        "sections": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 3, "maxItems": 3},
    },
}
"""The JSON Schema of HeadLayer."""


CONVENTIONS_SCHEMA: Mapping[str, Any] = {
    "first_token": {"enum": list(FIRST_TOKENS)},
    "alignment": {"enum": list(ALIGNMENTS)},
    "own_rows": {"type": "array", "items": {"type": "integer", "minimum": 1}, "maxItems": 1048576},
    "sees_images": {"type": "boolean"},
}
"""The JSON Schemas of the conventions of a head with rows."""


def layer_head_schema(
    optional_fields: Mapping[str, Any] = NOTHING, **fields_of_kind: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The JSON Schema of a kind of head with a decoder layer; see `head_schema`."""
    return head_schema({**optional_fields, **CONVENTIONS_SCHEMA}, layer=LAYER_SCHEMA, **fields_of_kind)


LayerHeadT = TypeVar("LayerHeadT", bound="LayerHead")


@dataclass(frozen=True)
class LayerHead(Head):
    """A head with a decoder layer, or several modules of one each, whose rows stand in a KV cache of the head's own.

    Attributes:
        layer: The sizes of the decoder layer.
        first_token: What becomes of the first token, one of FIRST_TOKENS.
        alignment: The rows that are run anew after a verification, one of ALIGNMENTS.
        own_rows: Rows of the prompt that hold a state of the head's own, in ascending order. A judge names them, who
            asks for the next tree of a run with the alignment `last`; no engine begins so.
        sees_images: Whether rows embed an image's tokens as the target does, by the output of its vision tower, and
            have the target's positions on three axes where the layer has `sections`. Row r has the position of column
            r, whose state it holds, and the embedding of the token beside that state.
    """

    SHIFT: ClassVar[int] = 1

    layer: HeadLayer
    first_token: str = field(default=FIRST_TOKENS[0], metadata=OMIT_DEFAULT, kw_only=True)
    alignment: str = field(default=ALIGNMENTS[0], metadata=OMIT_DEFAULT, kw_only=True)
    own_rows: tuple[int, ...] = field(default=(), metadata=OMIT_DEFAULT, kw_only=True)
    sees_images: bool = field(default=False, metadata=OMIT_DEFAULT, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, words in (("first_token", FIRST_TOKENS), ("alignment", ALIGNMENTS)):
            if getattr(self, name) not in words:
                raise Malformed(name, f"{getattr(self, name)!r} is none of {', '.join(words)}")
        if self.own_rows and self.alignment != "last":
            raise Malformed("own_rows", f"{list(self.own_rows)} with the alignment {self.alignment}, which leaves none")
        if any(row < 1 for row in self.own_rows) or sorted(set(self.own_rows)) != list(self.own_rows):
            raise Malformed("own_rows", f"{list(self.own_rows)}: rows from 1 upwards, in ascending order, each once")
        sizes: HeadLayer | None = self.layer
        for name, most in SEEDED_SIZES.items() if self.files is None and sizes is not None else ():
            if getattr(sizes, name) > most:
                raise Malformed(f"layer.{name}", f"{getattr(sizes, name)}; a seeded head has at most {most}")

    @property
    def as_seeing(self: LayerHeadT) -> LayerHeadT | None:
        """See `Draft`."""
        return replace(self, sees_images=True)

    def check_target(self, target: Model) -> None:
        """See `Draft`; a head sees the images of a target that has positions on three axes."""
        super().check_target(target)
        if self.sees_images and not isinstance(target, Seeded):
            raise Malformed("sees_images", "only the prompts of built-in targets have images")
        if self.sees_images and isinstance(target, Seeded) and not target.architecture.words.three_axes:
            raise Malformed("sees_images", f"{target.architecture.family} numbers its tokens on one axis")

    def simpler(self: LayerHeadT) -> Iterator[LayerHeadT]:
        """The head with a smaller dynamic tree, without quantised weights, without images, and on one axis."""
        yield from super().simpler()
        yield from self.with_defaults("sees_images")
        sizes: HeadLayer | None = self.layer
        if self.files is None and sizes is not None and sizes.sections:
            yield replace(self, layer=replace(sizes, sections=()))

    @property
    def fuses_first(self) -> bool:
        """Whether the first token has a row, beside its own state."""
        return self.first_token == "own-state"

    def row_tokens(self, tokens: Tokens) -> Tokens:
        """The tokens of the rows of a text `tokens`, the pending root included."""
        return tokens if self.fuses_first else tokens[1:]

    def position_of_state(self, row: int) -> int:
        """The position of the target's state that `row` holds."""
        return max(row - 1, 0) if self.fuses_first else row

    @property
    def lead(self) -> int:
        """The columns by which the token of a row is ahead of the row's number."""
        return 0 if self.fuses_first else 1

    @property
    def runs_nodes(self) -> bool:
        """Whether inner nodes of a tree have rows of their own, which an alignment may keep."""
        return True

    def with_own_rows(self: LayerHeadT, rows: Tokens) -> LayerHeadT:
        """The head, for a text of which these rows hold states of its own."""
        return replace(self, own_rows=rows)

    @property
    def weights(self: LayerHeadT) -> LayerHeadT:
        """See `Head`; the rows of a text are none of its weights."""
        return super(LayerHead, replace(self, own_rows=())).weights

    @property
    def description(self) -> str:
        """See `Draft`."""
        first_token = ", first token beside its own state" if self.fuses_first else ""
        alignment = ", rows of accepted nodes kept" if self.alignment == "last" else ""
        images = ", sees images" if self.sees_images else ""
        return f"{super().description}{first_token}{alignment}{images}"

    @property
    def stored_words(self: LayerHeadT) -> LayerHeadT:
        """See `Head`; an engine chooses the conventions, and no file tells them."""
        plain = replace(self, first_token=FIRST_TOKENS[0], alignment=ALIGNMENTS[0], own_rows=(), sees_images=False)
        return super(LayerHead, plain).stored_words

    @property
    def part_heads(self) -> tuple[int, int] | None:
        """See `Draft`."""
        layer: HeadLayer | None = self.layer
        return None if layer is None else (layer.heads, layer.kv_heads)

    @property
    def modules(self) -> int:
        """The number of decoder layers, each with keys and values of its own."""
        return 1

    @property
    def kv_sizes(self) -> tuple[int, int | None, int | None] | None:
        """See `Draft`."""
        return self.modules, self.layer.kv_heads, self.layer.head_dim


def decoder_layer(prefix: str, layer: HeadLayer, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a Llama layer's projections under `prefix`, whose attention reads rows of `width`."""
    query_width = layer.heads * layer.head_dim
    kv_width = layer.kv_heads * layer.head_dim
    inner_width = layer.intermediate_size
    return {
        f"{prefix}.self_attn.q_proj.weight": (query_width, width),
        f"{prefix}.self_attn.k_proj.weight": (kv_width, width),
        f"{prefix}.self_attn.v_proj.weight": (kv_width, width),
        f"{prefix}.self_attn.o_proj.weight": (hidden, query_width),
        f"{prefix}.mlp.gate_proj.weight": (inner_width, hidden),
        f"{prefix}.mlp.up_proj.weight": (inner_width, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, inner_width),
    }


def further_layer(number: int, layer: HeadLayer, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The shapes of the decoder layer `number` above 0, whose attention reads the normed output of the layer before."""
    prefix = f"layers.{number}"
    yield from decoder_layer(prefix, layer, hidden, hidden).items()
    yield f"{prefix}.input_layernorm.weight", (hidden,)
    yield f"{prefix}.post_attention_layernorm.weight", (hidden,)


def check_layers(layers: int) -> None:
    """Refuse a number of decoder layers that no head has.

    Raises:
        Malformed: Fewer than one, or more than MOST_LAYERS.
    """
    if not 1 <= layers <= MOST_LAYERS:
        raise Malformed("layers", f"{layers}; a head has 1 to {MOST_LAYERS} decoder layers")
