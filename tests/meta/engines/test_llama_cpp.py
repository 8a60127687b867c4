"""The adapter of llama.cpp: its GGUF says what the model is, its drafts are accepted, its errors are findings."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gguf")
llama_cpp = pytest.importorskip("specverify.backends.adapt.engines.llama_cpp", reason="xllamacpp is not installed")

from specverify.backends.adapt import checkpoint_of, exported, save_gguf, transformers_model  # noqa: E402
from specverify.backends.adapt.export.gguf_file import ROPES, token_text  # noqa: E402
from specverify.backends.base import Unsupported  # noqa: E402
from specverify.backends.registry import open_backend  # noqa: E402
from specverify.properties.invariants import ALL  # noqa: E402
from specverify.properties.strategies.models import GALLERY  # noqa: E402
from specverify.properties.verdict.judge import judge  # noqa: E402
from specverify.reference.architecture import Seeded  # noqa: E402
from specverify.reference.case import Case  # noqa: E402
from specverify.reference.draft import LanguageModel  # noqa: E402
from specverify.reference.oracle.decoder import Oracle  # noqa: E402
from specverify.reference.sampling import Sampling, Stops  # noqa: E402
from specverify.reference.tree import RankTree  # noqa: E402
from specverify.setup.subjects import subject_of  # noqa: E402
from tests.models import LLAMA  # noqa: E402

DECLARED = llama_cpp.open_draft().declaration
LOADED = [index for index, arch in enumerate(GALLERY) if DECLARED.not_loaded(arch) is None]
PROMPT = [1, 0, 1, 1, 0, 1]
SETTINGS = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1, "stops": ()}


def folder(index: int) -> str:
    return str(checkpoint_of(Seeded(GALLERY[index], 0), "float32"))


def answer_of(checkpoint: str, kind: str = "", draft: str | None = None, **changed: Any) -> dict[str, Any]:
    request = llama_cpp.request_of(PROMPT, 12, **{**SETTINGS, **changed})
    return dict(llama_cpp.answer(llama_cpp.server(checkpoint, draft, kind), request))


@pytest.mark.parametrize("index", LOADED)
def test_what_is_declared_loads_and_computes_the_same_logits(index: int) -> None:
    request = llama_cpp.request_of(PROMPT, 1, **SETTINGS) | {"n_probs": 1}
    top_token = llama_cpp.answer(llama_cpp.server(folder(index), None, ""), request)["completion_probabilities"][0]
    row = transformers_model(Seeded(GALLERY[index], 0), "float32")(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    assert top_token["logprob"] == pytest.approx(float(row.max()), abs=1e-4)
    assert top_token["id"] == int(row.argmax())


def test_every_rotary_embedding_that_is_declared_is_among_them() -> None:
    assert {GALLERY[index].rope.kind for index in LOADED} == set(ROPES)
    assert {GALLERY[index].family for index in LOADED} >= {"llama", "pangu", "qwen3", "mistral"}


@pytest.mark.parametrize(
    ("index", "line"),
    [
        (3, "a GGUF of qwen2 cannot say that layers have a sliding window"),
        (5, "a GGUF of mistral cannot say that layers have a sliding window"),
        (10, "save_gguf cannot write the rotary embedding dynamic of a llama model"),
        (22, "save_gguf writes llama, mistral, qwen2, qwen3, and this model is llama4_text"),
        (25, "a GGUF of llama cannot say that attention has a soft cap"),
    ],
)
def test_what_a_gguf_cannot_say_is_refused_and_not_declared(index: int, line: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported) as error:
        save_gguf(folder(index), tmp_path / "model.gguf")
    assert str(error.value) == line
    assert DECLARED.not_loaded(GALLERY[index]) is not None
    assert not (tmp_path / "model.gguf").exists()


def test_a_file_is_written_once_and_its_tokens_are_told_apart() -> None:
    assert exported(save_gguf, folder(1)) == exported(save_gguf, folder(1))
    texts = [token_text(token) for token in range(200)]
    assert not [(a, b) for a in texts for b in texts if a != b and a in b]


def test_a_good_draft_is_accepted_and_changes_nothing() -> None:
    plain, drafted = answer_of(folder(7)), answer_of(folder(7), "draft", folder(7))
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["timings"]["draft_n_accepted"] > 0
    assert "draft_n" not in plain["timings"]
    counted = llama_cpp.generate_with_server(
        llama_cpp.server(folder(7), folder(7), "draft"), llama_cpp.request_of(PROMPT, 12, **SETTINGS)
    )
    assert counted.accepted == drafted["timings"]["draft_n_accepted"]


def test_ngrams_are_proposed_and_change_nothing() -> None:
    """The model repeats one token, which n-grams guess."""
    assert answer_of(folder(6), "ngram")["tokens"] == answer_of(folder(6))["tokens"]
    assert answer_of(folder(6), "ngram")["timings"]["draft_n_accepted"] > 0


def test_a_draft_that_draws_its_tokens_is_judged_by_its_law() -> None:
    """Tokens that are drawn from the target's own law are always accepted; its best ones are not."""
    best, drawn = (
        llama_cpp.answer(
            llama_cpp.server(folder(7), folder(7), "draft", probabilistic),
            llama_cpp.request_of(PROMPT, 24, **{**SETTINGS, "temperature": 1.0}),
        )["timings"]
        for probabilistic in (False, True)
    )
    assert best["draft_n_accepted"] < best["draft_n"]
    assert drawn["draft_n_accepted"] / drawn["draft_n"] > best["draft_n_accepted"] / best["draft_n"]


