"""Black boxes: what a function's parameters declare, what it is given, and what becomes of what it returns."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from specverify.adapt import blackbox, checkpoint_of, save_checkpoint, transformers_model
from specverify.backends.adapt.blackbox import PARAMETERS
from specverify.backends.adapt.generated import tokens_of
from specverify.backends.registry import UnknownBackend, open_backend
from specverify.cli import main
from specverify.isolation.backend_spec import BackendSpec
from specverify.isolation.isolated import Isolated
from specverify.properties.invariants import ALL
from specverify.properties.strategies.models import GALLERY
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.tree import RankTree
from specverify.setup.subjects import subject_of
from tests.cases import PLAIN
from tests.inprocess import in_this_process
from tests.models import LLAMA

STRANGERS = Path(__file__).resolve().parents[2] / "strangers"
CHAIN = LanguageModel(Seeded(GALLERY[1], 1), RankTree((0, 0, 1), (0, 0, 0)))


def greedy(prompt_ids: list[int], max_new_tokens: int, model: Any) -> list[int]:
    """The target's own greedy text."""
    tokens = list(prompt_ids)
    for _ in range(max_new_tokens):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt_ids) :]


def verdict_of(generate: Callable[..., Any], case: Case = PLAIN) -> Verdict:
    return judge(case, ALL, Oracle(), subject_of(blackbox(generate)()))


def test_the_functions_parameters_are_the_declaration() -> None:
    assert blackbox(greedy)().declaration.max_temperature == 0
    assert blackbox(greedy)().declaration.drafts == ()
    assert blackbox(greedy)().declaration.stops == ("max_new_tokens",)

    def all_of_it(
        prompt_ids: Any, max_new_tokens: Any, draft_model: Any, temperature: Any, top_k: Any, top_p: Any, stops: Any
    ) -> Any:
        raise AssertionError

    declared = blackbox(all_of_it, max_temperature=2.0, families=("llama",))().declaration
    assert declared.name == "all_of_it"
    assert declared.drafts == ("model",)
    assert declared.processes == ("top_k", "top_p")
    assert declared.stops == ("max_new_tokens", "eos", "stop_tokens")
    assert declared.max_temperature == 2.0
    assert declared.outside(Case(LLAMA, (1,), sampling=Sampling(4.0))) is not None
    assert declared.outside(Case(Seeded(GALLERY[4], 0), (1,))) == "all_of_it declares no model family qwen3"


@pytest.mark.parametrize("seeded", [True, False])
def test_a_seed_that_decides_no_text_is_a_finding_where_it_is_promised_to(seeded: bool) -> None:
    random_numbers = torch.Generator().manual_seed(0)

    def draw(prompt_ids: list[int], max_new_tokens: int, model: Any, temperature: float, seed: int) -> list[int]:
        tokens = list(prompt_ids)
        for _ in range(max_new_tokens):
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            law = (logits / temperature).softmax(-1)
            tokens.append(int(torch.multinomial(law, 1, generator=random_numbers)))
        return tokens[len(prompt_ids) :]

    case = replace(PLAIN, sampling=Sampling(1.0, seed=7))
    verdict = judge(case, ALL, Oracle(), subject_of(blackbox(draw, seeded=seeded)()))
    assert verdict.outcomes["lossless.deterministic"] == ("failed" if seeded else "not_applicable")
    assert verdict.outcomes["lossless.distribution"] == "checked"


def test_a_right_function_agrees_and_a_wrong_token_is_found() -> None:
    assert verdict_of(greedy).agreed
    assert verdict_of(greedy).outcomes["lossless.greedy-match"] == "checked"

    def wrong(prompt_ids: list[int], max_new_tokens: int, model: Any) -> list[int]:
        tokens = greedy(prompt_ids, max_new_tokens, model)
        return [*tokens[:-1], (tokens[-1] + 1) % LLAMA.vocab_size]

    assert verdict_of(wrong).outcomes["lossless.greedy-match"] == "failed"


