"""The tree that each kind of draft must propose, one file for each kind.

The proposal is computed from scratch at every step; the function is found by the draft's tag. Every module of this
folder is imported, so a new kind needs a new file here and no other line.
"""

from importlib import import_module
from pkgutil import iter_modules

from specverify.reference.draft import Draft
from specverify.reference.oracle.draft.question import PROPOSALS, Question
from specverify.reference.trace import Drafted

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")


def propose(draft: Draft, question: Question) -> Drafted:
    """The tree that `draft` must propose under the pending root `question.tokens[-1]`."""
    return PROPOSALS[draft.TAG](draft, question)


__all__ = ["PROPOSALS", "Question", "propose"]
