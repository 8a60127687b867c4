"""Taps: a trace that a running engine wrote is judged by its model, and faults that are planted in it are found."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import specverify
from specverify.adapt import checkpoint_of, transformers_model
from specverify.backends.adapt.engines import vllm as adapter
from specverify.checkpoints.opening import open_checkpoint
from specverify.cli import main
from specverify.properties.strategies.models import BROAD
from specverify.reference.architecture import Seeded
from specverify.reference.recorded.lines import read_runs
from specverify.reports.pages.trace import audit_page
from specverify.setup.errors import MissingInput, UnusableInput
from specverify.traces.audit import Audit, audit
from specverify.traces.taps.recorder import LEFT_OUT
from tests.models import LLAMA
from tests.strangers.stand_in_parts import forget_package

ROOT = Path(__file__).resolve().parents[3]
STAND_IN = ROOT / "tests" / "strangers" / "vllm_stand_in"
TARGET = Seeded(BROAD[1], 0)
IS_HERE = find_spec("vllm") is not None


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    forget_package("vllm")
    monkeypatch.syspath_prepend(str(STAND_IN))
    yield
    forget_package("vllm")


def folder_of(model: Seeded) -> str:
    return str(checkpoint_of(model, "float32"))


def open_stand_in(draft: str = "model", noise: float = 0.1) -> Any:
    draft_folder = folder_of(Seeded(BROAD[1], 0, noise=noise))
    speculation = (
        {**adapter.DRAFT_MODEL, "model": draft_folder} if draft == "model" else adapter.NGRAM if draft else None
    )
    return import_module("vllm").LLM(
        folder_of(TARGET), skip_tokenizer_init=True, disable_log_stats=False, speculative_config=speculation
    )


def answer(llm: Any, requests: int = 24, **settings: Any) -> None:
    """Every third request is greedy, the others sample; several run beside each other."""
    kind = import_module("vllm").SamplingParams
    for number in range(requests):
        temperature = (0.0, 0.7, 1.0)[number % 3]
        chosen = {"temperature": temperature, "top_p": 0.8 if temperature else 1.0, "seed": number, "max_tokens": 8}
        prompt = [(7 * number + place) % 17 for place in (0, 3, 5, 3)]
        llm.llm_engine.add_request(
            str(number), {"prompt_token_ids": prompt}, kind(**{**chosen, "logprobs": 0, **settings})
        )
        if number % 4 == 3:
            while llm.llm_engine.has_unfinished_requests():
                llm.llm_engine.step()
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()


def judged(file: Path, **how: Any) -> Audit:
    return audit(str(file), open_checkpoint(folder_of(TARGET)), **how)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("draft", "stages"), [("model", True), ("ngram", True), ("", True), ("model", False)])
def test_what_a_tap_wrote_of_a_right_engine_agrees(draft: str, stages: bool, tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    llm = open_stand_in(draft)
    with specverify.tap("vllm", file, stages=stages) as recorder:
        answer(llm, 12)
    answer(llm, 4)
    assert recorder.runs == 12, "nothing is recorded behind the tap"
    result = judged(file)
    assert result.exit_code == 0, result.findings
    checked = {name for name, counts in result.tally.invariants.items() if counts.checked}
    assert {"lossless.greedy-match", "lossless.stops", "lossless.logprobs", "lossless.distribution"} <= checked
    assert ("acceptance.greedy-walk" in checked) == ("attention.context-exact" in checked) == stages
    assert audit(str(file), None).exit_code == 0


FAULTS = {
    "rejection-kept": "acceptance.greedy-walk",
    "bonus-of-another-row": "acceptance.greedy-walk",
    "settings-unread": "lossless.support",
    "residual-is-target": "lossless.distribution",
    "logprobs-halved": "lossless.logprobs",
}
"""Faults of a sampler, with the invariant that tells each in a single run."""


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_sampler_is_found_in_the_trace(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.jsonl"
    llm = open_stand_in(noise=0.3)
    monkeypatch.setenv("VLLM_STAND_IN_FAULT", fault)
    with specverify.tap("vllm", file, stages=True):
        answer(llm)
    assert FAULTS[fault] in {located.finding.invariant for located in judged(file).findings}


def record(file: Path, requests: int, **settings: Any) -> None:
    llm = open_stand_in(noise=0.3)
    with specverify.tap("vllm", file, stages=True):
        answer(llm, requests, **settings)


@pytest.mark.usefixtures("stand_in")
def test_a_law_that_is_off_by_little_is_told_over_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each drafted token that has a probability is accepted: no run alone shows it."""
    record(tmp_path / "right.jsonl", 30)
    right = judged(tmp_path / "right.jsonl")
    assert right.exit_code == 0
    assert right.tally.excess_evidence is None
    monkeypatch.setenv("VLLM_STAND_IN_FAULT", "coins-of-zero")
    record(tmp_path / "wrong.jsonl", 30)
    wrong = judged(tmp_path / "wrong.jsonl")
    assert wrong.exit_code == 1
    assert not wrong.findings
    assert str(wrong.tally.excess_evidence).endswith("; drafted tokens are accepted too often")


