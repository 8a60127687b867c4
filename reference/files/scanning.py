"""The objects of one class that the modules of a folder define.

Folders whose files are entries of a table (model families) are scanned with it, so that a new entry is a new file and
no line elsewhere.
"""

from collections.abc import Iterable
from importlib import import_module
from pkgutil import iter_modules
from typing import TypeVar

T = TypeVar("T")


def members(package: str, path: Iterable[str], kind: type[T]) -> list[T]:
    """The objects of class `kind` among the names of the modules of `package`, by file name, then by definition.

    Args:
        package: The dotted name of the folder's package.
        path: Its `__path__`.
        kind: The class.
    """
    modules = sorted(iter_modules(path), key=lambda each: each.name)
    names = [vars(import_module(f"{package}.{module.name}")) for module in modules]
    return [value for held in names for value in held.values() if isinstance(value, kind)]
