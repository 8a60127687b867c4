"""`--layers a:b`: a part of a checkpoint is judged on the engine's own inputs, and reports tell what is left out."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specverify.checkpoints import tapped_layers
from specverify.checkpoints.cases import prepare
from specverify.checkpoints.tapped_layers import tapped_run
from specverify.plan import Plan
from specverify.properties.invariants import BESIDE_LAYERS
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.oracle.checkpoint import identify
from specverify.reference.oracle.layer_span import load_span
from specverify.reference.trace import Trace
from specverify.setup.errors import MissingInput
from specverify.setup.subjects import open_planted, subject_of
from tests.inprocess import exit_code_of, in_this_process
from tests.meta.oracle.test_reference_memory import saved_llama

NAME = "layers.between-taps"
LAYERS = 5
TAPS = BESIDE_LAYERS[:1]
FAULTS = ("tree-masked-as-chain", "position-advances-by-one")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    saved_llama(folder, LAYERS, 16, 24, 40)
    return str(folder)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def judged(checkpoint: str, engine: Subject, layers: tuple[int, int], **changes: Any) -> list[Verdict]:
    """The verdicts on two prompts, by the span's own invariant."""
    plan = Plan(model=checkpoint, cases=2, new_tokens=8, dtypes=("float32",), layers=layers)
    assert engine.abilities is not None
    run = tapped_run(replace(plan, **changes), engine.abilities, engine.reveals)
    cases = prepare(run.plan, engine, TAPS).cases(run.oracle)
    return [judge(case, invariants, run.oracle, engine) for case, invariants in cases if invariants]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("layers", [(0, 1), (1, 3), (4, 5), (0, 5)])
def test_a_right_engine_agrees_in_every_part(layers: tuple[int, int], dtype: str, checkpoint: str) -> None:
    verdicts = judged(checkpoint, subject_of(open_planted("cpu-eager", None)), layers, dtypes=(dtype,))
    assert [verdict.outcomes[NAME] for verdict in verdicts] == ["checked", "checked"]
    assert min(verdict.compared[NAME] for verdict in verdicts) > 20


@pytest.fixture
def weigh_more(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """The fault that what a layer of the engine's model gives is a hundredth too large."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    forward = LlamaDecoderLayer.forward

    def plant(layer: int) -> None:
        def larger(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = forward(self, *args, **kwargs)
            return output * 1.01 if self.self_attn.layer_idx == layer else output

        monkeypatch.setattr(LlamaDecoderLayer, "forward", larger)

    return plant


@pytest.mark.parametrize("layer", [0, 2, 4])
def test_a_fault_in_a_layer_is_found_by_the_part_that_holds_it_alone(
    layer: int, checkpoint: str, weigh_more: Callable[[int], None]
) -> None:
    weigh_more(layer)
    engine = subject_of(open_planted("cpu-eager", None))
    for layers in ((0, 1), (1, 2), (2, 3), (1, 4), (3, 5)):
        (verdict, *_) = judged(checkpoint, engine, layers)
        assert (verdict.outcomes[NAME] == "failed") == (layers[0] <= layer < layers[1])


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_trees_and_caches_are_found_in_a_part(fault: str, checkpoint: str) -> None:
    found = [
        finding
        for verdict in judged(checkpoint, subject_of(open_planted("cpu-eager", fault)), (1, 3), new_tokens=24)
        for finding in verdict.findings
    ]
    assert {finding.invariant for finding in found} == {NAME}


def test_only_the_layers_of_the_part_are_read(checkpoint: str) -> None:
    model = identify(checkpoint)
    span = load_span(model, "float32", 1, 3)
    assert {name.split(".")[2] for name in span.parameters.state} == {"1", "2"}
    assert all(name.startswith("model.layers.") for name in span.parameters.state)


def test_every_report_says_what_was_left_out(
    checkpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    weigh_more: Callable[[int], None],
) -> None:
    in_this_process(monkeypatch)
    words = ("diff", "--model", checkpoint, "--cases", "2", "--new-tokens", "6", "--layers", "1:3")
    files = ("--json", "run.json", "--html", "run.html", "--junit", "run.xml")
    assert exit_code_of(*words, *files) == 0
    page = " ".join(capfd.readouterr().out.split())
    line = (
        "--layers 1:3 judges layers 1 to 2 of 5 on the engine's own inputs; layer 0, layers 3 to 4, embedding, head and"
    )
    assert "NOT JUDGED: layers" in page
    assert line in page
    content = json.loads(Path("run.json").read_text())
    assert any(line in sentence for sentence in content["excluded"])
    assert content["invariants"][NAME]["checked"] == 2
    assert line in Path("run.html").read_text().replace("&#39;", "'")
    assert "layers 1 to 2 of 5" in Path("run.xml").read_text()
    weigh_more(2)
    assert exit_code_of(*words) == 1
    assert "The layers of --layers make another row" in " ".join(capfd.readouterr().out.split())
    (bundle,) = Path(".specverify").glob("*.json")
    heads = [str(folder) for folder in Path(".specverify/models").iterdir()]
    again = ("replay", str(bundle), "--model", checkpoint, "--draft", *heads)
    assert exit_code_of(*again) == 1
    assert f"{NAME} fails as saved" in capfd.readouterr().out
    weigh_more(LAYERS)  # a layer that there is not
    assert exit_code_of(*again) == 0
    assert f"{NAME} holds" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--layers", "3:9"), "--layers 3:9: layers: 3:9 is no part of the layers 0:5"),
        (("--layers", "1:3", "--backend", "hf-generate"), "--layers 1:3: hf-generate shows no hidden states"),
        (("--layers", "1:3", "--draft", "ngram"), "--layers and --draft contradict each other"),
        (("--layers", "1:3", "--steps", "2"), "--layers and --steps contradict each other"),
        (("--layers", "1:3", "--invariant", "cache.commit-equivalence"), "needs the whole target"),
        (("--layers", "3:3"), "3:3: two numbers from 0 on, the first below the second, such as 4:8"),
        (("--layers", "x"), "x: two numbers from 0 on"),
    ],
)
def test_what_cannot_be_judged_in_part_is_refused_in_one_line(
    words: tuple[str, ...],
    line: str,
    checkpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    in_this_process(monkeypatch)
    assert exit_code_of("diff", "--model", checkpoint, "--cases", "1", "--new-tokens", "4", *words) == 2
    assert line in " ".join(capfd.readouterr().err.split())


def test_layers_of_no_model_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of("diff", "--layers", "1:3") == 2
    assert "--layers needs --model" in capfd.readouterr().err


def test_layers_that_do_not_fit_into_memory_are_refused(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = subject_of(open_planted("cpu-eager", None))
    monkeypatch.setattr(tapped_layers, "free_bytes", lambda: 2**20)
    with pytest.raises(MissingInput, match=r"--layers 1:3 takes .* are free; name fewer layers"):
        judged(checkpoint, engine, (1, 3))


def test_an_engine_that_shows_some_rows_alone_is_unobserved(checkpoint: str) -> None:
    engine = subject_of(open_planted("cpu-eager", None))

    def without_first_rows(case: Case) -> Trace:
        trace = engine(case)
        first, *others = trace.steps
        assert first.drafted is not None
        hidden = replace(first, drafted=replace(first.drafted, given=None))
        return replace(trace, steps=(hidden, *others))

    silent = Subject("silent", without_first_rows, engine.reveals)
    silent.abilities = engine.abilities
    (verdict, *_) = judged(checkpoint, silent, (1, 3))
    assert verdict.outcomes[NAME] == "unobserved"