@pytest.mark.usefixtures("stand_in")
def test_coins_that_runs_share_count_once(tmp_path: Path) -> None:
    """Requests on one coin are one piece of evidence, and a run that a file holds sixty times is none against it."""
    file = tmp_path / "run.jsonl"
    record(file, 24, seed=5)
    result = judged(file)
    assert (result.exit_code, result.law.same_seed, len(result.tally.evidence)) == (0, 15, 1)
    page = audit_page(str(file), result.tally, [], result.unasked, result.doubts, same_seed=result.law.same_seed)
    assert "15 runs in the tests of laws" in page
    record(tmp_path / "one.jsonl", 3, seed=None)
    (tmp_path / "repeated.jsonl").write_text((tmp_path / "one.jsonl").read_text() * 60)
    repeated = judged(tmp_path / "repeated.jsonl")
    assert repeated.law.repeats == 118
    assert repeated.tally.excess_evidence is None
    assert repeated.exit_code == 3
    assert "runs that repeat the text of another: name the seed" in repeated.doubts[0]


@pytest.mark.usefixtures("stand_in")
def test_equal_texts_of_requests_with_seeds_of_their_own_are_evidence(tmp_path: Path) -> None:
    record(tmp_path / "one.jsonl", 3, seed=5)
    text = (tmp_path / "one.jsonl").read_text()
    assert text.count('"seed":5') == 2
    texts = (text.replace('"seed":5', f'"seed":{2 * seed}', 1).replace('"seed":5', f'"seed":{2 * seed + 1}')
             for seed in range(10, 70))  # fmt: skip
    (tmp_path / "many.jsonl").write_text("".join(texts))
    many = judged(tmp_path / "many.jsonl")
    assert (many.law.repeats, many.law.same_seed) == (0, 0)
    assert many.exit_code == 1
    assert many.tally.excess_evidence is not None


@pytest.mark.usefixtures("stand_in")
def test_requests_without_words_in_the_format_are_left_out_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    llm = open_stand_in()
    with specverify.tap("vllm", file) as recorder:
        answer(llm, 2, stop=["end"])
        llm.llm_engine.add_request("a", {"prompt_token_ids": [3]}, import_module("vllm").SamplingParams(max_tokens=40))
        llm.llm_engine.step()
    assert recorder.left_out == {"stop strings": 2, "not ended when the recording did": 1}
    assert Path(f"{file}{LEFT_OUT}").read_text().count("stop strings") == 2
    assert file.read_text() == ""


