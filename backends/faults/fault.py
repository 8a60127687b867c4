"""Fault: a reported defect of speculative decoding as a patch of an engine seam.

Files below this folder define faults under the decorator `fault`: a function from seams to seams, or, under
`in_place_of` as well, the function or class that takes the place of one seam.
"""

import re
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from types import ModuleType, UnionType
from typing import Any
from weakref import WeakKeyDictionary

from specverify.backends.base import Unsupported
from specverify.backends.engine.draft.block import BlockDraft
from specverify.backends.engine.draft.filling import TreeFilling
from specverify.backends.engine.draft.head import HeadDraft
from specverify.backends.engine.kv.arena import CacheLease
from specverify.backends.engine.model.head import HeadModel
from specverify.backends.engine.request import Request
from specverify.backends.engine.seams import Seams
from specverify.reference.trace import Stage

Plant = Callable[[Seams], Seams]
"""A function from the right seams to seams with a defect in one of them."""


@dataclass(frozen=True)
class Fault:
    """A defect that can be planted.

    Attributes:
        name: The name as users type it.
        stage: The stage at which the defect strikes.
        sentence: The defect in one sentence.
        source: The public report of the defect.
        trigger: The property of a case that makes the defect visible.
        plant: A function from the right seams to seams with the defect in one of them.
        harmless: Kinds of draft (`specverify.reference.rules.DRAWS`) under which the defect changes no law, each with
            the proof.
        on: The backend in which the defect is planted when the user names none.
    """

    name: str
    stage: Stage
    sentence: str
    source: str
    trigger: str
    plant: Plant
    harmless: Mapping[str, str] = field(default_factory=dict)
    on: str = "cpu-eager"

    @property
    def id(self) -> str:
        """The fault's entry in the catalogue of public reports, as `source` cites it; empty where there is none."""
        # A fault "of the family of" an entry is a variant of the report and not the reported defect itself.
        entry = re.search(r"(?<!family of )catalogue (BZ-\d+)", self.source)
        return entry.group(1) if entry else ""


def fault(
    stage: Stage,
    name: str,
    source: str,
    trigger: str,
    harmless: Mapping[str, str] | None = None,
    on: str = "cpu-eager",
) -> Callable[[Plant], Fault]:
    """A decorator that makes a fault of a function from seams to seams.

    The first paragraph of the function's docstring is the fault's sentence, which users read.
    """

    def decorate(plant: Plant) -> Fault:
        sentence = " ".join((plant.__doc__ or "").split("\n\n")[0].split())
        return Fault(name, stage, sentence, source, trigger, plant, harmless or {}, on)

    return decorate


drafted_fault = partial(fault, Stage.DRAFTED)
lowered_fault = partial(fault, Stage.LOWERED)
attended_fault = partial(fault, Stage.ATTENDED)
scored_fault = partial(fault, Stage.SCORED)
accepted_fault = partial(fault, Stage.ACCEPTED)
emitted_fault = partial(fault, Stage.EMITTED)
committed_fault = partial(fault, Stage.COMMITTED)


def in_place_of(
    seam: str, owner: type | UnionType = object, refusal: str = ""
) -> Callable[[Callable[..., Any]], Plant]:
    """A decorator that makes a function from seams to seams of what takes the place of one seam.

    A class stands there as it is, and its own name means the fault afterwards. A function is given the object of which
    the seam is a field, and then the seam's arguments. The docstring goes with it.

    Args:
        seam: The fields that lead to the seam, as in "kv.lanes".
        owner: What the object of which the seam is a field must be.
        refusal: The words of Unsupported where the object is something else.
    """
    *path, _ = seam.split(".")

    def decorate(wrong: Callable[..., Any]) -> Plant:
        def plant(seams: Seams) -> Seams:
            right = attrgetter(".".join(path))(seams) if path else seams
            if not isinstance(right, owner):
                raise Unsupported(refusal)
            replaced: Seams = with_seam(seams, seam, wrong if isinstance(wrong, type) else partial(wrong, right))
            return replaced

        plant.__doc__ = wrong.__doc__
        return plant

    return decorate


def on_result_of(
    seam: str, owner: type | UnionType = object, refusal: str = ""
) -> Callable[[Callable[[Any], Any]], Plant]:
    """A decorator as `in_place_of`, for a function that changes what the right seam returns."""

    def decorate(change: Callable[[Any], Any]) -> Plant:
        def wrong(right: Any, *args: Any) -> Any:
            return change(getattr(right, seam.rpartition(".")[2])(*args))

        wrong.__doc__ = change.__doc__
        return in_place_of(seam, owner, refusal)(wrong)

    return decorate


def in_place_of_draft(kind: type[TreeFilling], applies_to: Callable[[CacheLease], bool] = lambda lease: True) -> Plant:
    """A decorator as `in_place_of`, for a class of drafts: requests get it in place of its base, where `applies_to`."""

    class AdoptingRequest(Request):
        __doc__ = kind.__doc__

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

    return in_place_of("request")(AdoptingRequest)


def in_place_of_head(applies_to: Callable[[HeadModel], bool]) -> Callable[[type[HeadModel]], Plant]:
    """A decorator as `in_place_of_draft`, for a class with methods of a head's model; `applies_to` says of which."""

    def decorate(kind: type[HeadModel]) -> Plant:
        planted_heads: WeakKeyDictionary[HeadModel, HeadModel] = WeakKeyDictionary()

        def planted(head: HeadModel) -> HeadModel:
            # A head is shared by all requests, which must still share one, and by runs without the fault.
            if head not in planted_heads:
                wrong = copy(head)
                wrong.__class__ = type(kind.__name__, (kind, type(head)), {})
                planted_heads[head] = wrong
            return planted_heads[head]

        class AdoptingRequest(Request):
            __doc__ = kind.__doc__

            def prefill(self) -> None:
                self._adopt()
                super().prefill()

            def propose(self) -> None:
                self._adopt()
                super().propose()

            def _adopt(self) -> None:
                draft = self.draft
                if not isinstance(draft, (HeadDraft, BlockDraft)) or isinstance(draft.head, kind):
                    return
                if applies_to(draft.head):
                    draft.head = planted(draft.head)

        return in_place_of("request")(AdoptingRequest)

    return decorate


def with_seam(seams: Any, seam: str, value: Any) -> Any:
    """`seams` with `value` in the place of the seam to which the fields `seam` lead, as in "kv.lanes".

    In place of a method stands an object of a subclass that has `value`, a function without `self`, as this method.
    """
    first, _, rest = seam.partition(".")
    part = with_seam(getattr(seams, first), rest, value) if rest else value
    if first in getattr(seams, "__dataclass_fields__", ()):
        return replace(seams, **{first: part})
    kind = type(seams)
    return type(kind.__name__, (kind,), {first: staticmethod(part)})(**vars(seams))


def faults_in(module: ModuleType) -> tuple[Fault, ...]:
    """The faults among the names of a module, in the order of their definition."""
    return tuple(value for value in vars(module).values() if isinstance(value, Fault))
