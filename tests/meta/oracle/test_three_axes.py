"""Positions on three axes: oracle and engine against transformers' text model of Qwen2-VL, and sessions with images."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel

from specverify.backends.compositions import open_cpu
from specverify.backends.engine.model.axes import axes_of
from specverify.backends.transformers_reference import wide
from specverify.campaign.against import TransformersOracle
from specverify.properties.invariants import ALL
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Ngram, Scripted
from specverify.reference.family.settings import Settings
from specverify.reference.family.vision_text import VisionTextSettings
from specverify.reference.images import Image, Images
from specverify.reference.layout import KINDS, KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.formulas.rotary import grid_positions
from specverify.reference.oracle.model import PathByPath
from specverify.reference.oracle.parameters import load
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.tree import RankTree, Tree
from specverify.reference.weights import seeded_weights
from specverify.setup.subjects import subject_of
from tests.meta.oracle.test_rare_families import far_apart
from tests.tiers import gated

PROMPT = (1, 2, 3, 4, 9, 8, 7, 1, 0, 6, 3, 2)
WIDE, TALL, FILM = (Image(1, 1, 2, 3),), (Image(0, 1, 4, 1), Image(5, 1, 1, 2)), (Image(2, 3, 1, 2),)
TREE = RankTree((0, 0, 0, 1, 2, 1), (0, 0, 1, 0, 0, 1))


def architecture(sections: tuple[int, int, int] = (1, 2, 1)) -> Architecture:
    """A small model whose heads are as wide together as its hidden states, as transformers' own class demands."""
    settings = VisionTextSettings(*sections)
    sizes = (23, 16, 24, 2, 1, 8, (0, 0))
    return Architecture("qwen2_vl", *sizes, max_positions=256, qkv_bias=True, settings=settings)


def case_for(images: Images, layout: KvLayout | None = None, sections: tuple[int, int, int] = (1, 2, 1)) -> Case:
    arch = architecture(sections)
    draft = LanguageModel(Seeded(arch, 1, noise=0.05), TREE)
    model = Seeded(arch, 1, images=images)
    return Case(model, PROMPT, draft, layout or KvLayout(), stops=Stops(6), dtype="float64")


def in_transformers(model: Seeded, tokens: tuple[int, ...], places: np.ndarray) -> np.ndarray:
    """The logits of transformers' Qwen2VLTextModel, in float64, at explicit positions [3, T]."""
    arch = model.architecture
    sections = list(VisionTextSettings.of(arch).sections)
    config = Qwen2VLTextConfig(
        vocab_size=arch.vocab_size,
        hidden_size=arch.hidden_size,
        intermediate_size=arch.intermediate_size,
        num_hidden_layers=arch.layers,
        num_attention_heads=arch.heads,
        num_key_value_heads=arch.kv_heads,
        rms_norm_eps=arch.norm_eps,
        max_position_embeddings=arch.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": arch.rope.theta, "mrope_section": sections},
        pad_token_id=None,
    )
    config._attn_implementation = "eager"
    weights = {name: torch.tensor(array, dtype=torch.float64) for name, array in seeded_weights(model).items()}
    with wide():
        network = Qwen2VLTextModel(config).eval()
        body = {name.removeprefix("model."): weight for name, weight in weights.items() if name != "lm_head.weight"}
        network.load_state_dict(body, strict=True)
        ids = torch.tensor([tokens])
        position_ids = torch.tensor(places)[:, None]
        hidden = network(ids, attention_mask=torch.ones_like(ids), position_ids=position_ids, use_cache=False)
        logits: np.ndarray = (hidden.last_hidden_state[0] @ weights["lm_head.weight"].T).numpy()
    return logits


@pytest.mark.parametrize("sections", [(1, 2, 1), (2, 0, 2), (4, 0, 0)])
@pytest.mark.parametrize("images", [WIDE, TALL, FILM])
def test_the_oracle_says_what_transformers_text_model_says(images: Images, sections: tuple[int, int, int]) -> None:
    model = Seeded(architecture(sections), 3, images=images)
    expected_logits = in_transformers(model.bare, PROMPT, grid_positions(images, range(len(PROMPT))))
    for position in range(images[-1].end + 1, len(PROMPT)):
        chain = Tree((0,), PROMPT[position : position + 1])
        logits = PathByPath(load(model, "float64")).nodes(PROMPT[:position], chain).logits[0]
        assert np.abs(logits - expected_logits[position]).max() < 1e-9


