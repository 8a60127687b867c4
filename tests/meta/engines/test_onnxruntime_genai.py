"""The adapter of ONNX Runtime GenAI: its graph is the model, drafts and n-grams are accepted, ends are returned."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("onnx")
onnx_genai = pytest.importorskip(
    "specverify.backends.adapt.engines.onnxruntime_genai", reason="the engine is not installed"
)

from specverify.backends.adapt import Generated, checkpoint_of, save_onnx, transformers_model  # noqa: E402
from specverify.backends.base import Unsupported  # noqa: E402
from specverify.properties.strategies.models import GALLERY, WIDE, wide  # noqa: E402
from specverify.reference.architecture import Seeded  # noqa: E402
from specverify.reference.case import Case  # noqa: E402
from specverify.reference.draft import LanguageModel  # noqa: E402
from specverify.reference.sampling import Sampling, Stops  # noqa: E402
from specverify.reference.tree import RankTree  # noqa: E402
from tests.judging import verdict_of  # noqa: E402

DECLARED = onnx_genai.open_draft().declaration
LOADED = wide(DECLARED)
PROMPT = [1, 0, 1, 1, 0, 1, 1, 0, 1]
GREEDY = {"temperature": 0.0, "top_k": 0, "seed": 1}


def folder(index: int) -> str:
    return str(checkpoint_of(Seeded(WIDE[index], 0), "float32"))


def transformers_tokens(index: int) -> list[int]:
    """transformers' greedy text."""
    ids = torch.tensor([PROMPT])
    model = transformers_model(Seeded(WIDE[index], 0), "float32")
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False, pad_token_id=0
    )
    return list(output[0, len(PROMPT) :].tolist())


def text(index: int, speculation: dict[str, int], draft: str | None = None, stops: tuple[int, ...] = ()) -> Generated:
    opened = onnx_genai.model(folder(index), draft, stops)
    answer: Generated = onnx_genai.generate(opened, PROMPT, 10, onnx_genai.search(**GREEDY), speculation, stops)
    return answer


@pytest.mark.parametrize("arch", LOADED, ids=lambda arch: f"{arch.family}-{arch.vocab_size}")
def test_what_is_declared_is_computed(arch: Any) -> None:
    index = WIDE.index(arch)
    assert text(index, {}).tokens == transformers_tokens(index)


def test_every_family_that_is_declared_is_among_them() -> None:
    assert {arch.family for arch in LOADED} == set(DECLARED.families or ())


@pytest.mark.parametrize(
    ("arch", "line"),
    [
        (WIDE[9], "save_onnx cannot write layers with a sliding window"),
        (GALLERY[8], "save_onnx cannot write the rotary embedding linear"),
        (GALLERY[22], "save_onnx writes llama, mistral, qwen2, qwen3, and this model is llama4_text"),
        (GALLERY[25], "save_onnx cannot write a soft cap of attention"),
    ],
)
def test_what_the_builder_passes_over_is_refused_and_not_declared(arch: Any, line: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported) as error:
        save_onnx(checkpoint_of(Seeded(arch, 0), "float32"), tmp_path / "folder")
    assert str(error.value) == line
    assert DECLARED.not_loaded(arch) is not None


def test_a_draft_and_ngrams_are_accepted_and_change_nothing() -> None:
    drafted = text(1, {"max_draft_tokens": onnx_genai.MOST_DRAFTED}, folder(1))
    assert drafted.tokens == transformers_tokens(1)
    assert drafted.proposed == drafted.accepted != 0
    looked_up = {"max_draft_tokens": onnx_genai.MOST_DRAFTED, "ngram_size": onnx_genai.NGRAM_SIZE}
    guessed = text(1, looked_up)
    assert guessed.tokens == transformers_tokens(1)
    assert guessed.accepted


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=7)], ids=["greedy", "sampled"])
def test_counts_are_those_that_target_and_draft_give(sampling: Sampling) -> None:
    target = Seeded(WIDE[1], 0)
    draft = LanguageModel(replace(target, noise=0.2), RankTree((0, 0, 1, 2), (0, 0, 0, 0)))
    verdict = verdict_of(
        onnx_genai.open_draft(),
        Case(target, tuple(PROMPT), draft, sampling=sampling, stops=Stops(12)),
        "acceptance.rate",
    )
    assert verdict.agreed, verdict.first
    assert verdict.outcomes["acceptance.rate"] == "checked"


@pytest.mark.parametrize("draft", [None, folder(1)], ids=["plain", "drafted"])
def test_a_token_that_ends_the_text_is_returned(draft: str | None) -> None:
    last = transformers_tokens(1)[4]
    tokens = text(1, {"max_draft_tokens": onnx_genai.MOST_DRAFTED} if draft else {}, draft, (last,)).tokens
    assert tokens == transformers_tokens(1)[: transformers_tokens(1).index(last) + 1]


def test_an_engine_error_is_told_with_its_words() -> None:
    with pytest.raises(Exception, match="max_length"):
        onnx_genai.generate(onnx_genai.model(folder(1), None, ()), PROMPT, 10**6, {"do_sample": False}, {}, ())


def test_top_p_is_not_declared_since_the_engine_leaves_the_nucleus() -> None:
    assert DECLARED.processes == onnx_genai.open_ngram().declaration.processes == ("top_k",)
