"""The patch under faults of model drafts: requests get another draft class."""

from collections.abc import Callable
from dataclasses import replace

from backends.engine.draft.language_model import ModelDraft
from backends.engine.kv.arena import CacheLease
from backends.engine.request import Request
from backends.engine.seams import Seams


def drafting(seams: Seams, kind: type[ModelDraft], where: Callable[[CacheLease], bool] = lambda lease: True) -> Seams:
    """The seams with requests whose model draft is of class `kind`, for leases that meet the condition `where`."""

    class Drafting(Request):
        def prefill(self) -> None:
            self._adopt()
            super().prefill()

        def propose(self) -> None:
            self._adopt()
            super().propose()

        def _adopt(self) -> None:
            if type(self.draft) is ModelDraft and where(self.lease):
                # Only the class changes: the draft's model, cache and shape are made by the right code and stay.
                self.draft.__class__ = kind

    return replace(seams, request=Drafting)
