"""The oracle's formulas and config.json rules for each model family.

Every module of this folder is imported and its `OracleFamily` objects are entered under their names; a file holds one
family or several similar ones.
"""

from specverify.reference.family.base import members
from specverify.reference.oracle.family.base import OracleFamily

FAMILIES: dict[str, OracleFamily] = {family.name: family for family in members(__name__, __path__, OracleFamily)}
"""Each family by its name, in the order of the files' names."""

__all__ = ["FAMILIES", "OracleFamily"]