@pytest.mark.usefixtures("stand_in")
def test_a_share_of_the_requests_is_recorded_and_a_share_is_judged_by_the_model(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    llm = open_stand_in()
    with specverify.tap("vllm", file, share=0.5) as recorder:
        answer(llm)
    assert 4 < recorder.runs < 20
    result = judged(file, share=0.5, seed=1)
    assert result.exit_code == 0, result.findings
    assert result.steps / 4 < result.steps_by_model < result.steps * 3 / 4
    compared = result.tally.invariants["lossless.greedy-match"].compared
    assert 0 < compared < judged(file).tally.invariants["lossless.greedy-match"].compared
    assert judged(file, share=0.5, seed=1).tally.invariants["lossless.greedy-match"].compared == compared


@pytest.mark.usefixtures("stand_in")
def test_a_fault_is_found_in_a_share_of_the_steps_on_its_own_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.jsonl"
    monkeypatch.setenv("VLLM_STAND_IN_FAULT", "rejection-kept")
    record(file, 12)
    result = judged(file, share=0.4)
    lines = file.read_text().splitlines()
    walks = [located for located in result.findings if located.finding.invariant == "acceptance.greedy-walk"]
    assert walks
    for located in walks:
        step = json.loads(lines[located.line - 1])["step"]
        rows, tokens = step["scored"]["logits"], step["drafted"]["tree"]["token"]
        accepted = step["accepted"]["path"][1:]
        assert any(rows[node - 1][tokens[node]] < max(rows[node - 1]) for node in accepted), "a kept rejection"


@pytest.mark.usefixtures("stand_in")
def test_a_version_without_a_wrapped_name_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner, "_sample")
    line = "vllm 0.32.0 has no GPUModelRunner._sample, which the tap of 0.32 wraps: install vllm 0.32"
    with pytest.raises(MissingInput) as refusal, specverify.tap("vllm", tmp_path / "run.jsonl"):
        pass
    assert str(refusal.value) == line
    assert "SPECVERIFY_TAP" not in os.environ


def test_wrong_words_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match=r"'sglang' has no tap; those are vllm, transformers, llama\.cpp"):
        specverify.tap("sglang", tmp_path / "run.jsonl").__enter__()
    with pytest.raises(UnusableInput, match="a share of 0 is none"):
        specverify.tap("vllm", tmp_path / "run.jsonl", share=0).__enter__()
    with pytest.raises(UnusableInput, match="cannot be written"):
        specverify.tap("vllm", tmp_path / "no" / "run.jsonl").__enter__()


SCRIPT = """\
import sys
from tests.meta.engines.test_taps import answer, open_stand_in

if __name__ == "__main__":
    assert sys.argv[1:] == ["--stages"]
    answer(open_stand_in(), 6)
    print("answered")
"""


def test_a_script_is_run_with_the_tap_by_vllms_plug_ins(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": f"{STAND_IN}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "specverify", "trace", "tap", "vllm", "--out", "run.jsonl", "--", "script.py"]
    run = subprocess.run(
        [*command, "--stages"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, "answered\nrun.jsonl: 6 runs recorded\n"), run.stderr
    assert '"scored"' not in (tmp_path / "run.jsonl").read_text(), "an option behind -- is the script's"
    assert judged(tmp_path / "run.jsonl").exit_code == 0


def generate(**how: Any) -> None:
    """Texts of assisted generation, of the models of the tests."""
    model = transformers_model(LLAMA, "float32")
    draft = transformers_model(Seeded(LLAMA.architecture, LLAMA.seed, noise=0.1), "float32", "draft")
    for number in range(6):
        torch.manual_seed(number)
        prompt = torch.tensor([[3, 1, 4, 1, 5 + number]])
        sampled = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 0.9} if number % 2 else {}
        assistant = {"prompt_lookup_num_tokens": 3} if number % 3 == 2 else {"assistant_model": draft}
        settings = {"do_sample": False, **sampled, **assistant, "pad_token_id": 0, "eos_token_id": [2]}
        with torch.no_grad():
            model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=9, **{**settings, **how})


def sample_with_draft(requests: int) -> None:
    """Sampled texts of assisted generation with a draft model that is often rejected."""
    model = transformers_model(LLAMA, "float32")
    draft = transformers_model(Seeded(LLAMA.architecture, LLAMA.seed, noise=0.3), "float32", "draft")
    for number in range(requests):
        torch.manual_seed(1000 + number)
        prompt = torch.tensor([[3, 1, 4, 1, 5 + number % 11]])
        with torch.no_grad():
            model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=9, do_sample=True, temperature=0.8,
                top_k=0, assistant_model=draft, pad_token_id=0, eos_token_id=[2],
            )  # fmt: skip


