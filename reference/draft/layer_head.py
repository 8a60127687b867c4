"""LayerHead: the base of heads that run a decoder layer over tokens beside states.

Row i of the head holds the token x_{i+1} beside the state s_i, and its output scores the token after x_{i+1}. The row
of a node of the tree holds the node's token beside the output of its parent's row. The row of the root is row L - 1.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from specverify.reference.architecture import Rope
from specverify.reference.draft.head import NOTHING, Head, head_schema
from specverify.reference.malformed import Malformed
from specverify.reference.rules import OMIT_DEFAULT

MOST_LAYERS = 8
"""Most decoder layers of a head; published heads have one to three."""

ROPES = ("linear", "llama3")
"""The variants of rotary embedding that a head's layer may have: those whose table is one for all lengths."""


@dataclass(frozen=True)
class HeadLayer:
    """The sizes of a head's decoder layer, whose hidden size is the target's.

    Attributes:
        theta: The base of the rotary embedding.
        rope: The variant of the rotary embedding, one of ROPES, with the same base; None for the plain one.
    """

    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    theta: float = 10000.0
    norm_eps: float = 1e-5
    rope: Rope | None = field(default=None, metadata=OMIT_DEFAULT)

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
    },
}
"""The JSON Schema of HeadLayer."""


def layer_head_schema(
    optional_fields: Mapping[str, Any] = NOTHING, **fields_of_kind: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The JSON Schema of a kind of head with a decoder layer; see `head_schema`."""
    return head_schema(optional_fields, layer=LAYER_SCHEMA, **fields_of_kind)


@dataclass(frozen=True)
class LayerHead(Head):
    """A head with a decoder layer, or several modules of one each, whose rows stand in a KV cache of the head's own.

    Attributes:
        layer: The sizes of the decoder layer.
    """

    SHIFT: ClassVar[int] = 1

    layer: HeadLayer

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, most in SEEDED_SIZES.items() if self.files is None else ():
            if getattr(self.layer, name) > most:
                raise Malformed(f"layer.{name}", f"{getattr(self.layer, name)}; a seeded head has at most {most}")

    @property
    def modules(self) -> int:
        """The number of decoder layers, each with keys and values of its own."""
        return 1

    @property
    def kv_sizes(self) -> tuple[int, int, int] | None:
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