def test_positions_written_out() -> None:
    """The example of transformers' `get_rope_index`: a film of 3 frames of 2 * 2, then five tokens of text."""
    film = (Image(0, 3, 2, 2),)
    time, height, width = grid_positions(film, range(17)).tolist()
    assert time == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 4, 5, 6, 7]
    assert height == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 3, 4, 5, 6, 7]
    assert width == [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("images", [WIDE, TALL, FILM, (*WIDE, Image(7, 2, 1, 1))])
def test_the_engine_numbers_as_the_oracle_does(images: Images) -> None:
    axes = axes_of(Seeded(architecture(), 1, images=images))
    assert axes is not None
    columns = torch.arange(20)
    assert axes.of_prompt(columns).tolist() == grid_positions(images, range(20)).tolist()
    text_columns = columns[images[-1].end :]
    assert axes.of_text(text_columns).tolist() == grid_positions(images, text_columns.tolist()).tolist()


@pytest.mark.parametrize("kind", gated(list(KINDS), lambda index: index % 3 == 0))
@pytest.mark.parametrize("images", [(), WIDE, TALL])
def test_every_layout_is_within_a_billionth(images: Images, kind: str) -> None:
    for chunk in (0, 3):
        case = case_for(images, KvLayout(kind=kind, page_size=4 if KINDS[kind].pages else 0, prefill_chunk=chunk))
        assert far_apart(case, Oracle(), open_cpu().run) < 1e-9
    assert far_apart(case, Oracle(), Oracle(evaluator=PathByPath)) < 1e-12
    assert far_apart(case, Oracle(), TransformersOracle()) < 1e-9


def test_each_axis_and_the_numbering_of_text_change_the_logits() -> None:
    """Else the comparisons above would not see one of them dropped."""
    logit_rows = []
    for images in ((), WIDE, TALL, FILM):
        scored = Oracle()(case_for(images)).steps[0].scored
        assert scored is not None
        logit_rows.append(scored.logits[0])
    assert min(np.abs(a - b).max() for index, a in enumerate(logit_rows) for b in logit_rows[:index]) > 1e-3


def test_text_alone_is_qwen_2_bit_for_bit() -> None:
    arch = architecture()
    case = replace(case_for(()), dtype="float32", draft=Scripted((Tree((0, 0, 1), (PROMPT[-1], 3, 4)),)))
    plain = replace(case, model=Seeded(replace(arch, family="qwen2", settings=Settings()), 1))
    trace, plain_trace = open_cpu().run(case), open_cpu().run(plain)
    for step, plain_step in zip(trace.steps, plain_trace.steps, strict=True):
        assert step.scored is not None
        assert plain_step.scored is not None
        assert np.array_equal(step.scored.logits, plain_step.scored.logits)


@pytest.mark.parametrize("kind", gated(["branch", "prefix", "paged"], lambda index: index < 2))
def test_sessions_keep_requests_with_images_apart(kind: str) -> None:
    case = case_for(WIDE, KvLayout(kind=kind, page_size=2 if KINDS[kind].pages else 0))
    mates = (
        Mate(PROMPT, Ngram(TREE), Sampling(), Stops(5), images=TALL),
        Mate((5,), Scripted(), Sampling(), Stops(4), images=WIDE),
        Mate(PROMPT, Scripted(), Sampling(), Stops(4)),
        Mate((3, 2), Scripted(), Sampling(), Stops(4), images=(Image(2, 1, 1, 3),)),
        Mate(PROMPT, Scripted(), Sampling(), Stops(3), images=WIDE),
    )
    actions = [Action("add", (0,)), Action("add", (1,)), Action("step", (0, 1)), Action("fork", (0, 2))]
    actions += [Action("add", (3,)), Action("fork", (1, 4)), Action("step", (3, 0, 2, 1, 4))]
    actions += [Action("evict", (0,)), Action("hand-over", (1,)), Action("step", (2, 1)), Action("restore", (0,))]
    actions += [Action("step", (0, 1, 2, 3, 4))] * 5 + [Action("add", (5,)), Action("step", (5,)), Action("step", (5,))]
    session_case = replace(case, dtype="float32", session=Session(mates, tuple(actions)))
    verdict = judge(session_case, ALL, Oracle(), subject_of(open_cpu()))
    assert verdict.findings == ()
    assert verdict.outcomes["attention.context-exact"] == "checked"


def test_images_that_no_prompt_can_have_are_refused() -> None:
    arch = architecture()
    with pytest.raises(Malformed, match="text must follow"):
        case_for((Image(8, 1, 2, 2),))
    with pytest.raises(Malformed, match="begins at token 3"):
        Seeded(arch, 1, images=(Image(0, 1, 2, 2), Image(3, 1, 1, 2)))
    with pytest.raises(Malformed, match="on one axis"):
        Seeded(replace(arch, family="qwen2", settings=Settings()), 1, images=WIDE)
    with pytest.raises(Malformed, match="adapter or images"):
        replace(case_for(()), draft=LanguageModel(Seeded(arch, 1, images=WIDE), TREE))
