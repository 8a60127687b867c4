"""The recurrent state of a sequence, as traces hold it."""

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt


@dataclass(frozen=True)
class RecurrentState:
    """What the layers with a recurrent state hold of a sequence of tokens.

    Attributes:
        windows: For each such layer, in order, the last inputs of its convolution along the path, the earliest first:
            float [width - 1, channels], zeros before the first token.
        memories: For each such layer, the matrix of each head, float [heads, ...]: [key width, value width] for the
            gated delta rule, [head width, state width] for a Mamba-2 mixer; of size 0 in a layer that has a
            convolution alone.
    """

    windows: tuple[npt.NDArray[Any], ...]
    memories: tuple[npt.NDArray[Any], ...]
