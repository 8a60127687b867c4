"""What the oracle knows of each model family, one file for families of a kind; found by scanning this folder."""

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
