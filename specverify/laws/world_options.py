"""A small world from options: exact probabilities, a tree, and rows by path.

A row is the law of target or draft after a path of tokens.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from specverify.reference.malformed import Malformed
from specverify.reference.oracle.acceptance import Row, normalise
from specverify.reference.oracle.tree_growth import Path
from specverify.reference.tree import Shape, Tree
from specverify.setup.errors import UnusableInput

MOST_NODES = 32
"""Most nodes of a tree that is enumerated, with the root."""

MOST_TOKENS = 256
"""Most tokens of a vocabulary that is enumerated."""

OFF = Fraction(1, 10**6)
"""Largest distance of a row's sum from 1; such a row is normalised."""

NUMBER = re.compile(r"[+-]?(?:\d+/\d+|(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d{1,2})?)", re.ASCII | re.IGNORECASE)
"""A fraction, or a decimal with an exponent of at most two digits, so that the number fits in memory."""

LONGEST = 80
"""Most characters of one number, and of a text that a message quotes."""


@dataclass(frozen=True)
class Tables:
    """Tables in place of models, in fractions; a path without a row has the row of the empty path.

    Attributes:
        shape: The tree to draft.
        target: The target's law after a path of tokens below the root.
        drafts: The same for each draft; draft `k % len(drafts)` names the k-th child of a node.
        tokens: The drafted tokens, the root's first, if they are given; then no token is drawn.
    """

    shape: Shape
    target: dict[Path, Row]
    drafts: tuple[dict[Path, Row], ...]
    tokens: Path | None = None

    @property
    def vocab(self) -> int:
        """Size of the vocabulary."""
        return len(self.target[()])

    def target_row(self, path: Path) -> Row:
        """The target's law after `path`."""
        return self.target.get(path) or self.target[()]

    def draft_row(self, path: Path, k: int) -> Row:
        """The law of the draft that names the k-th child after `path`."""
        table = self.drafts[k % len(self.drafts)]
        return table.get(path) or table[()]

    def distinct(self, draws: str) -> bool:
        """Whether siblings always have different tokens."""
        if self.tokens is not None:
            return not Tree(self.shape.parent, self.tokens).has_twins
        if all(len(below) <= 1 for below in self.shape.children) or draws == "without-replacement":
            return True
        return draws == "top-k" and len(self.drafts) == 1


def exact_number(written: object, where: str) -> Fraction:
    """The number `written` (text, or an int) as an exact fraction; a decimal is not rounded to a float.

    Raises:
        UnusableInput: It is no number, NaN, infinite or too long; the message begins with `where`.
    """
    text = str(written).strip() if isinstance(written, str) or type(written) is int else ""
    # The last test refuses a denominator of 0.
    if len(text) > LONGEST or not NUMBER.fullmatch(text) or re.search(r"/0+$", text):
        quoted = repr(written) if len(repr(written)) <= LONGEST else f"{repr(written)[:LONGEST]}…"
        raise UnusableInput(f"{where}: {quoted} is not a number (write 0.6 or 3/5)")
    return Fraction(text)


def probabilities(written: Sequence[object], where: str) -> Row:
    """The law with the probabilities `written`; a sum within OFF of 1 is normalised.

    Raises:
        UnusableInput: A probability is no number or negative, the sum is not 1, or there are too many tokens.
    """
    if len(written) > MOST_TOKENS:
        raise UnusableInput(f"{where}: {len(written)} tokens are too many to enumerate; use {MOST_TOKENS} at most")
    row = [exact_number(value, f"{where}[{token}]") for token, value in enumerate(written)]
    for token, value in enumerate(row):
        if value < 0:
            raise UnusableInput(f"{where}[{token}]: {written[token]} is negative")
    total = sum(row, Fraction(0))
    if abs(total - 1) > OFF:
        raise UnusableInput(f"{where}: sums to {float(total):.9g}, not to 1 (1/3 is exact where 0.333 is not)")
    return normalise(row)


def parse_law(text: str, where: str) -> Row:
    """The law in a text of probabilities with commas between them."""
    return probabilities(text.split(","), where)


def parse_numbers(text: str, where: str) -> Path:
    """The whole numbers in a text with commas between them."""
    parts = [part.strip() for part in text.split(",")]
    for position, part in enumerate(parts):
        if not re.fullmatch(r"\d{1,6}", part, re.ASCII):
            raise UnusableInput(f"{where}[{position}]: {part[:LONGEST]!r} is not a whole number of 0 or more")
    return tuple(int(part) for part in parts)


def shape_of(parents: Path, where: str) -> Shape:
    """The tree with these parents.

    Raises:
        UnusableInput: The parents are no tree, or too many.
    """
    if len(parents) > MOST_NODES:
        raise UnusableInput(f"{where}: {len(parents)} nodes are too many to enumerate; use {MOST_NODES} at most")
    try:
        return Shape(parents)
    except Malformed as why:
        raise UnusableInput(f"{where}: {why} (node 0 is the root and its own parent)") from None


def full_tree(siblings: int, depth: int) -> Shape:
    """The tree in which every node above `depth` has `siblings` children, level by level."""
    # The depth first, so that no huge powers are computed.
    if depth >= MOST_NODES or sum(siblings**level for level in range(depth + 1)) > MOST_NODES:
        raise UnusableInput(
            f"--siblings {siblings} --depth {depth}: the tree has more than {MOST_NODES} nodes; make it smaller"
        )
    parents, level = [0], [0]
    for _ in range(depth):
        below = [up for up in level for _ in range(siblings)]
        level = list(range(len(parents), len(parents) + len(below)))
        parents += below
    return Shape(tuple(parents))


def fitting_tokens(tokens: Path, shape: Shape, vocab: int, where: str) -> Path:
    """`tokens`, after a check that there is one for each node of `shape` and that each is in the vocabulary.

    Raises:
        UnusableInput: The number of tokens is wrong, or a token is outside the vocabulary.
    """
    if len(tokens) != len(shape):
        raise UnusableInput(f"{where}: {len(tokens)} tokens for {len(shape)} nodes (the root's is the first)")
    for node, token in enumerate(tokens):
        if not 0 <= token < vocab:
            raise UnusableInput(f"{where}[{node}]: token {token} is outside the vocabulary of {vocab}")
    return tokens
