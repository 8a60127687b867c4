"""Choices: the experts that an engine chose for its rows, which the oracle then follows.

A row is known by the tokens up to its own, so that context and tree of every step have their places in one table.
"""

from collections.abc import Iterable

import numpy as np

from specverify.reference.oracle.formulas.routers import UNKNOWN
from specverify.reference.trace import Array, Step
from specverify.reference.tree import Tree


class Choices:
    """The experts of rows by the text up to each row; what is added later takes the place of what was there.

    Attributes:
        layers: Number of layers of the model.
        experts_per_row: Number of experts of a row.
    """

    def __init__(self, layers: int, experts_per_row: int) -> None:
        self.layers = layers
        self.experts_per_row = experts_per_row
        # From a text and a token to the longer text; 0 is the empty one.
        self._longer_texts: dict[tuple[int, int], int] = {}
        self._rows: list[Array] = [self._unknown_experts(())]

    def _unknown_experts(self, rows: tuple[int, ...]) -> Array:
        return np.full((*rows, self.layers, self.experts_per_row), UNKNOWN)

    def _text(self, text: int, token: int) -> int:
        """The number of `text` with `token` behind it."""
        key = (text, token)
        if key not in self._longer_texts:
            self._longer_texts[key] = len(self._rows)
            self._rows.append(self._rows[0])
        return self._longer_texts[key]

    def add(self, context: tuple[int, ...], tree: Tree, routed: Array) -> None:
        """Add the experts [layers, context + nodes, taken] of the rows of `context` and of `tree` below it."""
        text, rows = 0, routed.swapaxes(0, 1)
        for row, token in enumerate(context):
            text = self._text(text, token)
            self._store(text, rows[row])
        texts: dict[int, int] = {}
        for node in _parents_first(tree):
            texts[node] = self._text(texts[tree.parent[node]] if node else text, tree.token[node])
            self._store(texts[node], rows[len(context) + node])

    def _store(self, text: int, row: Array) -> None:
        is_known = (row != UNKNOWN).all(axis=-1, keepdims=True)
        if is_known.any():
            self._rows[text] = np.where(is_known, row, self._rows[text])

    def experts_of(self, context: tuple[int, ...], tree: Tree | None = None) -> Array:
        """The experts of the rows of `context` and of `tree` below it, [layers, rows, taken]; UNKNOWN where unknown."""
        experts = self._unknown_experts((len(context) + (0 if tree is None else len(tree)),))
        text: int | None = 0
        for row, token in enumerate(context):
            text = None if text is None else self._longer_texts.get((text, token))
            if text is None:
                break
            experts[row] = self._rows[text]
        if tree is not None and text is not None:
            texts = {-1: text}
            for node in _parents_first(tree):
                parent_text = texts.get(tree.parent[node] if node else -1)
                number = None if parent_text is None else self._longer_texts.get((parent_text, tree.token[node]))
                if number is not None:
                    texts[node] = number
                    experts[len(context) + node] = self._rows[number]
        by_layer: Array = experts.swapaxes(0, 1)
        return by_layer


def _parents_first(tree: Tree) -> list[int]:
    """The nodes of `tree`, each after its parent, which may have the larger number."""
    return sorted(range(len(tree)), key=tree.depth.__getitem__)


def choices_of(steps: Iterable[Step]) -> Choices | None:
    """The experts that `steps` show; None where no step shows any."""
    choices: Choices | None = None
    for step in steps:
        if step.scored is None or step.scored.routed is None or step.drafted is None:
            continue
        routed = step.scored.routed
        choices = choices or Choices(routed.shape[0], routed.shape[2])
        if routed.shape == (choices.layers, len(step.context) + len(step.drafted.tree), choices.experts_per_row):
            choices.add(step.context, step.drafted.tree, routed)
    return choices
