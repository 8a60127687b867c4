"""Eagle1: an EAGLE-1 head, which fuses a token with one hidden state.

The row of token x beside state s is `fc [embedding(x); s]` with a bias, then one decoder layer without a norm before
attention, whose output is both the state of the next row and, through the target's own head, the scores. Embedding and
head are the target's matrices, without the scale or the soft cap that its family may have.
"""

from dataclasses import dataclass

from specverify.reference.architecture import Architecture, Model
from specverify.reference.draft.layer_head import LayerHead, decoder_layer, layer_head_schema
from specverify.reference.malformed import Malformed

LAYER_PREFIX = "layers.0"
"""The prefix of the decoder layer in published checkpoints."""


@dataclass(frozen=True)
class Eagle1(LayerHead):
    """An EAGLE-1 head.

    Attributes:
        bias: Whether `fc` has a bias (the field `bias` of published configurations, true if it is absent).
    """

    TAG = "eagle1"
    WORD = "EAGLE-1"
    SCHEMA = layer_head_schema(bias={"type": "boolean"})
    vocabulary = ()

    bias: bool = True

    def tensors(self, target: Architecture) -> dict[str, tuple[int, ...]]:
        """See `Head`."""
        hidden = target.hidden_size
        return {
            "fc.weight": (hidden, 2 * hidden),
            **({"fc.bias": (hidden,)} if self.bias else {}),
            **decoder_layer(LAYER_PREFIX, self.layer, hidden, hidden),
            f"{LAYER_PREFIX}.post_attention_layernorm.weight": (hidden,),
        }

    def check_target(self, target: Model) -> None:
        """See `Draft`; EAGLE-1 reads one state, since `fc` is as wide as an embedding and a state."""
        super().check_target(target)
        if self.reads.parts != 1:
            raise Malformed("reads", f"EAGLE-1 weights expect one hidden state, and the case gives the {self.reads}")
