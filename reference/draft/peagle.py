"""PEagle: a P-EAGLE head, an EAGLE-3 head that scores all levels of a tree in one forward.

The source is arXiv 2602.01469; speculators, SpecForge and vLLM have such heads. Behind the root's row stand
`mask_slots` rows of a mask token beside a state of the weights: `mask_hidden`, as wide as the target's states side by
side, which `fc` mixes as it mixes those. A row sees the rows above it. The root's row scores the first level, and row d
of the others the nodes at depth d + 1, whatever their parents are. The rows are dropped after each proposal, so that no
row of a tree is ever kept.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from specverify.reference.architecture import Architecture, Model
from specverify.reference.draft.base import Tokens
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.malformed import Malformed
from specverify.reference.tree import RankTree, Tree

MASK_STATE = "mask_hidden"
"""The name of the state beside a mask token in published checkpoints."""

MOST_MASKS = 64
"""Most rows of mask tokens; heads are trained with about 7."""


@dataclass(frozen=True)
class PEagle(Eagle3):
    """A P-EAGLE head.

    Attributes:
        mask_slots: Rows of mask tokens behind the root's, which score the levels below the first.
        mask_token: The target id that stands in those rows.
    """

    TAG = "peagle"
    WORD = "P-EAGLE"
    SCHEMA = {  # noqa: RUF012 - the schema of EAGLE-3 with two fields more
        **Eagle3.SCHEMA,
        "required": [*Eagle3.SCHEMA["required"], "mask_slots", "mask_token"],
        "properties": {
            **Eagle3.SCHEMA["properties"],
            "mask_slots": {"type": "integer", "minimum": 1, "maximum": MOST_MASKS},
            "mask_token": {"type": "integer", "minimum": 0, "maximum": 2147483647},
        },
    }

    mask_slots: int = field(kw_only=True)
    mask_token: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.mask_slots <= MOST_MASKS:
            raise Malformed("mask_slots", f"{self.mask_slots} is no number of rows from 1 to {MOST_MASKS}")
        if self.sees_images or self.layer.sections:
            raise Malformed("sees_images", f"{self.WORD} heads read the tokens of a prompt, numbered on one axis")
        deepest = self.height if self.expansion is None else self.expansion.depth
        if deepest > self.levels:
            raise Malformed(
                "shape", f"a tree of depth {deepest}, and {self.mask_slots} mask tokens reach one level more"
            )

    @property
    def as_seeing(self) -> None:
        """See `Draft`; rows of mask tokens have the positions of no text."""

    @property
    def levels(self) -> int:
        """The depth of the deepest node that the head can score."""
        return self.mask_slots + 1

    @property
    def runs_nodes(self) -> bool:
        """See `LayerHead`; mask tokens are run in place of nodes."""
        return False

    def tensors(self, target: Architecture) -> dict[str, tuple[int, ...]]:
        """See `Head`."""
        return {**super().tensors(target), MASK_STATE: (self.reads.parts * target.hidden_size,)}

    def token_fields(self) -> list[tuple[str, Tokens]]:
        """See `Draft`."""
        return [*super().token_fields(), ("mask_token", (self.mask_token,))]

    def with_renamed_tokens(self, rename: Callable[[Tokens], Tokens], relabel: int) -> "PEagle | None":
        """See `Draft`."""
        head = super().with_renamed_tokens(rename, relabel)
        if head is None:
            return None
        assert isinstance(head, PEagle)
        return replace(head, mask_token=rename((self.mask_token,))[0])

    def as_chain(self) -> "PEagle":
        """See `Static`; the chain is no deeper than mask tokens reach."""
        height = min(max(self.height, 2), self.levels)
        return self.with_shapes((RankTree((0, *range(height)), (0,) * (height + 1)),))

    def with_fixed_tree(self, tree: Tree) -> "PEagle | None":
        """See `Draft`; None for a tree that is deeper than mask tokens reach."""
        return super().with_fixed_tree(tree) if tree.height <= self.levels else None

    @property
    def open_rows(self) -> int:
        """See `Draft`; the root's row and those of mask tokens, whatever the tree."""
        return self.levels

    @property
    def settings_weight(self) -> int:
        """See `Draft`."""
        return self.mask_slots

    @property
    def description(self) -> str:
        """See `Draft`."""
        return f"{super().description}, {self.mask_slots} mask tokens"

    def simpler(self) -> Iterator["PEagle"]:
        """See `Eagle3`; also with fewer mask tokens."""
        for head in super().simpler():
            assert isinstance(head, PEagle)
            yield head
        least = max((self.height if self.expansion is None else self.expansion.depth) - 1, 1)
        if self.mask_slots > least:
            yield replace(self, mask_slots=least)

    def check_target(self, target: Model) -> None:
        """See `Draft`; the mask token has a row of the embedding."""
        super().check_target(target)
        if self.mask_token >= target.vocab_size:
            raise Malformed("mask_token", f"{self.mask_token}: the target has token ids 0 to {target.vocab_size - 1}")
