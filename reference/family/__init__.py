"""The model families that a case may name, each in a file of this folder.

Every module of this folder is imported and its `Family` objects are entered under their names, so a new family needs a
new file here and no other line.
"""

from specverify.reference.family.base import Family, LayerNorms, members

FAMILIES: dict[str, Family] = {family.name: family for family in members(__name__, __path__, Family)}
"""Each family by its name."""

__all__ = ["FAMILIES", "Family", "LayerNorms"]
