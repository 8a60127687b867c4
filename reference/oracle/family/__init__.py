"""The oracle's formulas and config.json rules for each model family.

Every module of this folder is imported and its `OracleFamily` objects are entered under their names; a file holds one
family or several similar ones.
"""

from importlib import import_module
from pkgutil import iter_modules

from reference.oracle.family.base import OracleFamily

FAMILIES: dict[str, OracleFamily] = {}
"""Each family by its name, in the order of the files' names."""

for _module in sorted(iter_modules(__path__), key=lambda each: each.name):
    for _value in list(vars(import_module(f"{__name__}.{_module.name}")).values()):
        if isinstance(_value, OracleFamily):
            FAMILIES[_value.name] = _value

__all__ = ["FAMILIES", "OracleFamily"]
