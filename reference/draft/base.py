"""Draft: what proposes the trees of a case, as far as the case itself says; the interface of every kind of draft.

A kind is a frozen dataclass whose fields are what a case file holds of it. Whoever reads a draft asks this interface
and never for the class: what the draft proposes is defined in `reference.oracle.draft`, how the engine runs it stands
in `backends.engine.draft`, and how cases draw it in `properties.strategies.draft`, each in a file of the kind.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from reference.architecture import Model
from reference.hidden import HiddenStates
from reference.malformed import Malformed
from reference.tree import Shape, Tree

Tokens = tuple[int, ...]
Own = TypeVar("Own", bound="Draft")

KINDS: "dict[str, type[Draft]]" = {}
"""Each kind of draft by its tag."""


class Draft(ABC):
    """The draft of a case, as the case file describes it.

    Attributes:
        TAG: The kind's name in case files and in declarations of backends.
        SCHEMA: The JSON Schema of the kind's object, where `case.schema.json` does not hold it.
        has_law: Whether a node's children can be drawn from a law that the draft gives, rather than named by rank.
        trees: The trees that the case itself holds; None where the draft makes its own tokens.
        model: The model that the draft runs; None where it runs none.
        vocabulary: Target ids that the draft can name, ascending; empty for all of them.
        reads: Which hidden states of the target the draft is given; None where it is given none.
    """

    TAG: ClassVar[str]
    SCHEMA: ClassVar[Mapping[str, Any] | None] = None
    has_law: ClassVar[bool] = False
    trees: tuple[Tree, ...] | None
    model: Model | None
    vocabulary: Tokens
    reads: HiddenStates | None

    def __init_subclass__(cls) -> None:
        """Enter the kind under its tag; a class without one is a part of kinds."""
        if "TAG" in vars(cls):
            taken = KINDS.setdefault(cls.TAG, cls)
            if taken.__qualname__ != cls.__qualname__:  # dataclasses with slots make a class anew under its name
                raise TypeError(f"{cls.__qualname__}: the tag {cls.TAG!r} is that of {taken.__qualname__}")
            KINDS[cls.TAG] = cls

    @classmethod
    @abstractmethod
    def read(cls: type[Own], content: Mapping[str, Any]) -> Own:
        """The draft that the checked JSON object `content` describes; raises Malformed under the field's path."""

    @property
    @abstractmethod
    def shapes(self) -> tuple[Shape, ...]:
        """The trees that the draft proposes, by their shape: one for each step, or one for all steps."""

    @abstractmethod
    def with_shapes(self: Own, shapes: tuple[Shape, ...]) -> Own:
        """The same draft with other trees: each a part of one of its own, or the only one of a static draft."""

    @abstractmethod
    def as_chain(self) -> "Draft":
        """The draft with one path of each tree, as rules that verify chains want it."""

    @property
    @abstractmethod
    def told(self) -> str:
        """The draft in a few words for a page: `n-gram draft of 5 nodes`."""

    def renamed(self: Own, renamed: Callable[[Tokens], Tokens], relabel: int) -> Own | None:
        """The draft after every token id was renamed; models of it are relabelled by the seed `relabel`.

        None where the draft names tokens by a rule of its own, which knows their ids.
        """
        return self

    def simpler(self: Own) -> Iterator[Own]:
        """Drafts with one setting less, trees aside."""
        return iter(())

    def on(self: Own, model: Model) -> Own:
        """The same draft with `model` in place of the one it runs; itself where it runs none."""
        return self if self.model is None else replace(self, model=model)  # type: ignore[type-var]

    def token_fields(self) -> list[tuple[str, Tokens]]:
        """Its fields that hold token ids, each with its path below the draft."""
        return [("vocabulary", self.vocabulary)] if self.vocabulary else []

    def check(self, pending: int) -> None:  # noqa: B027 - most kinds can begin anywhere
        """Raise Malformed where the draft cannot begin under the pending root `pending`."""

    @property
    def height(self) -> int:
        """Depth of the deepest node that the draft proposes; 0 where it proposes the bare root."""
        return max((shape.height for shape in self.shapes), default=0)


def largest(draft: Draft) -> int:
    """Nodes of the largest tree that `draft` proposes."""
    return max((len(shape) for shape in draft.shapes), default=1)


def only(shapes: tuple[Shape, ...]) -> Shape:
    """The one shape of a static draft.

    Raises:
        Malformed: for none or several.
    """
    if len(shapes) != 1:
        raise Malformed("shape", f"{len(shapes)} trees, where the draft has one for all steps")
    return shapes[0]
