"""Puts a model draft of another class into requests, which is how faults of model drafts are planted."""

from collections.abc import Callable
from dataclasses import replace

from backends.engine.draft.language_model import ModelDraft
from backends.engine.kv.arena import CacheLease
from backends.engine.request import Request
from backends.engine.seams import Seams


def drafting(seams: Seams, kind: type[ModelDraft], where: Callable[[CacheLease], bool] = lambda lease: True) -> Seams:
    """Requests whose model draft is of class `kind`, for leases that meet the condition."""

    class Drafting(Request):
        def prefill(self) -> None:
            self._adopt()
            super().prefill()

        def propose(self) -> None:
            self._adopt()
            super().propose()

        def _adopt(self) -> None:
            if type(self.draft) is ModelDraft and where(self.lease):
                self.draft.__class__ = kind

    return replace(seams, request=Drafting)
