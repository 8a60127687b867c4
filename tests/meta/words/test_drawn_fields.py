"""Every field of a head is drawn with two values, or the reason why not is written down."""

from collections import defaultdict
from dataclasses import fields

import pytest

from specverify.properties.strategies.draft.drawing import DRAWN, DraftSetting
from specverify.properties.strategies.models import GALLERY
from specverify.properties.strategies.settings import explore
from specverify.reference.architecture import Seeded
from specverify.reference.draft.block import Block
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.draft.medusa import Medusa
from specverify.reference.draft.mtp import Mtp
from specverify.reference.draft.peagle import PEagle

VARIANTS, LATER = "variants of a case alone have it", "it is drawn with the rest of the case"

UNDRAWN = {
    "files": "a head of a checkpoint, and drawn heads have seeded weights",
    "fixed": VARIANTS,
    "own_rows": VARIANTS,
    "candidates": VARIANTS,
    "unselected": VARIANTS,
    "first_token": LATER,
    "alignment": LATER,
    "sees_images": LATER,
    "sections": LATER,
}
"""Fields of which a strategy draws one value, each with the reason."""

KINDS = (Block.TAG, Eagle1.TAG, Eagle3.TAG, Medusa.TAG, Mtp.TAG, PEagle.TAG)

TARGET = Seeded(next(arch for arch in GALLERY if arch.layers == 3 and arch.vocab_size > 60), 0)


def values_drawn(tag: str) -> dict[str, set[str]]:
    """The values of each field of a kind of head, and of its layer, in some draws."""
    values = defaultdict[str, set[str]](set)

    def take(drawn: object) -> None:
        for field in fields(drawn):  # type: ignore[arg-type]
            value = getattr(drawn, field.name)
            values[field.name].add(repr(value))
            if isinstance(value, HeadLayer):
                take(value)

    for number in range(30):
        explore(number, 8, DRAWN[tag](DraftSetting(TARGET, (1, 2, 3), (4, 5, 6, 7, 8))), take)
    return values


@pytest.mark.parametrize("tag", KINDS)
def test_every_field_of_a_head_is_drawn_with_two_values(tag: str) -> None:
    assert {name for name, drawn in values_drawn(tag).items() if len(drawn) == 1} <= {*UNDRAWN}


def test_each_reason_is_that_of_a_field() -> None:
    assert {*UNDRAWN} <= {name for tag in KINDS for name in values_drawn(tag)}
