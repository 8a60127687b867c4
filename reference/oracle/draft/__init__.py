"""The proposals that each kind of draft must make, computed from scratch every time; one file a kind, known by its tag.

Every module of this folder is imported, so that a new kind is a new file here and no line elsewhere.
"""

from importlib import import_module
from pkgutil import iter_modules

from reference.draft import Draft
from reference.oracle.draft.question import MEANINGS, Question
from reference.trace import Drafted

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")


def proposed(draft: Draft, question: Question) -> Drafted:
    """The tree that `draft` must propose under the pending root `question.tokens[-1]`."""
    return MEANINGS[draft.TAG](draft, question)


__all__ = ["MEANINGS", "Question", "proposed"]