def test_it_is_given_what_it_names() -> None:
    arguments: dict[str, Any] = {}

    def generate(  # every name that there is
        prompt_ids: Any, max_new_tokens: Any, model: Any, draft_model: Any, checkpoint: Any, draft_checkpoint: Any,
        temperature: Any, top_k: Any, top_p: Any, min_p: Any, seed: Any, stops: Any, grammar: Any,
    ) -> list[int]:  # fmt: skip
        arguments.update(locals())
        return [1] * max_new_tokens

    settings = Sampling(0.5, top_k=3, top_p=0.5, min_p=0.1, seed=7)
    case = Case(LLAMA, (3, 1, 4), CHAIN, sampling=settings, stops=Stops(6, (2,), (9,), max_length=8))
    trace = blackbox(generate)().run(case)
    assert set(PARAMETERS) - set(arguments) == {"engine"}, "what `open` returned: `generate` has none here"
    plain = {
        name: arguments[name] for name in ("prompt_ids", "max_new_tokens", "temperature", "top_k", "top_p", "min_p")
    }
    assert list(plain.values()) == [[3, 1, 4], 5, 0.5, 3, 0.5, 0.1]
    assert (arguments["seed"], arguments["stops"], arguments["grammar"]) == (7, (2, 9), None)
    assert arguments["model"] is not arguments["draft_model"]
    assert trace.output == (1,) * 5
    assert trace.finish == "length"


def test_a_checkpoint_is_a_directory_that_transformers_opens() -> None:
    folder = checkpoint_of(LLAMA, "float32")
    network, words = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokens = torch.tensor([[3, 1, 4]])
    assert torch.equal(network.eval()(tokens).logits, transformers_model(LLAMA, "float32")(tokens).logits)
    assert words("3 1 4")["input_ids"] == [3, 1, 4]
    assert words.decode([3, 1, 16]) == "3 1 16"
    assert sorted(words.get_vocab().values()) == list(range(LLAMA.vocab_size))
    assert checkpoint_of(LLAMA, "float32") == folder, "it is written once"


