"""Recurrence: the formulas of a layer with a recurrent state.

A layer takes one row after the other along a path of tokens. What it keeps of the path is its state: the last inputs
of a convolution, and a matrix for each value head.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specverify.reference.architecture import Architecture
from specverify.reference.trace import Array

LayerState = tuple[Array, Array]
"""The window of the convolution [width - 1, channels], and the memory [value heads, key width, value width]."""


@dataclass(frozen=True)
class Recurrence:
    """The formulas of a family's layers with a recurrent state.

    Attributes:
        begin: The state of a layer before the first token.
        step: From the layer's weights, its number, the state before a row, and the row's normed input [hidden] to the
            state after the row and the layer's output [hidden].
    """

    begin: Callable[[Architecture], LayerState]
    step: Callable[[Architecture, Mapping[str, Array], int, LayerState, Array], tuple[LayerState, Array]]

    def run_rows(
        self,
        arch: Architecture,
        weights: Mapping[str, Array],
        layer: int,
        start: LayerState,
        rows: Array,
        parent: Sequence[int],
    ) -> tuple[list[LayerState], Array]:
        """The state after each row and the outputs [T, hidden] of `rows` [T, hidden], which are normed inputs.

        Row t goes on from the state of row `parent[t]`, which comes before it; from `start` where that is -1.
        """
        states: list[LayerState] = []
        outputs = np.empty_like(rows)
        for row_index, (row, parent_row) in enumerate(zip(rows, parent, strict=True)):
            state, outputs[row_index] = self.step(
                arch, weights, layer, states[parent_row] if parent_row >= 0 else start, row
            )
            states.append(state)
        return states, outputs


def convolve(window: Array, row: Array, taps: Array) -> tuple[Array, Array]:
    """The convolution of a path at its last row, and the window behind it.

    Args:
        window: The inputs before the row, [width - 1, channels].
        row: The row's own input, [channels].
        taps: The weights of each channel, the last one for the row itself, [channels, width].
    """
    window_and_row = np.vstack([window, row])
    return np.einsum("kc,ck->c", window_and_row, taps), window_and_row[1:]
