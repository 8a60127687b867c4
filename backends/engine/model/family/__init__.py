"""The families that the engine opens, one file for families of a kind; found by scanning this folder."""

from importlib import import_module
from pkgutil import iter_modules

from backends.engine.model.family.base import Exact, ModelFamily

FAMILIES: dict[str, ModelFamily] = {}
"""Each family by its name."""

for _module in sorted(iter_modules(__path__), key=lambda each: each.name):
    for _value in list(vars(import_module(f"{__name__}.{_module.name}")).values()):
        if isinstance(_value, ModelFamily):
            FAMILIES[_value.name] = _value

EXACT: dict[str, Exact] = {name: make for family in FAMILIES.values() for name, make in family.exact.items()}
"""Float64 forms of modules by the name of their class, of all families."""

__all__ = ["EXACT", "FAMILIES", "ModelFamily"]
