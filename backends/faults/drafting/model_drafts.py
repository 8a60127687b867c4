"""The patch under faults of drafts: requests get another draft class."""

from collections.abc import Callable
from dataclasses import replace

from specverify.backends.engine.draft.filling import TreeFilling
from specverify.backends.engine.kv.arena import CacheLease
from specverify.backends.engine.request import Request
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import Plant


def with_draft_class(
    seams: Seams, kind: type[TreeFilling], applies_to: Callable[[CacheLease], bool] = lambda lease: True
) -> Seams:
    """The seams with requests whose draft is of class `kind` in place of its base, where `applies_to` the lease."""

    class AdoptingRequest(Request):
        def prefill(self) -> None:
            self._adopt()
            super().prefill()

        def propose(self) -> None:
            self._adopt()
            super().propose()

        def _adopt(self) -> None:
            if type(self.draft) is kind.__base__ and applies_to(self.lease):
                # Only the class changes: the draft's model, cache and shape are made by the right code and stay.
                self.draft.__class__ = kind  # type: ignore[assignment]  # a subclass of the class that it has

    return replace(seams, request=AdoptingRequest)


def in_place_of_draft(kind: type[TreeFilling]) -> Plant:
    """A function from seams to seams that gives requests a draft of class `kind` in place of its base."""

    def plant(seams: Seams) -> Seams:
        return with_draft_class(seams, kind)

    plant.__doc__ = kind.__doc__
    return plant
