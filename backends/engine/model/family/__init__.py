"""The model families that the engine opens.

Every module of this folder is imported, and its `ModelFamily` objects are entered under their names. A new family is a
new file here and no line elsewhere.
"""

from importlib import import_module
from pkgutil import iter_modules

from backends.engine.model.family.base import Exact, ModelFamily

FAMILIES: dict[str, ModelFamily] = {}
"""Every family by its name."""

for _module in sorted(iter_modules(__path__), key=lambda each: each.name):
    for _value in list(vars(import_module(f"{__name__}.{_module.name}")).values()):
        if isinstance(_value, ModelFamily):
            FAMILIES[_value.name] = _value

EXACT: dict[str, Exact] = {name: make for family in FAMILIES.values() for name, make in family.exact.items()}
"""The float64 forms of the modules of all families, by the name of the module's class."""

__all__ = ["EXACT", "FAMILIES", "ModelFamily"]
