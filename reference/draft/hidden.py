"""HiddenStates: which hidden states of the target a draft reads.

The descriptor is compared on both sides: the draft's weights name the states that they expect, and the engine names the
states that it hands over.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from specverify.reference.malformed import Malformed
from specverify.reference.rules import OMIT_DEFAULT

PLACES = ("residual", "normed")
"""Where a hidden state is taken: the residual stream after a layer, or the output of the norm after the last layer."""


@dataclass(frozen=True)
class HiddenStates:
    """Hidden states of the target, side by side in the order of `layers`: [positions, len(layers) * hidden size].

    Attributes:
        layers: Layers after which the residual stream is taken, from 0; -1 means the embeddings (EAGLE-3 reads three
            layers; transformers' `hidden_states[i]` is layer i - 1). For `normed` no layer is named.
        place: One of PLACES (EAGLE reads the output of the last norm, EAGLE-3 the residual stream).
        shift: How many positions the token that stands beside a state is ahead of it: 1 in EAGLE; 0 for a draft that
            fuses states with no token.
    """

    layers: tuple[int, ...] = ()
    place: str = "residual"
    shift: int = field(default=0, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        if self.place not in PLACES:
            raise Malformed("place", f"{self.place!r} is none of {', '.join(PLACES)}")
        if (self.place == "normed") != (not self.layers):
            raise Malformed("layers", "the residual stream is taken after named layers, the last norm's output is not")
        if len(set(self.layers)) < len(self.layers) or any(layer < -1 for layer in self.layers):
            raise Malformed("layers", f"{list(self.layers)}: layers count from 0, -1 means the embeddings, each once")
        if self.shift not in (0, 1):
            raise Malformed("shift", f"{self.shift} is neither 0 (no token) nor 1 (the token after the state)")

    def __str__(self) -> str:
        """`residual stream after layers 1, 4`, or `output of the last norm`, and the token beside it."""
        token = " beside the next token" if self.shift else ""
        if self.place == "normed":
            return f"output of the last norm{token}"
        names = ", ".join("embeddings" if layer < 0 else str(layer) for layer in self.layers)
        return f"residual stream after layer{'s' * (len(self.layers) > 1)} {names}{token}"

    @property
    def parts(self) -> int:
        """Number of states, each of the target's hidden size, that lie side by side."""
        return len(self.layers) or 1


@dataclass(frozen=True)
class HeadInput:
    """The rows of committed tokens that a draft head ran for this step, since the step before.

    A head that keeps no rows runs the row of the last state anew at every step, and no other row.

    Attributes:
        reads: The hidden states of the target that stand beside the tokens.
        first: The number of the first row; `LayerHead.position_of_state` says which state it holds.
        tokens: The token of each row, in order; none where the head ran no row.
        hidden: float [rows, width]; the target's hidden states of each row.
        adopted: The number of first rows that the head found in pages of an earlier request, or with a fork.
        own_rows: Rows of the text that hold a state of the head's own, by the head's alignment.
    """

    reads: HiddenStates
    first: int
    tokens: tuple[int, ...]
    hidden: npt.NDArray[Any]
    adopted: int = 0
    own_rows: tuple[int, ...] = ()
