"""Functions of torch, NumPy and transformers that a run replaced in its process.

A patched function of torch computes every later case otherwise. A run may add names, as a late import does.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

MODULES = ("torch", "torch.nn", "torch.nn.functional", "torch.linalg", "numpy")
"""Modules whose public functions are watched, where they are imported."""

CLASSES = ("Tensor", "nn.Module", "nn.Linear", "nn.Embedding", "nn.LayerNorm", "nn.RMSNorm")
"""Classes of torch whose methods are watched."""

COMPILER = "torch._dynamo."
"""The first letters of the modules of torch's compiler."""

REGISTRY = ("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS")
"""The module of transformers with the table of its attention functions, and the table's name."""


@dataclass
class Owner:
    """A module, a class or a table, with the attributes that it had.

    Attributes:
        name: The name by which a report calls it.
        table: Its attributes, or its entries, as they are now.
        bases: The classes from which it inherits, where it is a class.
        names: The attributes that it had, in their order.
        values: The values of those.
    """

    name: str
    table: Mapping[str, Any]
    bases: tuple[type, ...] = ()

    def __post_init__(self) -> None:
        self.remember()

    def remember(self) -> None:
        """Take the attributes as they are now."""
        self.names = list(self.table)
        self.values = list(self.table.values())

    def replacements(self) -> list[str]:
        """The names whose values have been replaced since `remember`; each is told once."""
        if self._is_as_before():
            return []
        before = dict(zip(self.names, self.values, strict=True))
        names = [name for name in self.table if self._is_replaced(name, before)]
        names += [name for name in before if name not in self.table and callable(before[name])]
        self.remember()
        return [f"{self.name}.{name}" for name in names]

    def _is_as_before(self) -> bool:
        # Lists compare identity first, eight times faster than a loop does; a function equals itself alone.
        try:
            return list(self.table.values()) == self.values
        except Exception:  # a value that was put there, such as an array, may refuse to be compared
            return False

    def _is_replaced(self, name: str, before: dict[str, Any]) -> bool:
        value = self.table[name]
        if name in before:
            is_public = bool(self.bases) or not name.startswith("_")
            is_function = callable(value) or callable(before[name])
            return value is not before[name] and is_public and is_function and not _is_of_compiler(value)
        # A method that is new in a class hides the one that the class inherits.
        return callable(value) and any(name in vars(base) for base in self.bases)


def _is_of_compiler(value: object) -> bool:
    """Whether `torch.compile` put the value there: at its first use it counts the making of modules."""
    return str(getattr(value, "__module__", "")).startswith(COMPILER)


class Attributes:
    """The watched attributes of this process."""

    def __init__(self) -> None:
        self._owners: dict[str, Owner] = {}
        self.replacements()

    def replacements(self) -> list[str]:
        """One phrase for each attribute that has been replaced since the last call: `torch.softmax was replaced`."""
        phrases = []
        for name, table, bases in _tables():
            owner = self._owners.get(name)
            if owner is None:
                self._owners[name] = Owner(name, table, bases)
            else:
                phrases += [f"{attribute} was replaced" for attribute in owner.replacements()]
        return phrases


def _tables() -> Iterator[tuple[str, Mapping[str, Any], tuple[type, ...]]]:
    """Name, attributes and bases of each owner; none is imported for this."""
    for name in MODULES:
        module = sys.modules.get(name)
        if module is not None:
            yield name, vars(module), ()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        for name in CLASSES:
            owner: type = attrgetter(name)(torch)
            yield f"torch.{name}", vars(owner), owner.__mro__[1:]
    registry: Any = getattr(sys.modules.get(REGISTRY[0]), REGISTRY[1], None)
    if registry is not None:
        yield f"transformers' {REGISTRY[1]}", registry, ()
