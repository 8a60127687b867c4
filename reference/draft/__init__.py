"""The kinds of draft that a case may ask for, one file for each kind.

Making the class of a kind enters it under its tag. Every module of this folder is imported, so a new kind needs a new
file here and no other line.
"""

from importlib import import_module
from pkgutil import iter_modules

from specverify.reference.draft.base import KINDS, Draft, largest_tree_size, most_rows, step_columns
from specverify.reference.draft.language_model import LanguageModel
from specverify.reference.draft.ngram import Ngram
from specverify.reference.draft.scripted import Scripted

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["KINDS", "Draft", "LanguageModel", "Ngram", "Scripted", "largest_tree_size", "most_rows", "step_columns"]
