"""Eagle1: an EAGLE-1 head, which fuses a token with one hidden state.

The row of token x beside state s is `fc [embedding(x); s]` with a bias, then one decoder layer without a norm before
attention, whose output is both the state of the next row and, through the target's own head, the scores. Embedding and
head are the target's matrices, without the scale or the soft cap that its family may have.

Heads of larger targets have more (arXiv 2508.08192, section 2): further decoder layers, which are plain Llama layers on
the output of the layer before (SafeAILab, vLLM); layers without rotary embedding between the others, as in Llama 4's
iRoPE; and experts in place of the gated block, as Llama 4 has them. A row goes through the experts with the highest
scores, each time multiplied by the sigmoid of the score, and through a shared expert. All are as wide as the gated
block. Attention has no chunks and no temperature by position, which Llama 4 adds to iRoPE.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from specverify.reference.architecture import Architecture, Model
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

LAYER_PREFIX = "layers.0"
"""The prefix of the first decoder layer in published checkpoints."""

MOST_EXPERTS = 128
"""Most experts of a layer."""


def layer_prefix(number: int) -> str:
    """The prefix of the decoder layer `number`, the first of which is LAYER_PREFIX."""
    return f"layers.{number}"


@dataclass(frozen=True)
class Eagle1(LayerHead):
    """An EAGLE-1 head.

    Attributes:
        bias: Whether `fc` has a bias (the field `bias` of published configurations, true if it is absent).
        layers: The number of decoder layers, all of the sizes of `layer`.
        unrotated: The layers without rotary embedding, ascending.
        experts: The number of experts in each layer; 0 for a gated block in their place.
        experts_per_token: The number of experts that a row goes through, beside the shared one.
    """

    TAG = "eagle1"
    WORD = "EAGLE-1"
    _LAYER_NUMBERS = {  # noqa: RUF012 - a part of SCHEMA
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": MOST_LAYERS - 1},
        "maxItems": MOST_LAYERS,
    }
    SCHEMA = layer_head_schema(
        {
            "layers": {"type": "integer", "minimum": 1, "maximum": MOST_LAYERS},
            "unrotated": _LAYER_NUMBERS,
            "experts": {"type": "integer", "minimum": 0, "maximum": MOST_EXPERTS},
            "experts_per_token": {"type": "integer", "minimum": 1, "maximum": MOST_EXPERTS},
        },
        bias={"type": "boolean"},
    )
    vocabulary = ()

    bias: bool = True
    layers: int = field(default=1, metadata=OMIT_DEFAULT)
    unrotated: tuple[int, ...] = field(default=(), metadata=OMIT_DEFAULT)
    experts: int = field(default=0, metadata=OMIT_DEFAULT)
    experts_per_token: int = field(default=1, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers(self.layers)
        if list(self.unrotated) != sorted({layer for layer in self.unrotated if 0 <= layer < self.layers}):
            raise Malformed("unrotated", f"layers 0..{self.layers - 1} in ascending order, each once")
        if not 0 <= self.experts <= MOST_EXPERTS:
            raise Malformed("experts", f"{self.experts}; a layer has 0 to {MOST_EXPERTS} experts")
        if not 1 <= self.experts_per_token <= max(1, self.experts):
            raise Malformed("experts_per_token", f"{self.experts_per_token} with {self.experts} experts")

    @property
    def modules(self) -> int:
        """See `LayerHead`."""
        return self.layers

    @property
    def description(self) -> str:
        """See `Draft`; what the head has beyond one dense layer with rotary embedding."""
        parts = [super().description]
        if self.layers > 1:
            parts.append(f"{self.layers} layers")
        if self.unrotated:
            parts.append(f"no rotary embedding in {', '.join(map(str, self.unrotated))}")
        if self.experts:
            parts.append(f"{self.experts_per_token} of {self.experts} experts")
        return ", ".join(parts)

    def tensors(self, target: Architecture) -> dict[str, tuple[int, ...]]:
        """See `Head`."""
        hidden = target.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, 2 * hidden),
            **({"fc.bias": (hidden,)} if self.bias else {}),
            **decoder_layer(LAYER_PREFIX, self.layer, hidden, hidden),
            f"{LAYER_PREFIX}.post_attention_layernorm.weight": (hidden,),
            **{
                name: shape
                for number in range(1, self.layers)
                for name, shape in further_layer(number, self.layer, hidden)
            },
        }
        if not self.experts:
            return shapes
        shapes = {name: shape for name, shape in shapes.items() if ".mlp." not in name}
        for number in range(self.layers):
            shapes |= self._expert_shapes(f"{layer_prefix(number)}.mlp", hidden)
        return shapes

    def _expert_shapes(self, prefix: str, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The shapes of a router, its experts and the shared one under `prefix`."""
        inner = self.layer.intermediate_size
        yield f"{prefix}.gate.weight", (self.experts, hidden)
        for expert in (*(f"experts.{number}" for number in range(self.experts)), "shared_expert"):
            yield f"{prefix}.{expert}.gate_proj.weight", (inner, hidden)
            yield f"{prefix}.{expert}.up_proj.weight", (inner, hidden)
            yield f"{prefix}.{expert}.down_proj.weight", (hidden, inner)

    def check_target(self, target: Model) -> None:
        """See `Draft`; EAGLE-1 reads one state, since `fc` is as wide as an embedding and a state."""
        super().check_target(target)
        if self.reads.parts != 1:
            raise Malformed("reads", f"EAGLE-1 weights expect one hidden state, and the case gives the {self.reads}")

    def simpler(self) -> Iterator["Eagle1"]:
        """The head with a smaller dynamic tree, with one layer, with rotary embedding, and without experts."""
        yield from super().simpler()
        if self.files is None:
            if self.layers > 1:
                fewer = self.layers - 1
                kept_layers = tuple(layer for layer in self.unrotated if layer < fewer)
                yield replace(self, layers=fewer, unrotated=kept_layers)
            yield from self.with_defaults("unrotated")
            if self.experts:
                yield replace(self, experts=0, experts_per_token=1)
