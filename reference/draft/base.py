"""Draft: the interface of every kind of draft that a case file may name.

A draft proposes the trees of a case. A kind is a frozen dataclass whose fields are those of its object in a case file.
Code that reads a draft calls this interface and never tests the class. `specverify.reference.oracle.draft` defines what
the draft proposes, `specverify.backends.engine.draft` runs it in the engine, and
`specverify.properties.strategies.draft` draws it for cases; each has a file for each kind.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, ClassVar, TypeVar

from specverify.reference.architecture import Model
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft_trees import Dispatch, Expansion, Stopped
from specverify.reference.files.json_types import READERS, build, untagged
from specverify.reference.malformed import Malformed
from specverify.reference.tree import Shape, Tree

Tokens = tuple[int, ...]
DraftT = TypeVar("DraftT", bound="Draft")

KINDS: "dict[str, type[Draft]]" = {}
"""Each kind of draft by its tag."""


class Draft(ABC):
    """The draft of a case, as the case file describes it.

    Attributes:
        TAG: The kind's name in case files and in declarations of backends.
        SCHEMA: The JSON Schema of the kind's object, where `case.schema.json` does not hold it.
        has_law: Whether a node's children can be drawn from the draft's law; otherwise they are named by rank.
        trees: The trees that the case itself holds; None where the draft makes its own tokens.
        model: The model that the draft runs; None for a draft without a model.
        vocabulary: Target ids that the draft can name, ascending; empty for all of them.
        reads: The hidden states of the target that the draft is given; None for a draft that reads none.
        shared: Whether the draft of a request learns from the texts of other requests of its session.
        sees_images: Whether the draft reads the images of a prompt: their embeddings in place of those of their tokens,
            and positions on three axes where it has these. Otherwise it reads the tokens, numbered by their columns.
    """

    TAG: ClassVar[str]
    SCHEMA: ClassVar[Mapping[str, Any] | None] = None
    has_law: ClassVar[bool] = False
    trees: tuple[Tree, ...] | None
    model: Model | None
    vocabulary: Tokens
    reads: HiddenStates | None
    shared: bool = False
    sees_images: bool = False

    def __init_subclass__(cls) -> None:
        """Enter the kind under its tag; a class without a tag is a base of kinds."""
        if "TAG" in vars(cls):
            registered = KINDS.setdefault(cls.TAG, cls)
            # Not `is not`: a dataclass with slots makes a second class under the same name.
            if registered.__qualname__ != cls.__qualname__:
                raise TypeError(f"{cls.__qualname__}: the tag {cls.TAG!r} is that of {registered.__qualname__}")
            KINDS[cls.TAG] = cls

    @classmethod
    def read(cls: type[DraftT], content: Mapping[str, Any]) -> DraftT:
        """The draft that the checked JSON object `content` describes; raises Malformed under the field's path."""
        draft: DraftT = build(cls, untagged(content))
        return draft

    @property
    @abstractmethod
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of the trees that the draft proposes: one for each step, or one for all steps."""

    @property
    def branches(self) -> bool:
        """Whether a node of a tree that the draft proposes may have more than one child."""
        return any(shape.branches for shape in self.shapes)

    @abstractmethod
    def with_shapes(self: DraftT, shapes: tuple[Shape, ...]) -> DraftT:
        """The same draft with other trees: each a part of one of its own trees, or the only tree of a static draft."""

    def naming(self, ids: Tokens) -> "Draft | None":
        """The draft that can name the target ids `ids` alone, ascending; None where none can be told."""
        return None

    @abstractmethod
    def as_chain(self) -> "Draft":
        """The draft with one path of each tree, for rules that verify chains alone."""

    @property
    @abstractmethod
    def description(self) -> str:
        """The draft in a few words for a page: `n-gram draft of 5 nodes`."""

    def with_renamed_tokens(self: DraftT, rename: Callable[[Tokens], Tokens], relabel: int) -> DraftT | None:
        """The draft after every token id was renamed; its model is relabelled by the seed `relabel`.

        None where the draft names tokens by a rule that depends on their ids.
        """
        return self

    def simpler(self: DraftT) -> Iterator[DraftT]:
        """Drafts with one setting less; their trees stay."""
        return iter(())

    def with_defaults(self: DraftT, *names: str) -> Iterator[DraftT]:
        """For each of these fields that does not hold its default, the draft that does."""
        defaults = {field.name: field.default for field in fields(self)}  # type: ignore[arg-type]
        for name in names:
            if getattr(self, name) != defaults[name]:
                yield replace(self, **{name: defaults[name]})  # type: ignore[type-var]

    def with_model(self: DraftT, model: Model) -> DraftT:
        """The same draft with `model` in place of its own model; a draft without a model stays as it is."""
        return self if self.model is None else replace(self, model=model)  # type: ignore[type-var]

    def token_fields(self) -> list[tuple[str, Tokens]]:
        """The draft's fields that hold token ids, each with its path below the draft."""
        return [("vocabulary", self.vocabulary)] if self.vocabulary else []

    def check(self, pending: int) -> None:  # noqa: B027 - most kinds can begin anywhere
        """Raise Malformed where the draft cannot begin under the pending root `pending`."""

    def check_target(self, target: Model) -> None:  # noqa: B027 - most kinds draft for any target
        """Raise Malformed where the draft cannot draft for `target`."""

    @property
    def in_bits(self) -> str:
        """The kind of the draft's quantised weights, one of QUANTISED; empty where its weights are as stored."""
        return "" if self.model is None else self.model.quantised

    @property
    def kv_sizes(self) -> tuple[int, int | None, int | None] | None:
        """Layers, KV heads and head size of the draft's cache; None where `model` tells them, or there is none.

        Heads and their size are None where they are the target's.
        """
        return None

    @property
    def has_columns(self) -> bool:
        """Whether the draft has keys and values of its own."""
        return self.model is not None or self.kv_sizes is not None

    @property
    def has_weights(self) -> bool:
        """Whether the draft runs a model or a head, which reads hidden states of the target."""
        return self.model is not None or self.reads is not None

    @property
    def part_heads(self) -> tuple[int, int] | None:
        """Heads and KV heads of a head's layers, by which ranks share it; None for a draft that is no such head."""
        return None

    def with_fixed_tree(self: DraftT, tree: Tree) -> DraftT | None:
        """The draft that proposes `tree` as it is and scores it; None where no draft of the kind does so."""
        return None

    @property
    def expansion(self) -> Expansion | None:
        """The dynamic tree that the draft fills; None for a draft whose trees have fixed shapes."""
        return None

    @property
    def dispatch(self) -> Dispatch | None:
        """The table of static trees by batch size that the draft fills; None for a draft without one."""
        return None

    @property
    def stopped(self) -> Stopped | None:
        """The static tree whose paths end by the draft's confidence; None for a draft that always goes on."""
        return None

    def in_batches(self: DraftT, sizes: Tokens) -> DraftT:
        """The draft of a request whose steps are taken by batches of `sizes`; it differs for a table of trees alone."""
        return self

    @property
    def tree_kind(self) -> str:
        """The kind of tree that the draft fills, one of `specverify.reference.draft_trees.TREE_KINDS`."""
        return "static"

    @property
    def as_seeing(self) -> "Draft | None":
        """The draft that sees the images of a prompt; None for a kind or a model that cannot."""
        return None

    @property
    def as_shared(self) -> "Draft | None":
        """The draft that learns from the texts of all requests that have it; None for a kind that cannot."""
        return None

    @property
    def open_rows(self) -> int:
        """The most rows that a proposal opens in the draft's own cache, the root's included."""
        return largest_tree_size(self)

    @property
    def settings_weight(self) -> int:
        """How many settings a reader of the case has to keep in mind, beside the tree; 0 for the plainest."""
        return 0

    def refuses_draws(self, draws: str) -> str | None:
        """Why the draft cannot name siblings by `draws` for a request that samples, or None."""
        return None

    @property
    def height(self) -> int:
        """Depth of the deepest node that the draft proposes; 0 for the bare root."""
        return max((shape.height for shape in self.shapes), default=0)


READERS[Draft] = lambda content: KINDS[content["kind"]].read(content)


def largest_tree_size(draft: Draft) -> int:
    """Number of nodes of the largest tree that `draft` proposes."""
    return max((len(shape) for shape in draft.shapes), default=1)


def most_rows(draft: Draft) -> int:
    """Rows that a cache of the target or of the draft must have room for at once."""
    return max(largest_tree_size(draft), draft.open_rows)


def step_columns(draft: Draft) -> int:
    """The columns behind the committed ones that a step may write, in the target's cache or the draft's.

    They are the nodes of the tree, the rows that a proposal opens, such as the slots of a block, or the rows of all
    levels where a draft tries more candidates than its tree has: SGLang's allocation of a step, max(top-k x steps,
    draft tokens).
    """
    expansion = draft.expansion
    return max(most_rows(draft), 0 if expansion is None else expansion.top_k * expansion.depth)


def single_shape(shapes: tuple[Shape, ...]) -> Shape:
    """The one shape of a static draft.

    Raises:
        Malformed: for none or several.
    """
    if len(shapes) != 1:
        raise Malformed("shape", f"{len(shapes)} trees, where the draft has one for all steps")
    return shapes[0]
