"""Automaton: a suffix automaton, which continues an earlier occurrence."""

from collections.abc import Iterator
from dataclasses import dataclass

from specverify.reference.draft.static import Static
from specverify.reference.malformed import Malformed
from specverify.reference.tree import RankTree


@dataclass(frozen=True)
class Automaton(Static):
    """The continuation of the longest suffix of prompt and output that occurs earlier (arXiv 2411.10666).

    The suffix ends with the pending root. An earlier occurrence ends before the root, and may overlap the suffix. The
    tree is a chain of the tokens that follow the occurrence, up to the root itself: fewer than the chain has nodes
    where the occurrence is near the end. Without a suffix of `least` tokens that occurs earlier the tree is the bare
    root. Rejected tokens belong to no text.

    Attributes:
        shape: A chain; its depth is the most tokens that are continued.
        least: The fewest tokens of a suffix.
        latest: Whether the last of several earlier occurrences is continued, or else the first.
    """

    TAG = "automaton"
    WORD = "suffix automaton"
    SCHEMA = {  # noqa: RUF012 - read-only
        "type": "object",
        "additionalProperties": False,
        "required": ["kind", "shape", "least", "latest"],
        "properties": {
            "kind": {},
            "shape": {"$ref": "#/$defs/rankTree"},
            "least": {"type": "integer", "minimum": 1, "maximum": 1048576},
            "latest": {"type": "boolean"},
        },
    }
    model = None
    vocabulary = ()

    shape: RankTree
    least: int = 1
    latest: bool = False

    def __post_init__(self) -> None:
        if self.least < 1:
            raise Malformed("least", f"{self.least}: a suffix has at least one token")
        if any(self.shape.rank) or self.shape.branches:
            raise Malformed("shape", "an automaton continues one occurrence: a chain with the ranks 0")

    def simpler(self) -> Iterator["Automaton"]:
        """The draft that continues the first occurrence, and suffixes of any length."""
        yield from super().simpler()
        yield from self.with_defaults("latest", "least")