def test_right_assisted_sampling_agrees_over_many_runs(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    with specverify.tap("transformers", file, stages=True):
        sample_with_draft(40)
    result = audit(str(file), open_checkpoint(str(checkpoint_of(LLAMA, "float32"))))
    assert result.exit_code == 0, (result.findings, result.doubts, result.tally.excess_evidence)


@pytest.mark.parametrize("stages", [True, False])
def test_assisted_generation_is_recorded_and_agrees(stages: bool, tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    with specverify.tap("transformers", file, stages=stages) as recorder:
        generate()
        generate(no_repeat_ngram_size=2)
    assert (recorder.runs, recorder.left_out) == (6, {"NoRepeatNGramLogitsProcessor": 6})
    result = audit(str(file), open_checkpoint(str(checkpoint_of(LLAMA, "float32"))))
    assert result.exit_code == 0, result.findings
    checked = {name for name, counts in result.tally.invariants.items() if counts.checked}
    assert {"lossless.greedy-match", "lossless.distribution", "trace.continues"} <= checked
    assert ("acceptance.greedy-walk" in checked) == stages


def rejection_kept(choose: Callable[..., Any]) -> Callable[..., Any]:
    """The rejected token stands in the text in place of the one behind the rejection."""

    def chosen(candidates: Any, scores: Any, length: int, logits: Any, **how: Any) -> Any:
        tokens, matches = choose(candidates, scores, length, logits, **how)
        if matches < length:
            tokens[:, -1] = candidates[:, candidates.shape[1] - length + int(matches)]
        return tokens, matches

    return chosen


def residual_is_target(choose: Callable[..., Any]) -> Callable[..., Any]:
    """Behind a rejection a token is drawn from the target's law, the rejected one too."""

    def chosen(candidates: Any, scores: Any, length: int, logits: Any, **how: Any) -> Any:
        tokens, matches = choose(candidates, scores, length, logits, **how)
        if matches < length:
            tokens[:, -1] = logits[0, matches].softmax(-1).multinomial(1)
        return tokens, matches

    return chosen


def other_token(choose: Callable[..., Any]) -> Callable[..., Any]:
    """The last token of a step is the one before it in the vocabulary."""

    def chosen(candidates: Any, scores: Any, length: int, logits: Any, **how: Any) -> Any:
        tokens, matches = choose(candidates, scores, length, logits, **how)
        tokens[:, -1] = (tokens[:, -1] - 1) % logits.shape[-1]
        return tokens, matches

    return chosen


def temperature_doubled(choose: Callable[..., Any]) -> Callable[..., Any]:
    """The target's logits are read as if they were divided by a temperature twice as high."""
    return lambda candidates, scores, length, logits, **how: choose(candidates, scores, length, logits / 2, **how)


def coins_of_zero(choose: Callable[..., Any]) -> Callable[..., Any]:
    """Each coin of an acceptance is zero: each drafted token that has a probability is accepted."""

    def chosen(candidates: Any, scores: Any, length: int, logits: Any, **how: Any) -> Any:
        with pytest.MonkeyPatch.context() as coins:
            coins.setattr(torch, "rand_like", torch.zeros_like)
            return choose(candidates, scores, length, logits, **how)

    return chosen


SAMPLER_FAULTS: dict[str, tuple[Callable[..., Any], str]] = {
    "rejection-kept": (rejection_kept, "lossless.distribution"),
    "residual-is-target": (residual_is_target, "lossless.distribution"),
    "other-token": (other_token, "lossless.distribution"),
    "temperature-doubled": (temperature_doubled, "lossless.distribution"),
    "coins-of-zero": (coins_of_zero, "lossless.distribution"),
}
"""Faults of transformers' sampler of candidates, with the invariant that tells each of a whole file."""


@pytest.mark.parametrize("fault", SAMPLER_FAULTS)
def test_a_fault_of_assisted_sampling_is_found_in_the_trace(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper, invariant = SAMPLER_FAULTS[fault]
    utils = import_module("transformers.generation.utils")
    monkeypatch.setattr(utils, "_speculative_sampling", wrapper(utils._speculative_sampling))
    file = tmp_path / "run.jsonl"
    with specverify.tap("transformers", file, stages=True) as recorder:
        sample_with_draft(40)
    assert recorder.runs == 40
    result = audit(str(file), open_checkpoint(str(checkpoint_of(LLAMA, "float32"))))
    assert result.exit_code == 1
    names = {located.finding.invariant for located in result.findings}
    assert invariant in names or invariant in str(result.tally.excess_evidence)


LLAMA_CPP_FAULTS = {"drafted-kept": "greedy-match", "root-of-another-row": "greedy-match", "temperature-unread": ""}
"""Faults of the stand-in of llama-cpp-python; the last shows in the law of all runs alone."""


@pytest.fixture
def llama_cpp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    forget_package("llama_cpp")
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "strangers" / "llama_cpp_stand_in"))
    yield import_module("llama_cpp")
    forget_package("llama_cpp")


def complete(package: Any, requests: int, has_draft: bool = True) -> None:
    """Every third text is greedy; a reader stops after nine tokens, and closes the generator."""
    llama = package.Llama(
        transformers_model(LLAMA, "float32"), package.LlamaPromptLookupDecoding() if has_draft else None
    )
    for number in range(requests):
        torch.manual_seed(number)
        temperature = (0.0, 1.0, 0.25)[number % 3]
        tokens = llama.generate([3, 1, 4, 3, 1 + number % 9], top_k=0, top_p=1.0, min_p=0.0, temp=temperature)
        for _ in range(9):
            next(tokens)
        tokens.close()


@pytest.mark.parametrize("has_draft", [True, False])
def test_llama_cpp_is_recorded_and_agrees(has_draft: bool, tmp_path: Path, llama_cpp: Any) -> None:
    file = tmp_path / "run.jsonl"
    with specverify.tap("llama.cpp", file) as recorder:
        complete(llama_cpp, 12, has_draft)
        list(zip(range(2), llama_cpp.Llama(transformers_model(LLAMA, "float32")).generate([3, 1]), strict=False))
    assert (recorder.runs, recorder.left_out) == (12, {"top_p or min_p before a temperature": 1})
    assert ('"path":[0,1' in file.read_text()) == has_draft, "drafted tokens are accepted"
    result = audit(str(file), open_checkpoint(str(checkpoint_of(LLAMA, "float32"))))
    assert result.exit_code == 0, result.findings


@pytest.mark.parametrize("fault", LLAMA_CPP_FAULTS)
def test_a_fault_of_llama_cpp_is_found_in_the_trace(
    fault: str, tmp_path: Path, llama_cpp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_CPP_STAND_IN_FAULT", fault)
    file = tmp_path / "run.jsonl"
    with specverify.tap("llama.cpp", file):
        complete(llama_cpp, 45)
    result = audit(str(file), open_checkpoint(str(checkpoint_of(LLAMA, "float32"))))
    names = {located.finding.invariant for located in result.findings}
    if LLAMA_CPP_FAULTS[fault]:
        assert f"lossless.{LLAMA_CPP_FAULTS[fault]}" in names
    else:
        assert "lossless.distribution" in names or result.tally.excess_evidence is not None


def test_the_command_says_that_nothing_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "idle.py").write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["trace", "tap", "transformers", "--out", "run.jsonl", "idle.py"])
    assert (ended.value.code, capfd.readouterr().out) == (3, "run.jsonl: 0 runs recorded\n")


