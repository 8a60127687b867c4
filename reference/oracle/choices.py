"""Choices: the experts, columns and codes of an engine's rows, which the oracle then follows.

A row is known by the tokens up to its own, so that context and tree of every step have their places in one table. A
column is known by its position in the row's text.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from specverify.reference.oracle.formulas.routers import UNKNOWN
from specverify.reference.trace import Array, Scored, Step
from specverify.reference.tree import Tree

COLUMNS, EXPERTS = "columns", "experts"

KINDS = (COLUMNS, EXPERTS)
"""Kinds of choices that the rows of a layer may make by scores, in the order in which they do."""

CODES = "codes"

SHOWN = (*KINDS, CODES)
"""Kinds that a trace shows of rows: those choices, and the codes to which a cache rounded their keys and values."""


@dataclass(frozen=True)
class RowChoices:
    """The choices of the rows of a context and of a tree below it; None for a kind of which nothing is known.

    Attributes:
        experts: As `specverify.reference.trace.Scored.routed`, [layers, context + nodes, taken].
        columns: As `Scored.indexed`, [layers, context + nodes, k].
        codes: As `Scored.stored`, [layers, context + nodes, codes].
    """

    experts: Array | None = None
    columns: Array | None = None
    codes: Array | None = None

    def of(self, kind: str) -> Array | None:
        """The choices of one of SHOWN."""
        choices: Array | None = getattr(self, kind)
        return choices

    def of_rows(self, rows: list[int]) -> "RowChoices":
        """The choices of `rows` alone."""
        of_kinds = {kind: self.of(kind) for kind in SHOWN}
        return RowChoices(**{kind: None if choices is None else choices[:, rows] for kind, choices in of_kinds.items()})

    @property
    def present(self) -> bool:
        """Whether anything is known of any kind."""
        return any(self.of(kind) is not None for kind in SHOWN)

    @property
    def layers(self) -> int:
        """Number of layers; 0 where nothing is known. Wrong ones of columns are told by those of experts."""
        return next((len(choices) for choices in map(self.of, (EXPERTS, COLUMNS, CODES)) if choices is not None), 0)

    def same(self, other: "RowChoices") -> bool:
        """Whether both hold the same choices for the same rows."""
        return all(_equal(self.of(kind), other.of(kind)) for kind in SHOWN)


def _equal(first: Array | None, second: Array | None) -> bool:
    if first is None or second is None:
        return first is second
    return np.array_equal(first, second)


def choices_shown(scored: Scored) -> RowChoices:
    """The choices that a trace shows in one step."""
    return RowChoices(scored.routed, scored.indexed, scored.stored)


class Choices:
    """The choices of rows by the text up to each row; what is added later takes the place of what was there.

    Attributes:
        layers: Number of layers of the model.
        twins_differ: Whether nodes of one tree that have one text were added with unlike choices. In a tree that has as
            many nodes of that text each has its own, in their order; elsewhere the text has those that came last.
    """

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.twins_differ = False
        # From a text and a token to the longer text; 0 is the empty one.
        self._longer_texts: dict[tuple[int, int], int] = {}
        self._num_texts = 1
        # By kind and text, [layers, taken].
        self._rows: dict[str, dict[int, Array]] = {kind: {} for kind in SHOWN}
        # By kind, text and place among the nodes of that text, where these are unlike.
        self._twins: dict[str, dict[tuple[int, int], Array]] = {kind: {} for kind in SHOWN}

    def _text(self, text: int, token: int) -> int:
        """The number of `text` with `token` behind it."""
        key = (text, token)
        if key not in self._longer_texts:
            self._longer_texts[key] = self._num_texts
            self._num_texts += 1
        return self._longer_texts[key]

    def add(self, context: tuple[int, ...], tree: Tree, rows: RowChoices) -> None:
        """Add the choices of the rows of `context` and of `tree` below it.

        Arrays of another shape are left out, and rows with a column outside their own text: neither can be followed.
        """
        text = 0
        texts = []
        for token in context:
            text = self._text(text, token)
            texts.append(text)
        node_texts: dict[int, int] = {}
        for node in _parents_first(tree):
            node_texts[node] = self._text(node_texts[tree.parent[node]] if node else text, tree.token[node])
        texts += [node_texts[node] for node in range(len(tree))]
        positions = [*range(len(context)), *(len(context) + depth for depth in tree.depth)]
        for kind in SHOWN:
            choices = rows.of(kind)
            if choices is None or not self._fits(kind, choices, len(texts)):
                continue
            is_own: Array = np.ones(len(texts), dtype=bool)
            if kind == COLUMNS:
                inside = (choices >= UNKNOWN) & (choices <= np.array(positions)[:, None])
                is_own = np.logical_and.reduce(inside, axis=(0, 2))
            for row, text in enumerate(texts):
                if is_own[row]:
                    self._store(kind, text, choices[:, row])
            self._store_twins(kind, choices, texts, [row for row in range(len(context), len(texts)) if is_own[row]])

    def _store_twins(self, kind: str, choices: Array, texts: list[int], rows: list[int]) -> None:
        """Keep those of `rows` that have one text and unlike choices, each by its place among them."""
        rows_of: dict[int, list[int]] = {}
        for row in rows:
            rows_of.setdefault(texts[row], []).append(row)
        for text, twins in rows_of.items():
            differ = any(not np.array_equal(choices[:, row], choices[:, twins[0]]) for row in twins)
            self.twins_differ |= differ
            for place, row in enumerate(twins):
                # An earlier run of the text may have had unlike ones.
                self._twins[kind].pop((text, place), None)
                if differ:
                    self._twins[kind][text, place] = choices[:, row]

    def _fits(self, kind: str, choices: Array, rows: int) -> bool:
        """Whether `choices` are those of so many rows; all rows take as many experts, and have as many codes."""
        known_row = next(iter(self._rows[kind].values()), None)
        width = choices.shape[2] if kind == COLUMNS or known_row is None else known_row.shape[1]
        return choices.shape == (self.layers, rows, width)

    def _store(self, kind: str, text: int, row: Array) -> None:
        # A row of columns may have places to spare, and one of codes in a layer with fewer than others.
        is_known = (row != UNKNOWN).all(axis=-1) if kind == EXPERTS else (row != UNKNOWN).any(axis=-1)
        if not is_known.any():
            return
        earlier = self._rows[kind].get(text)
        if earlier is not None:
            earlier, row = same_width(earlier, row)
            row = np.where(is_known[:, None], row, earlier)
        elif not is_known.all():
            row = np.where(is_known[:, None], row, UNKNOWN)
        self._rows[kind][text] = row

    def of(self, context: tuple[int, ...], tree: Tree | None = None) -> RowChoices:
        """The choices of the rows of `context` and of `tree` below it; UNKNOWN where none is known."""
        texts: list[int | None] = []
        text: int | None = 0
        for token in context:
            text = None if text is None else self._longer_texts.get((text, token))
            texts.append(text)
        if tree is not None:
            node_texts = {-1: text}
            for node in _parents_first(tree):
                parent_text = node_texts[tree.parent[node] if node else -1]
                key = None if parent_text is None else (parent_text, tree.token[node])
                node_texts[node] = None if key is None else self._longer_texts.get(key)
            texts += [node_texts[node] for node in range(len(tree))]
        return RowChoices(**{kind: self._of_texts(kind, texts) for kind in SHOWN})

    def _of_texts(self, kind: str, texts: list[int | None]) -> Array | None:
        """The choices of the rows of `texts`, [layers, rows, taken]; None where nothing of the kind was ever added."""
        by_text = self._rows[kind]
        if not by_text:
            return None
        rows = [None if text is None else by_text.get(text) for text in texts]
        twins = self._twins[kind]
        if twins:
            keys = list(zip(texts, _places(texts), strict=True))
            known = {text for text, place in keys if place}
            rows = [
                twins.get((text, place), row) if text is not None and text in known else row
                for (text, place), row in zip(keys, rows, strict=True)
            ]
        widest = max((row.shape[1] for row in rows if row is not None), default=next(iter(by_text.values())).shape[1])
        choices = np.full((self.layers, len(texts), widest), UNKNOWN)
        for number, row in enumerate(rows):
            if row is not None:
                choices[:, number, : row.shape[1]] = row
        return choices


def _places(texts: Sequence[int | None]) -> list[int]:
    """The place of each of `texts` among those that are the same."""
    counts = Counter[int | None]()
    places = []
    for text in texts:
        places.append(counts[text])
        counts[text] += 1
    return places


def same_width(first: Array, second: Array) -> tuple[Array, Array]:
    """Both arrays of columns [..., k] with as many places, those of the narrower one filled with UNKNOWN."""
    widest = max(first.shape[-1], second.shape[-1])
    return _widened(first, widest), _widened(second, widest)


def _widened(columns: Array, width: int) -> Array:
    """`columns` [..., k] with `width` places, the last ones UNKNOWN; `columns` itself where it has as many."""
    if columns.shape[-1] == width:
        return columns
    wide = np.full((*columns.shape[:-1], width), UNKNOWN, dtype=columns.dtype)
    wide[..., : columns.shape[-1]] = columns
    return wide


def known_positions(row: Array, own: Array) -> Array:
    """The positions that `row` [k] of columns holds, each once, and `own` where nothing is known of it."""
    positions: Array = np.unique(row[row != UNKNOWN])
    return positions if len(positions) else own


def _parents_first(tree: Tree) -> list[int]:
    """The nodes of `tree`, each after its parent, which may have the larger number."""
    return sorted(range(len(tree)), key=tree.depth.__getitem__)


def choices_of(steps: Iterable[Step]) -> Choices | None:
    """The choices that `steps` show; None where no step shows any."""
    choices: Choices | None = None
    for step in steps:
        if step.scored is None or step.drafted is None:
            continue
        rows = choices_shown(step.scored)
        if rows.present:
            choices = choices or Choices(rows.layers)
            choices.add(step.context, step.drafted.tree, rows)
    return choices
