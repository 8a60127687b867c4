"""The drafts of the engine, one file for each kind, found by its tag.

The interface is in `backends/engine/draft/base.py`. Every module of this folder is imported, so that a new kind is a
new file here and no line elsewhere.
"""

from importlib import import_module
from pkgutil import iter_modules

from specverify.backends.engine.draft.base import HEADS, OPENERS, Draft, Opening
from specverify.backends.engine.draft.filling import TreeFilling

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")


def open_draft(opening: Opening) -> Draft:
    """Open the draft that `opening.case` names; a draft that fills trees is told the size of each batch."""
    draft = OPENERS[opening.case.draft.TAG](opening)
    if isinstance(draft, TreeFilling):
        draft.batch_size = opening.batch_size
    return draft


__all__ = ["HEADS", "OPENERS", "Draft", "Opening", "open_draft"]
