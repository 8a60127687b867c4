"""The adapter of transformers' generate: each way to draft is taken, and none changes the text."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.generation import candidate_generator

from specverify.backends.adapt import Generated, transformers_model
from specverify.backends.adapt.engines import hf_generate, hf_generate_heads, hf_generate_universal
from specverify.properties.strategies.models import GALLERY, small_draft
from specverify.reference.architecture import Seeded
from tests.models import LARGE_LLAMA

PROMPT = [1, 0, 1, 1, 0, 1]
WAYS: dict[str, tuple[Callable[..., Any], str]] = {
    "assisted": (hf_generate.generate_assisted, "AssistedCandidateGenerator"),
    "lookup": (hf_generate.lookup, "PromptLookupCandidateGenerator"),
    "early exit": (hf_generate.early_exit, "EarlyExitCandidateGenerator"),
    "universal": (hf_generate_universal.universal, "AssistedCandidateGeneratorDifferentTokenizers"),
    "mtp": (hf_generate_heads.mtp, "MTPCandidateGenerator"),
    "dflash": (hf_generate_heads.dflash, "DFlashTokenCandidateGenerator"),
}


@pytest.fixture
def rounds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """The numbers of candidates that the way's own generator proposes, and of those accepted, while a test runs."""
    kind, candidate_counts, match_counts = (
        getattr(candidate_generator, WAYS[request.param][1]),
        list[int](),
        list[int](),
    )
    original, told_back = kind.get_candidates, kind.update_candidate_strategy

    def watch_candidates(self: Any, input_ids: Any, *arguments: Any, **named: Any) -> Any:
        candidates, logits = original(self, input_ids, *arguments, **named)
        candidate_counts.append(candidates.shape[1] - input_ids.shape[1])
        return candidates, logits

    def note_matches(self: Any, input_ids: Any, scores: Any, matches: Any) -> None:
        match_counts.append(int(matches))
        told_back(self, input_ids, scores, matches)

    monkeypatch.setattr(kind, "get_candidates", watch_candidates)
    monkeypatch.setattr(kind, "update_candidate_strategy", note_matches)
    return candidate_counts, match_counts


def answer_of(way: str, draft: Seeded | None, **sampling: Any) -> Generated:
    generate = WAYS[way][0]
    options = {"draft_model": draft and transformers_model(draft, "float32", "draft")}
    parameters = generate.__code__.co_varnames[: generate.__code__.co_argcount]
    named = {name: value for name, value in options.items() if name in parameters}
    torch.manual_seed(5)
    with torch.no_grad():
        generated: Generated = generate(PROMPT, 12, transformers_model(LARGE_LLAMA, "float32"), **named, **sampling)
    return generated


def text(way: str, draft: Seeded | None, **sampling: Any) -> list[int]:
    return list(answer_of(way, draft, **sampling).tokens.tolist())


@pytest.mark.parametrize(("rounds", "way"), [(way, way) for way in WAYS], indirect=["rounds"])
def test_candidates_are_proposed_by_the_way_that_is_named(way: str, rounds: tuple[list[int], list[int]]) -> None:
    generated = answer_of(way, LARGE_LLAMA)
    assert len(generated.tokens) == 12
    assert generated.proposed == sum(rounds[0]) > 0
    assert generated.accepted == sum(rounds[1])
    assert text(way, LARGE_LLAMA) == generated.tokens.tolist(), "the seed decides"


def test_drafted_tokens_that_are_accepted_are_counted() -> None:
    own_draft, another, none = (answer_of("assisted", draft) for draft in (LARGE_LLAMA, small_draft(101, 0), None))
    assert own_draft.accepted is not None
    assert own_draft.accepted > 0
    assert another.accepted == 0
    assert (none.proposed, none.accepted) == (0, 0)


def test_a_module_that_is_the_targets_only_layer_drafts_what_the_target_says() -> None:
    shallow = next(arch for arch in GALLERY if arch.family == "llama" and arch.windows == (0,))
    target = transformers_model(Seeded(shallow, 0), "float32")
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with torch.no_grad():
        generated = hf_generate_heads.mtp(PROMPT, 12, target)
    assert generated.proposed is not None
    assert generated.accepted is not None
    assert generated.accepted / generated.proposed > 0.2
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("draft", [LARGE_LLAMA, small_draft(101, 0)], ids=["target", "another"])
def test_no_draft_changes_greedy_text(way: str, draft: Seeded) -> None:
    assert text(way, draft) == text("assisted", None)


def test_the_draft_that_is_given_is_left_as_it_was() -> None:
    draft = transformers_model(LARGE_LLAMA, "float32", "draft")
    before = {name: value.clone() for name, value in draft.state_dict().items()}
    text("assisted", LARGE_LLAMA)
    text("assisted", LARGE_LLAMA, temperature=1.0)
    assert draft.config.vocab_size == LARGE_LLAMA.vocab_size
    assert all(torch.equal(value, before[name]) for name, value in draft.state_dict().items())


def test_what_transformers_has_wrong_is_not_declared() -> None:
    llama4 = next(arch for arch in GALLERY if arch.family == "llama4")
    assert hf_generate.open_early_exit().declaration.not_loaded(llama4) == "model family llama4"
    windowed = next(arch for arch in GALLERY if 1 in arch.windows)
    assert hf_generate_heads.open_mtp().declaration.not_loaded(llama4) == "model family llama4"
    for factory in (hf_generate.open_assisted, hf_generate.open_lookup, hf_generate.open_early_exit):
        assert factory().declaration.not_loaded(windowed) == "sliding window of 1 tokens"


@pytest.mark.slow
def test_padding_on_the_left_moves_the_positions_of_llama_4() -> None:
    """Why the example of a batch runs no chunks: transformers 5.23 scales queries by columns, padding counted."""
    model = transformers_model(Seeded(GALLERY[56], 1, "margin"), "float32")
    texts = []
    for pads in (0, 3):
        prompt, mask = torch.tensor([[0] * pads + [10]]), torch.tensor([[0] * pads + [1]])
        out = model.generate(prompt, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
        texts.append(out[0, pads:].tolist())
    assert model.config.model_type == "llama4_text"
    assert texts[0] != texts[1], "mended: the example in examples/black_box may take chunks"
