"""A swarm switches features off by its round's number alone, and draws are left out that add few pairs."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from specverify.backends.registry import open_backend
from specverify.campaign.case_stream import Stream
from specverify.campaign.novelty import Novelty
from specverify.properties.strategies import cases, models
from specverify.properties.strategies.models import (
    GALLERY,
    LARGEST_SAMPLED,
    can_list_ids,
    drafts,
    swarm_targets,
    unrelated_drafts,
    wide,
    widened,
)
from specverify.properties.strategies.serving.images import image_targets, images
from specverify.properties.strategies.serving.moved import takes_hand_over, with_hand_overs
from specverify.properties.strategies.settings import explore
from specverify.properties.strategies.swarm import (
    ALWAYS,
    EVERYTHING,
    LARGE_TREES,
    LARGE_VOCABULARY,
    LONG_OUTPUTS,
    MANY_REQUESTS,
    SHARES,
    SIZES,
    WIDE_HEADS,
    Swarm,
    draw_swarm,
)
from specverify.properties.target_traits import TRAITS, has_recurrent_state
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, largest_tree_size
from specverify.reference.family.gemma2 import Gemma2Settings
from specverify.reference.family.granite import GraniteSettings
from specverify.reference.family.vision_text import VisionTextSettings
from specverify.reference.images import Images
from specverify.reference.malformed import Malformed
from specverify.reference.parallel import RANKS, sharding_refusal
from specverify.reference.tree import RankTree
from specverify.setup.errors import MissingInput
from specverify.setup.selection import check_drawn
from tests.models import LLAMA
from tests.tiers import first

ROUNDS = 300


def test_every_feature_is_on_in_some_rounds_and_off_in_others() -> None:
    swarms = [draw_swarm(number, None) for number in range(ROUNDS)]
    narrowed = [swarm.within for swarm in swarms if swarm.within is not None]
    assert ROUNDS / 2 < len(narrowed) < ROUNDS
    for name in ("drafts", "layouts", "actions", "rules", "draws", "layout_settings", "ranks", "stops"):
        every = set(getattr(EVERYTHING, name))
        left_out = {value for within in narrowed for value in every - set(getattr(within, name))}
        assert left_out >= every - {*ALWAYS, "max_new_tokens"}, name
    assert {trait for swarm in swarms for trait in swarm.traits} == set(TRAITS)
    assert {trait for swarm in swarms for trait in swarm.draft_traits} == set(TRAITS)
    assert {size for swarm in swarms for size in swarm.sizes} == set(SIZES)
    assert any(not swarm.traits and not swarm.sizes and swarm.within is None for swarm in swarms)


def test_an_engine_with_all_abilities_has_the_swarms_of_any_engine() -> None:
    declaration = open_backend("cpu-eager").declaration
    for number in range(40):
        of_engine, of_any = draw_swarm(number, declaration), draw_swarm(number, None)
        assert (of_engine.traits, of_engine.sizes) == (of_any.traits, of_any.sizes)
        assert of_engine.draft_traits == of_any.draft_traits
        if of_any.within is not None:
            assert of_engine.within is not None
            assert set(of_engine.within.drafts) == set(of_any.within.drafts)
            assert of_engine.within.actions == of_any.within.actions


def test_actions_that_need_each_other_stay_together() -> None:
    for number in range(ROUNDS):
        within = draw_swarm(number, None).within or EVERYTHING
        assert ("launch" in within.actions) == ("resolve" in within.actions)
        assert ("evict" in within.actions) == ("restore" in within.actions)
        assert {*ALWAYS} <= {*within.actions}


def test_a_slow_engine_gets_wide_heads_alone_of_all_sizes() -> None:
    sizes = {size for number in range(ROUNDS) for size in draw_swarm(number, None, slow=True).sizes}
    assert sizes == {WIDE_HEADS}


def test_an_engine_of_wide_heads_alone_gets_no_further_shapes() -> None:
    broad = replace(EVERYTHING, head_multiple=32)
    sizes = {size for number in range(ROUNDS) for size in draw_swarm(number, broad).sizes}
    assert sizes == {LARGE_TREES, MANY_REQUESTS, LONG_OUTPUTS}


def test_an_engine_of_short_texts_gets_no_long_ones() -> None:
    short = replace(EVERYTHING, longest=64)
    sizes = {size for number in range(ROUNDS) for size in draw_swarm(number, short).sizes}
    assert sizes == {WIDE_HEADS, LARGE_VOCABULARY, MANY_REQUESTS}


REACHED: dict[str, Callable[[Any], bool]] = {
    WIDE_HEADS: lambda case: case.model.architecture.head_dim >= 64,
    LARGE_VOCABULARY: lambda case: case.model.vocab_size >= 2_049,
    LARGE_TREES: lambda case: largest_tree_size(case.draft) > 64,
    MANY_REQUESTS: lambda case: case.session is not None and len(case.session.mates) > 4,
    LONG_OUTPUTS: lambda case: case.stops.max_new_tokens == 64,
}


def drawn_with(size: str, count: int) -> list[Case]:
    drawn: list[Case] = []
    explore(3, count, cases(("float32",), swarm=Swarm(sizes=(size,))), lambda case: drawn.append(case))
    return drawn


@pytest.mark.parametrize("size", first(SIZES, 2))
def test_a_size_is_drawn_where_it_is_on(size: str) -> None:
    assert any(REACHED[size](case) for case in drawn_with(size, 40))


def test_nothing_is_listed_for_each_id_of_a_large_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "VOCABULARIES", (32_000, 151_936))
    large = [case for case in drawn_with(LARGE_VOCABULARY, 20) if not can_list_ids(case.model)]  # type: ignore[arg-type]
    assert large
    for case in large:
        assert not case.stops.pieces
        assert case.sampling.grammar is None
        assert len(case.draft.vocabulary or ()) < 100
        assert not case.sampling.temperature or case.model.vocab_size <= LARGEST_SAMPLED


@pytest.mark.parametrize("vocab", [2, 151_936])
@pytest.mark.parametrize("positions", [models.MAX_POSITIONS, models.FAR_POSITIONS])
def test_unrelated_draft_models_have_every_trait_and_fit_their_target(vocab: int, positions: int) -> None:
    target = Seeded(replace(LLAMA.architecture, vocab_size=vocab, max_positions=positions, tied=True), 0)
    unrelated = unrelated_drafts(target)
    for name, has_trait in TRAITS.items():
        assert any(has_trait(draft.architecture) for draft in unrelated), name
    for draft in unrelated:
        Case(target, (1, 0), LanguageModel(draft, RankTree((0, 0), (0, 0))))
        assert draft.architecture.max_positions == positions
        assert draft.architecture.tied or vocab == 2


def test_an_engine_drafts_with_models_that_it_loads_alone() -> None:
    dense = replace(EVERYTHING, families=("llama", "mistral"))
    assert {draft.architecture.family for draft in unrelated_drafts(LLAMA, dense)} == {"llama", "mistral"}
    assert unrelated_drafts(LLAMA, dense, ("recurrent state",)) == unrelated_drafts(LLAMA, dense)


def test_a_round_with_a_trait_of_drafts_has_it_in_most_unrelated_draft_models() -> None:
    def shares(traits: tuple[str, ...]) -> float:
        drawn: list[Seeded] = []
        explore(2, 100, drafts(LLAMA, None, traits), lambda model: drawn.append(model))
        return sum(map(has_recurrent_state, drawn)) / len(drawn)

    assert shares(("recurrent state",)) > 2 * shares(()) > 0


def test_hand_overs_are_drawn_where_a_packet_has_a_recurrent_state() -> None:
    chain = RankTree((0, 0), (0, 0))
    hybrid = next(draft for draft in unrelated_drafts(LLAMA) if has_recurrent_state(draft))
    by_hybrid = Case(LLAMA, (1, 2, 3), LanguageModel(hybrid, chain))
    assert takes_hand_over(by_hybrid, None)
    assert takes_hand_over(Case(replace(hybrid, seed=0), (1, 2, 3)), None)
    assert not takes_hand_over(Case(LLAMA, (1, 2, 3), LanguageModel(LLAMA, chain)), None)
    drawn: list[Case] = []
    explore(3, 20, with_hand_overs(by_hybrid), lambda case: drawn.append(case))
    kinds = [[action.kind for action in case.session.actions] for case in drawn if case.session is not None]
    assert kinds
    assert all("hand-over" in of_case for of_case in kinds)


@pytest.mark.parametrize("multiple", [16, 32, 64, 128])
def test_an_engine_of_wide_heads_has_eight_shapes_of_three_families(multiple: int) -> None:
    within = Abilities(dtypes=("float32",), head_multiple=multiple)
    shapes = {replace(arch, vocab_size=5) for arch in wide(within)}
    assert len(shapes) >= 8
    assert len({arch.family for arch in shapes}) >= 3
    assert all(arch.head_dim % multiple == 0 for arch in shapes)
    assert all(Seeded(arch, 0) for arch in shapes)


def test_wider_heads_keep_the_size_of_their_scores() -> None:
    settings = Gemma2Settings(query_scalar=6.0).with_wider_heads(16.0)
    assert settings.query_scalar == 96.0
    assert GraniteSettings(attention_multiplier=0.25).with_wider_heads(16.0).attention_multiplier == 0.0625
    assert VisionTextSettings(2, 1, 1).with_wider_heads(8.0).sections == (16, 8, 8)
    assert VisionTextSettings(1, 1, 1).with_wider_heads(16 / 6).sections == (2, 3, 3)


@pytest.mark.parametrize("name", TRAITS)
def test_models_of_every_trait_get_wide_heads(name: str) -> None:
    widths = set()
    for arch in GALLERY:
        if TRAITS[name](arch):
            with suppress(Malformed):
                widths.add(Seeded(widened(arch, 32), 0).architecture.head_dim)
    assert widths == {32}


def test_an_engine_that_loads_no_model_is_refused_in_one_line() -> None:
    with pytest.raises(MissingInput, match="--backend mine: no model to draw cases on is of gemma2 and has heads of a"):
        check_drawn("mine", Abilities(dtypes=("float32",), head_multiple=33, families=("gemma2",)))
    check_drawn("mine", Abilities(dtypes=("float32",), head_multiple=64))


def test_a_repeated_case_adds_nothing_and_every_second_is_left_out() -> None:
    novelty, case = Novelty(), Case(LLAMA, (1, 2, 3))
    assert novelty.takes(case)
    assert sum(novelty.takes(case) for _ in range(40)) <= 21


def test_draws_that_are_left_out_do_not_end_a_stream() -> None:
    drawn = list(islice(Stream(4, ("float32",)), 40))
    assert len({case.id for case in drawn}) == 40


def test_a_quantised_target_is_outside_an_engine_without_quantised_weights() -> None:
    case = Case(replace(LLAMA, quantised="int8"), (1, 2, 3))
    assert EVERYTHING.outside(case) is None
    assert replace(EVERYTHING, quantised=False).outside(case) == "target of int8 weights"


@pytest.mark.parametrize(
    ("within", "swarm"),
    [
        (None, Swarm(favours=(SHARES,))),
        (None, Swarm(favours=(SHARES,), traits=("tied",))),
        (replace(EVERYTHING, ranks=(2, 4)), Swarm()),
    ],
)
def test_a_round_of_several_ranks_has_targets_that_can_be_shared_out(within: Abilities | None, swarm: Swarm) -> None:
    targets: list[Seeded] = []
    explore(1, 40, swarm_targets(within, "float64", swarm), lambda target: targets.append(target))
    assert all(any(sharding_refusal(target.architecture, ranks) is None for ranks in RANKS[1:]) for target in targets)
    assert any(sharding_refusal(target.architecture, RANKS[-1]) is None for target in targets)
    assert all(target.architecture.tied for target in targets) == bool(swarm.traits)


def test_a_trait_that_no_shared_target_has_stays() -> None:
    targets: list[Seeded] = []
    swarm = Swarm(favours=(SHARES,), traits=("recurrent state",))
    explore(1, 20, swarm_targets(None, "float64", swarm), lambda target: targets.append(target))
    assert all(target.architecture.recurrent for target in targets)


def test_images_are_drawn_beside_every_family() -> None:
    """Half of all cases are on families that are drawn for their traits."""
    families = {arch.family: arch for arch in models.GALLERY if arch.words.rare}
    assert all(image_targets(Case(Seeded(arch, 0), (1, 2, 3)), None) for arch in families.values())


def test_images_begin_behind_a_chunk_of_text_or_with_the_prompt() -> None:
    drawn: list[Images] = []
    explore(1, 40, images(tuple(range(16))), lambda blocks: drawn.append(blocks))
    starts = [blocks[0].start for blocks in drawn if blocks]
    assert {0, 8} <= set(starts)
    assert all(block.end < 16 for blocks in drawn for block in blocks)


def test_images_of_wide_heads_leave_out_targets_of_too_many_weights() -> None:
    wide_llama = replace(widened(LLAMA.architecture, 128), tied=True)
    small, large = (Case(Seeded(replace(wide_llama, vocab_size=size), 0), (1, 2, 3)) for size in (300, 151_936))
    assert {arch.head_dim for arch in image_targets(small, None)} == {128}
    assert image_targets(large, None) == []