@pytest.mark.slow
@pytest.mark.skipif(not IS_HERE, reason="vllm is not installed")
@pytest.mark.parametrize("open_llm", ["open_ngram", "open_draft_model"])
def test_vllm_with_its_faults_corrected_agrees_in_its_trace(open_llm: str, tmp_path: Path) -> None:
    script = f"""\
import tests.strangers.mended_vllm as mended
from specverify.properties.strategies.models import BROAD
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.tree import RankTree

if __name__ == "__main__":
    backend = mended.{open_llm}()
    target = Seeded(BROAD[1], 0)
    draft = LanguageModel(Seeded(BROAD[1], 0, noise=0.1), RankTree((0, 0, 1, 2), (0, 0, 0, 0)))
    for number in range(30):
        sampling = Sampling((0.0, 1.0)[number % 2], top_p=0.9, seed=number)
        backend.run(Case(target, (3, 1, 3, 1, number % 17), draft, sampling=sampling, stops=Stops(8)))
"""
    (tmp_path / "script.py").write_text(script)
    environment = {**os.environ, **adapter.ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "specverify",
        "trace",
        "tap",
        "vllm",
        "--out",
        "run.jsonl",
        "--stages",
        "script.py",
    ]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    with (tmp_path / "run.jsonl").open() as lines:
        assert len(read_runs(lines)) >= 30
    assert judged(tmp_path / "run.jsonl").exit_code == 0
    assert json.loads((tmp_path / "run.jsonl").read_text().splitlines()[0])["run"]["engine"].startswith("vllm ")
