"""The model families that a case may name, each in a file of this folder.

Every module of this folder is imported and its `Family` objects are entered under their names, so a new family needs a
new file here and no other line.
"""

from importlib import import_module
from pkgutil import iter_modules

from reference.family.base import Family, LayerNorms

FAMILIES: dict[str, Family] = {}
"""Each family by its name."""

for _module in sorted(iter_modules(__path__), key=lambda each: each.name):
    for _value in list(vars(import_module(f"{__name__}.{_module.name}")).values()):
        if isinstance(_value, Family):
            FAMILIES[_value.name] = _value

__all__ = ["FAMILIES", "Family", "LayerNorms"]
