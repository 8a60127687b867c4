"""Drafts that see the images of a prompt, against the oracle, in every layout and in sessions."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specverify.backends.compositions import open_cpu
from specverify.campaign.against import TransformersOracle
from specverify.properties.invariants import ALL
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Draft, LanguageModel
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.draft.mtp import Mtp
from specverify.reference.draft.peagle import PEagle
from specverify.reference.family.vision_text import VisionTextSettings
from specverify.reference.images import Image, Images
from specverify.reference.layout import KINDS, KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.model import PathByPath
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.tree import RankTree
from specverify.setup.subjects import subject_of
from tests.meta.oracle.test_rare_families import far_apart
from tests.tiers import gated

PROMPT = (1, 2, 3, 4, 9, 8, 7, 1, 0, 6, 3, 2)
WIDE: Images = (Image(1, 1, 2, 3, seed=5),)
PAIR: Images = (Image(0, 1, 4, 1, seed=1), Image(5, 1, 1, 2, seed=2))
TREE = RankTree((0, 0, 0, 1, 2, 1), (0, 0, 1, 0, 0, 1))
NORMED = HiddenStates(place="normed", shift=1)
LAYER = HeadLayer(2, 1, 8, 12, sections=(1, 2, 1))


def architecture(hidden_size: int = 16) -> Architecture:
    return Architecture(
        "qwen2_vl", 23, hidden_size, 24, 2, 1, 8, (0, 0), max_positions=256, qkv_bias=True,
        settings=VisionTextSettings(1, 2, 1),
    )  # fmt: skip


def drafts(**fields: Any) -> dict[str, Draft]:
    """A draft of each kind that may see images; the draft model has rows of a width of its own."""
    return {
        "model": LanguageModel(Seeded(architecture(24), 3), TREE, **fields),
        "eagle1": Eagle1(TREE, NORMED, LAYER, seed=1, **fields),
        "eagle3": Eagle3(TREE, HiddenStates((0, 1), shift=1), LAYER, seed=1, **fields),
        "mtp": Mtp(TREE, NORMED, LAYER, 2, zero_first=True, seed=1, **fields),
    }


KINDS_OF_DRAFT = tuple(drafts())


def case_for(draft: Draft, images: Images = WIDE, layout: KvLayout | None = None) -> Case:
    model = Seeded(architecture(), 1, images=images)
    return Case(model, PROMPT, draft, layout or KvLayout(), stops=Stops(6), dtype="float64")


def first_scores(case: Case) -> np.ndarray:
    drafted = Oracle()(case).steps[0].drafted
    assert drafted is not None
    assert drafted.logits is not None
    scores: np.ndarray = drafted.logits[0]
    return scores


@pytest.mark.parametrize("images", [WIDE, PAIR])
@pytest.mark.parametrize("kind", KINDS_OF_DRAFT)
def test_every_draft_is_within_a_billionth(kind: str, images: Images) -> None:
    draft = drafts(sees_images=True)[kind]
    layouts = [KvLayout(), KvLayout(prefill_chunk=3), KvLayout(kind="paged", page_size=4)]
    for layout in layouts:
        case = case_for(draft, images, layout)
        verdict = judge(case, ALL, Oracle(), subject_of(open_cpu()))
        assert verdict.findings == ()
        assert verdict.outcomes["draft.fidelity"] == "checked"
    assert far_apart(case, Oracle(), open_cpu().run) < 1e-9
    assert far_apart(case, Oracle(), Oracle(evaluator=PathByPath)) < 1e-12


@pytest.mark.parametrize("kind", KINDS_OF_DRAFT)
def test_an_image_its_content_and_its_shape_change_what_a_draft_proposes(kind: str) -> None:
    """Else the comparisons above would not see one of them dropped."""
    seen = drafts(sees_images=True)[kind]
    rows = [first_scores(case_for(seen, images)) for images in (WIDE, PAIR, (Image(1, 1, 3, 2, seed=5),))]
    rows.append(first_scores(case_for(seen, (replace(WIDE[0], seed=6),))))
    rows.append(first_scores(case_for(drafts()[kind])))
    assert min(np.abs(a - b).max() for index, a in enumerate(rows) for b in rows[:index]) > 1e-3


def test_embeddings_of_images_are_transformers_own() -> None:
    for images in (WIDE, PAIR):
        case = case_for(drafts(sees_images=True)["model"], images)
        assert far_apart(case, Oracle(), TransformersOracle()) < 1e-9


@pytest.mark.parametrize("layout", gated(list(KINDS), lambda index: index % 3 == 0))
@pytest.mark.parametrize("kind", KINDS_OF_DRAFT)
def test_sessions_keep_drafts_of_requests_with_images_apart(kind: str, layout: str) -> None:
    seen, blind = drafts(sees_images=True)[kind], drafts()[kind]
    case = case_for(seen, WIDE, KvLayout(kind=layout, page_size=2 if KINDS[layout].pages else 0))
    mates = (
        Mate(PROMPT, blind, Sampling(), Stops(5), images=WIDE),
        Mate(PROMPT, seen, Sampling(), Stops(5), images=PAIR),
        Mate((3, 2), seen, Sampling(), Stops(4), images=WIDE),
        Mate(PROMPT, seen, Sampling(), Stops(3)),
        Mate(PROMPT, seen, Sampling(), Stops(4), images=WIDE),
    )
    actions = [Action("add", (0,)), Action("step", (0,)), Action("add", (1,)), Action("step", (0, 1))]
    actions += [Action("fork", (0, 3)), Action("add", (2,)), Action("add", (4,)), Action("step", (3, 0, 2, 1, 4))]
    actions += [Action("evict", (0,)), Action("hand-over", (2,)), Action("step", (2, 1)), Action("restore", (0,))]
    actions += [Action("step", (0, 1, 2, 3, 4))] * 5 + [Action("add", (5,)), Action("step", (5,)), Action("step", (5,))]
    session_case = replace(case, dtype="float32", session=Session(mates, tuple(actions)))
    verdict = judge(session_case, ALL, Oracle(), subject_of(open_cpu()))
    assert verdict.findings == ()


def test_drafts_that_cannot_see_images_are_refused() -> None:
    text = Architecture("llama", 23, 16, 24, 2, 1, 8, (0, 0), max_positions=256)
    with pytest.raises(Malformed, match="llama numbers its tokens on one axis"):
        LanguageModel(Seeded(text, 1), TREE, sees_images=True)
    with pytest.raises(Malformed, match="llama numbers its tokens on one axis"):
        replace(case_for(drafts(sees_images=True)["eagle1"]), model=Seeded(text, 1))
    with pytest.raises(Malformed, match="rows of 8, and an image's embeddings have 16"):
        case_for(Eagle3(TREE, NORMED, LAYER, hidden_size=8, sees_images=True))
    with pytest.raises(Malformed, match="read the tokens of a prompt"):
        PEagle(TREE, NORMED, LAYER, mask_slots=3, mask_token=0, sees_images=True)
    with pytest.raises(Malformed, match="three numbers that share 4 rotary pairs"):
        HeadLayer(2, 1, 8, 12, sections=(1, 2, 2))
    with pytest.raises(Malformed, match="seeds are not negative"):
        Image(0, 1, 1, 1, seed=-1)
