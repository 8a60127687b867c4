"""The drafts that a case may ask for, one file for each kind; a kind is known by its tag once its class is made.

Every module of this folder is imported, so that a new kind is a new file here and no line elsewhere.
"""

from importlib import import_module
from pkgutil import iter_modules

from reference.draft.base import KINDS, Draft, largest
from reference.draft.language_model import LanguageModel
from reference.draft.ngram import Ngram
from reference.draft.scripted import Scripted

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["KINDS", "Draft", "LanguageModel", "Ngram", "Scripted", "largest"]
