"""Functions of an engine that are wrapped while a tap records."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from specverify.setup.errors import MissingInput


class Wrapped:
    """Attributes of modules and classes with other values, until `restore`.

    Args:
        engine: The engine's package, named in complaints.
        fitting: The version whose names the tap knows.
    """

    def __init__(self, engine: str, fitting: str) -> None:
        self._engine = engine
        self._fitting = fitting
        self._originals: list[tuple[Any, str, Any]] = []

    def owner(self, module: str, name: str = "") -> Any:
        """A module of the engine, or a class of it.

        Raises:
            MissingInput: The installed version has none of this name.
        """
        try:
            owner = import_module(module)
        except ImportError as why:
            raise MissingInput(f"{self._engine} cannot be tapped: {' '.join(str(why).split())}") from None
        return self._attribute(owner, name, module) if name else owner

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put `wrapper(original)` in place of a function of `owner`.

        Raises:
            MissingInput: `owner` has no such function.
        """
        original = self._attribute(owner, name, owner.__name__)
        self._originals.append((owner, name, original))
        setattr(owner, name, wrapper(original))

    def restore(self) -> None:
        """Put the originals back."""
        while self._originals:
            setattr(*self._originals.pop())

    def _attribute(self, owner: Any, name: str, place: str) -> Any:
        if not hasattr(owner, name):
            version = getattr(import_module(self._engine), "__version__", "")
            raise MissingInput(
                f"{self._engine} {version} has no {place}.{name}, which the tap of {self._fitting} wraps: "
                f"install {self._engine} {self._fitting}"
            )
        return getattr(owner, name)