def test_writing_a_checkpoint_shows_no_progress_bar(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logging.enable_progress_bar()
    save_checkpoint(LLAMA, "float32", tmp_path)
    assert capfd.readouterr() == ("", "")
    assert logging.is_progress_bar_enabled(), "what the engine chose stays"


def test_no_checkpoint_outlives_the_engine_that_was_given_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's process is killed, so that it removes nothing itself."""
    (tmp_path / "keeps.py").write_text(
        "from pathlib import Path\nfrom specverify.adapt import blackbox\n\n"
        "def generate(prompt_ids, max_new_tokens, checkpoint):\n"
        "    Path('folder').write_text(checkpoint)\n    return [1] * max_new_tokens\n\n"
        "open_ = blackbox(generate)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with Isolated(BackendSpec("keeps:open_")) as apart:
        apart.ask("run", PLAIN)
        folder = Path((tmp_path / "folder").read_text())
        assert (folder / "config.json").exists()
    assert not folder.parent.exists()


def test_the_global_generators_are_seeded_for_a_function_without_a_seed() -> None:
    def generate(prompt_ids: list[int], max_new_tokens: int, temperature: float) -> list[int]:
        return torch.randint(0, 5, (max_new_tokens,)).tolist()

    box = blackbox(generate)()
    case = Case(LLAMA, (1, 2), sampling=Sampling(1.0, seed=5), stops=Stops(8))
    assert box.run(case).output == box.run(case).output
    other_case = Case(LLAMA, (1, 2), sampling=Sampling(1.0, seed=6), stops=Stops(8))
    assert box.run(case).output != box.run(other_case).output


@pytest.mark.parametrize(
    "returned", [[3, 1], (3, 1), np.array([3, 1]), torch.tensor([3, 1]), [np.int64(3), 1], iter([3, 1])]
)
def test_tokens_may_come_in_any_sequence(returned: Any) -> None:
    assert tokens_of(returned) == (3, 1)


@pytest.mark.parametrize(
    ("returned", "line"),
    [
        (None, "generate returned NoneType, expected the generated token ids, such as [3, 1]"),
        ("3 1", "generate returned str, expected the generated token ids"),
        (torch.tensor([[3, 1]]), "generate returned token ids for a batch, expected those of one request: take row 0"),
        ([3, 1.0], "generate returned 1.0 at place 1, expected a token id"),
        ([True], "generate returned True at place 0, expected a token id"),
    ],
)
def test_what_is_no_token_is_a_finding_in_words(returned: Any, line: str) -> None:
    def generate(prompt_ids: list[int], max_new_tokens: int) -> Any:
        return returned

    verdict = verdict_of(generate)
    assert verdict.first is not None
    assert verdict.first.invariant == "lossless.completes"
    assert line in str(verdict.first.observed)


def test_a_function_that_cannot_be_called_is_refused_in_one_line() -> None:
    def no_prompt(max_new_tokens: int) -> Any:
        raise AssertionError

    def wants_more(prompt_ids: Any, max_new_tokens: Any, tokenizer: Any) -> Any:
        raise AssertionError

    with pytest.raises(TypeError, match=r"no_prompt takes no prompt_ids; it needs prompt_ids and max_new_tokens"):
        blackbox(no_prompt)
    with pytest.raises(TypeError, match="wants_more needs tokenizer, which is none of prompt_ids, "):
        blackbox(wants_more)


def test_a_module_with_such_a_function_is_refused_with_that_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no_prompt_box.py").write_text(
        "from specverify.adapt import blackbox\n\ndef generate(text):\n    return []\n\nopen_ = blackbox(generate)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(UnknownBackend, match="raised TypeError: blackbox: generate takes no prompt_ids"):
        open_backend("no_prompt_box:open_")


BOXES = "black_boxes"
"""The module of `tests/strangers` that `diff` opens."""


def diff(
    monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, seed: int, *words: str
) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of a `diff` of a black box of `tests/strangers`, in this process."""
    in_this_process(monkeypatch)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path, str(STRANGERS)])
    options = ["--backend", f"{BOXES}:{name}", "--seed", str(seed), "--jobs", "1", "--json", "result.json"]
    with pytest.raises(SystemExit) as ended:
        main(["diff", *options, *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code, json.loads((folder / "result.json").read_text())


def test_transformers_assisted_generation_agrees_on_all_that_is_drawn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, result = diff(monkeypatch, tmp_path, "open_assisted", 2, "--cases", "15")
    assert (code, result["judged"], result["declined"]) == (0, 15, {})


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_transformers_assisted_generation_agrees_over_a_default_run(
    seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, result = diff(monkeypatch, tmp_path, "open_assisted", seed)
    assert (code, result["judged"], result["declined"]) == (0, 500, {})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hot", "bonus", "proposal", "residual"])
def test_a_fault_of_sampling_is_red_within_a_default_run_by_tokens_alone(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, result = diff(monkeypatch, tmp_path, name, 3)
    assert code == 1
    assert {finding["invariant"] for finding in result["findings"]} <= {"lossless.distribution"}


FOCUSED = ("--focus", "distribution", "--invariant", "lossless.distribution", "--cases", "60")
"""A run of laws of tokens alone, a part of the default number of cases."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shared_generators", "shared_reseeded"])
def test_a_coin_that_drafts_and_accepts_is_red_under_focus_by_tokens_alone(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, result = diff(monkeypatch, tmp_path, name, 3, *FOCUSED)
    assert (code, result["outcome"]) == (1, "differ")
    assert result["findings"] or "on a coin of the draft" in result["sampling_tests"]["excess"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_same_draft_and_verifier_on_coins_of_their_own_stay_green_under_focus(
    seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert diff(monkeypatch, tmp_path, "unshared", seed, *FOCUSED)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_right_sampling_stays_green(seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert diff(monkeypatch, tmp_path, "right", seed)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted((STRANGERS / "found").glob("*.py")), ids=lambda path: path.stem)
def test_what_was_found_is_there_without_our_tool(script: Path) -> None:
    source = script.read_text()
    assert len(source.splitlines()) <= 40
    assert "specverify" not in source
    package, version = source.split('"""')[1].split(":")[0].split()
    installed = {distribution.name.lower(): distribution.version for distribution in metadata.distributions()}.get(
        package, "no version"
    )
    if installed != version:
        pytest.skip(f"it was found in {package} {version}, and {installed} is installed")
    assert subprocess.run([sys.executable, script], capture_output=True, timeout=120).returncode == 1
