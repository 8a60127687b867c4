"""The adapter of OpenVINO GenAI: its files are the model, drafts are accepted, ends are returned."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gguf")
openvino_genai = pytest.importorskip(
    "specverify.backends.adapt.engines.openvino_genai", reason="the engine is not installed"
)

from specverify.backends.adapt import checkpoint_of, save_openvino, transformers_model  # noqa: E402
from specverify.backends.base import Unsupported  # noqa: E402
from specverify.properties.strategies.models import GALLERY, WIDE, wide  # noqa: E402
from specverify.reference.architecture import Seeded  # noqa: E402

DECLARED = openvino_genai.open_draft().declaration
LOADED = [arch for arch in wide(DECLARED) if arch in WIDE]
PROMPT = [1, 0, 1, 1, 0, 1, 1, 0, 1]


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


def text(index: int, draft: str | None = None, stops: tuple[int, ...] = ()) -> Any:
    settings = openvino_genai.settings(10, stops, draft is not None)
    return openvino_genai.answer(openvino_genai.pipeline(folder(index), draft), PROMPT, settings)


@pytest.mark.parametrize("arch", LOADED, ids=lambda arch: f"{arch.family}-{arch.vocab_size}")
def test_what_is_declared_is_computed(arch: Any) -> None:
    index = WIDE.index(arch)
    assert list(text(index).tokens[0]) == transformers_tokens(index)


def test_every_family_that_is_declared_is_among_them() -> None:
    assert {arch.family for arch in LOADED} == set(DECLARED.families or ())


@pytest.mark.parametrize(
    ("arch", "line"),
    [
        (WIDE[8], "save_openvino cannot write the biases of a llama model"),
        (GALLERY[3], "save_openvino cannot write layers with a sliding window"),
        (GALLERY[9], "save_openvino cannot write the rotary embedding yarn"),
        (GALLERY[1], "save_openvino writes heads of a multiple of 8, and these have 4"),
        (GALLERY[22], "save_openvino writes llama, qwen2, qwen3, and this model is llama4_text"),
    ],
)
def test_what_the_reader_passes_over_is_refused_and_not_declared(arch: Any, line: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported) as error:
        save_openvino(checkpoint_of(Seeded(arch, 0), "float32"), tmp_path / "folder")
    assert str(error.value) == line
    assert DECLARED.not_loaded(arch) is not None


def test_a_draft_is_accepted_and_changes_nothing() -> None:
    answer = openvino_genai.with_draft(PROMPT, 10, folder(1), folder(1), ())
    assert answer.tokens == transformers_tokens(1)
    assert answer.proposed >= answer.accepted > 0


def test_nothing_is_drafted_without_a_draft() -> None:
    answer = openvino_genai.with_draft(PROMPT, 10, folder(1), None, ())
    assert (answer.tokens, answer.proposed, answer.accepted) == (transformers_tokens(1), 0, 0)


@pytest.mark.parametrize("draft", [None, folder(1)], ids=["plain", "drafted"])
def test_a_token_that_ends_the_text_is_returned(draft: str | None) -> None:
    last = transformers_tokens(1)[4]
    assert list(text(1, draft, (last,)).tokens[0]) == transformers_tokens(1)[: transformers_tokens(1).index(last) + 1]


def test_an_engine_error_is_told_with_its_words() -> None:
    settings = openvino_genai.settings(10, (), False)
    settings.do_sample, settings.top_p = True, 7.0
    with pytest.raises(RuntimeError, match="top_p"):
        openvino_genai.answer(openvino_genai.pipeline(folder(1), None), PROMPT, settings)
