"""Head: the common base of drafts whose weights read the target's hidden states.

Tokens x_0 .. x_L are given, x_L being the pending root; the target's state s_i is known for i < L. A head is made for
one target, whose embedding or head matrix it may share.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from specverify.reference.architecture import Architecture, Model, Seeded
from specverify.reference.draft.base import Tokens
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.static import Static
from specverify.reference.draft_trees import DraftTree
from specverify.reference.malformed import Malformed
from specverify.reference.quantisation import QUANTISED, check_quantised
from specverify.reference.rules import OMIT_DEFAULT
from specverify.reference.tree import RankTree, Shape, Tree


@dataclass(frozen=True)
class HeadFiles:
    """A directory with the weights of a head, known by its content.

    Attributes:
        source: The directory that was read. Not part of the case's digest.
        digest: `sha256:` over config.json and the safetensors files; a replay on another machine checks the weights
            by it.
    """

    source: str
    digest: str


FILES_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["source", "digest"],
    "properties": {"source": {"type": "string"}, "digest": {"type": "string"}},
}
"""The JSON Schema of HeadFiles."""


HeadT = TypeVar("HeadT", bound="Head")

READS_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["layers", "place"],
    "properties": {
        "layers": {"type": "array", "items": {"type": "integer", "minimum": -1}, "maxItems": 64},
        "place": {"type": "string"},
        "shift": {"type": "integer"},
    },
}
"""The JSON Schema of HiddenStates."""

TOKENS_SCHEMA: Mapping[str, Any] = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 2147483647},
    "maxItems": 1048576,
}
"""The JSON Schema of a list of token ids."""


_MAY = {"fixed": TOKENS_SCHEMA, "files": FILES_SCHEMA, "quantised": {"enum": list(QUANTISED)}}

NOTHING: Mapping[str, Any] = {}
"""No further fields."""


def head_schema(optional_fields: Mapping[str, Any] = NOTHING, **fields_of_kind: Mapping[str, Any]) -> Mapping[str, Any]:
    """The JSON Schema of a kind of head: fields of every head, `fields_of_kind`, and `optional_fields`, if present."""
    shared_fields = {"kind": {}, "shape": {"$ref": "#/$defs/draftTree"}, "reads": READS_SCHEMA}
    seed = {"seed": {"type": "integer", "minimum": 0}}
    required = [*shared_fields, *seed, *fields_of_kind]
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required,
        "properties": {**shared_fields, **seed, **fields_of_kind, **optional_fields, **_MAY},
    }


@dataclass(frozen=True)
class Head(Static):
    """A draft head: seeded, for a built-in target, or stored in files, for the target that it was trained on.

    Attributes:
        SHIFT: The positions by which the token beside a state is ahead of it, for this kind of head.
        shape: The tree that the head fills, static or dynamic.
        reads: The target's hidden states that the head reads.
        seed: The seed of the head's weights; 0 for stored weights.
        files: The directory of the stored weights; None for seeded ones.
        quantised: The kind of matrices that are rounded to fewer bits when the head is opened, one of QUANTISED, as in
            `int8`; empty for the weights as they are.
        fixed: The token of each node, root first, in place of the best by rank; empty for the best. A tree whose tokens
            were drawn is scored in this way.
    """

    SHIFT: ClassVar[int]
    has_law: ClassVar[bool] = True
    model = None

    shape: DraftTree
    reads: HiddenStates = field()  # without the default of Static
    seed: int = field(default=0, kw_only=True)
    fixed: tuple[int, ...] = field(default=(), metadata=OMIT_DEFAULT, kw_only=True)
    files: HeadFiles | None = field(default=None, metadata=OMIT_DEFAULT, kw_only=True)
    quantised: str = field(default="", metadata=OMIT_DEFAULT, kw_only=True)

    def __post_init__(self) -> None:
        check_quantised(self.quantised)
        self.check_stop()
        if self.seed < 0:
            raise Malformed("seed", "seeds are not negative")
        if self.seed and self.files is not None:
            raise Malformed("seed", f"{self.seed}, though the weights are stored in files")
        if self.reads.shift != self.SHIFT:
            token_words = "the token after its state" if self.SHIFT else "no token"
            raise Malformed(
                "reads.shift",
                f"{self.reads}: a row holds {token_words}, so the shift is {self.SHIFT} in {self.WORD}",
            )
        if self.fixed and (self.tree_kind != "static" or len(self.fixed) != len(self.shapes[0])):
            raise Malformed("fixed", f"{len(self.fixed)} tokens for {self.description}")

    @abstractmethod
    def tensors(self, target: Architecture) -> dict[str, tuple[int, ...]]:
        """The shape of each weight of the head on `target`, by its name in published checkpoints of the kind."""

    def resting_gain(self, target: Architecture) -> float:
        """The weight with which a norm of the head multiplies by 1; seeded weights of norms lie around this number."""
        return 1.0

    def by_token(self, target: Architecture) -> tuple[str, ...]:
        """Names of the weights of the head on `target` that have a row for each target id."""
        return ()

    @property
    def read_by_token(self) -> tuple[str, ...]:
        """The weights of `by_token` from which any token is read, and which a reduced vocabulary leaves whole."""
        return ()

    @property
    def in_bits(self) -> str:
        """See `Draft`."""
        return self.quantised

    def in_weights(self: HeadT, kind: str) -> HeadT:
        """The head with weights of `kind`, one of QUANTISED, or as they are if it is empty."""
        return replace(self, quantised=kind)

    @property
    def description(self) -> str:
        """See `Draft`."""
        return f"{super().description}, weights in {self.quantised}" if self.quantised else super().description

    def simpler(self: HeadT) -> Iterator[HeadT]:
        """The head with a smaller dynamic tree, and without quantised weights."""
        yield from super().simpler()
        yield from self.with_defaults("quantised")

    def with_shapes(self: HeadT, shapes: tuple[Shape, ...]) -> HeadT:
        """See `Draft`; tokens that were fixed for another tree are dropped."""
        return super(Head, replace(self, fixed=())).with_shapes(shapes)

    def with_fixed_tree(self: HeadT, tree: Tree) -> HeadT | None:
        """See `Draft`."""
        return replace(self.with_shapes((tree,)), fixed=tree.token)

    def with_renamed_tokens(self: HeadT, rename: Callable[[Tokens], Tokens], relabel: int) -> HeadT | None:
        """See `Draft`; seeded weights follow the target's names of tokens, and stored ones keep their own."""
        return None if self.files is not None else replace(self, fixed=rename(self.fixed))

    @property
    def weights(self: HeadT) -> HeadT:
        """The head with the bare root as its tree: heads with the same weights are equal in this form."""
        return self.with_shapes((RankTree((0,), (0,)),))

    @property
    def stored_words(self: HeadT) -> HeadT:
        """The head as its files describe it."""
        return replace(self, quantised="")

    def token_fields(self) -> list[tuple[str, Tokens]]:
        """See `Draft`."""
        return [*super().token_fields(), *([("fixed", self.fixed)] if self.fixed else [])]

    def check_target(self, target: Model) -> None:
        """See `Draft`."""
        if self.files is None and not isinstance(target, Seeded):
            raise Malformed("", f"a seeded {self.WORD} head is made for a built-in target, not for a checkpoint")
        self.check_rank(len(self.vocabulary) or target.vocab_size)
        missing = set(self.fixed[1:]) - set(self.vocabulary) if self.vocabulary else ()
        if missing:
            raise Malformed("fixed", f"{min(missing)} is not in the vocabulary of the head")
