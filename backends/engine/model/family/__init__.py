"""The model families that the engine opens.

Every module of this folder is imported, and its `ModelFamily` objects are entered under their names. A new family is a
new file here and no line elsewhere.
"""

from specverify.backends.engine.model.family.base import Exact, ModelFamily
from specverify.reference.family.base import members

FAMILIES: dict[str, ModelFamily] = {family.name: family for family in members(__name__, __path__, ModelFamily)}
"""Every family by its name."""

EXACT: dict[str, Exact] = {name: make for family in FAMILIES.values() for name, make in family.exact.items()}
"""The float64 forms of the modules of all families, by the name of the module's class."""

__all__ = ["EXACT", "FAMILIES", "ModelFamily"]