def test_a_token_that_ends_the_text_is_returned() -> None:
    plain = answer_of(folder(7))["tokens"]
    assert len(set(plain)) > 2
    last = plain[2]
    assert answer_of(folder(7), stops=(last,))["tokens"] == plain[: plain.index(last) + 1]


def test_an_error_of_the_server_is_told_with_its_words() -> None:
    with pytest.raises(llama_cpp.ServerRefused, match=r"llama.cpp's server answered 4\d\d: .+"):
        llama_cpp.answer(llama_cpp.server(folder(1), None, ""), {"prompt": [1], "n_predict": "many"})


def test_an_error_in_the_middle_of_a_run_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(opened: Any, request: Any) -> Any:
        raise llama_cpp.ServerRefused("llama.cpp's server answered 500: no slot")

    monkeypatch.setattr(llama_cpp, "answer", refuses)
    case = Case(LLAMA, (3, 1, 4), stops=Stops(6))
    verdict = judge(case, ALL, Oracle(), subject_of(open_backend("llama-cpp")))
    assert verdict.first is not None
    assert verdict.first.invariant == "lossless.completes"
    assert "ServerRefused: llama.cpp's server answered 500: no slot" in str(verdict.first.observed)


@pytest.mark.parametrize("name", ["llama-cpp", "llama-cpp-probabilistic", "llama-cpp-ngram"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.3, top_k=4, top_p=0.9, seed=7)])
def test_a_case_agrees(name: str, sampling: Sampling) -> None:
    chain = LanguageModel(Seeded(GALLERY[1], 1), RankTree((0, 0, 1), (0, 0, 0)))
    backend = open_backend(name)
    draft = chain if backend.declaration.drafts else Case(LLAMA, (3,)).draft
    case = Case(LLAMA, (3, 1, 4), draft, sampling=sampling, stops=Stops(6))
    verdict = judge(case, ALL, Oracle(), subject_of(backend))
    assert (verdict.unsupported, verdict.findings) == (None, ())
    assert verdict.outcomes["lossless.stops"] == "checked"
    assert verdict.outcomes["lossless.greedy-match"] == ("checked" if sampling.greedy else "not_applicable")
