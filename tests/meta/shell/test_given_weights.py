"""`--draft-weights` and `--draft-trees`: a draft of few bits fills the trees of a file on a checkpoint."""

import json
from pathlib import Path

import pytest

from specverify.backends.registry import open_backend
from specverify.checkpoints.cases import prepare
from specverify.plan import Plan
from specverify.properties.invariants import ALL
from specverify.reference.oracle.decoder import Oracle
from specverify.setup.subjects import subject_of
from tests.headfiles import checkpoint, save_head
from tests.inprocess import in_this_process
from tests.meta.shell.test_given_draft import EAGLE3, SHORT, run_command


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    in_this_process(monkeypatch)
    return tmp_path


TABLE = {"up_to": [1, 8], "trees": [{"parent": [0, 0, 0, 1], "rank": [0, 0, 1, 0]}, {"parent": [0, 0], "rank": [0, 0]}]}


@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("draft", ["head", "model:target"])
def test_a_draft_of_few_bits_fills_the_trees_of_a_table(
    draft: str, batch: int, work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint(work / "target", tokens="abcdefghijklmnopqrstuvw?")
    save_head(work / "head", EAGLE3, "safeailab")
    (work / "table.json").write_text(json.dumps(TABLE))
    arguments = ("--draft", draft, "--draft-weights", "int8", "--draft-trees", "table.json", "--new-tokens", "4")
    together = ("--batch", "2", "--cases", "2") if batch else ("--cases", "1")
    judged = ("--invariant", "draft.dispatch", "--invariant", "draft.fidelity", "--invariant", "lossless.greedy-match")
    checks = judged[2:] if not batch else ("--invariant", "lossless.greedy-match")
    code, output = run_command(
        capfd, "diff", "--model", "target", *arguments, *together, *checks, "--dtype", "float64", "--json", "x"
    )
    assert code == 0, output
    assert json.loads((work / "x").read_text())["invariants"]["lossless.greedy-match"]["checked"] >= 1
    plan = Plan(model="target", draft=draft, cases=2, new_tokens=4, dtypes=("float64",), draft_weights="int8",
                draft_trees="table.json", batch=batch)  # fmt: skip
    agenda_cases = list(prepare(plan, subject_of(open_backend("cpu-eager")), ALL).cases(Oracle()))
    for case, _ in agenda_cases:
        assert case.draft.in_bits == "int8"
        assert case.draft.tree_kind == "dispatched"
    # In company too, each invariant has its turn: on the whole texts, or on their first steps.
    assert {invariant.name for _, invariants in agenda_cases for invariant in invariants} == {each.name for each in ALL}


@pytest.mark.parametrize("draft", ["head", "model:target"])
def test_a_draft_that_ends_by_its_confidence_is_judged_on_a_checkpoint(
    draft: str, work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint(work / "target", tokens="abcdefghijklmnopqrstuvw?")
    save_head(work / "head", EAGLE3, "safeailab")
    (work / "stop.json").write_text(json.dumps({"tree": "D3", "stop_below": 0.06, "when": "before"}))
    arguments = ("--draft", draft, "--draft-trees", "stop.json", "--new-tokens", "4", "--cases", "1")
    checks = ("--invariant", "draft.stops", "--invariant", "draft.fidelity", "--invariant", "lossless.greedy-match")
    code, output = run_command(
        capfd, "diff", "--model", "target", *arguments, *checks, "--dtype", "float64", "--json", "x"
    )
    assert code == 0, output
    assert json.loads((work / "x").read_text())["invariants"]["draft.stops"]["checked"] >= 1


WRONG_OPTIONS = {
    "without a draft": (["--draft-weights", "int8"], "--draft-weights needs a --draft with weights"),
    "ngram": (["--draft", "ngram", "--draft-trees", "t"], "--draft-trees needs a --draft with weights"),
    "no file": (["--draft", "head", "--draft-trees", "none"], "none: No such file or directory"),
    "too wide": (
        ["--draft", "head", "--draft-trees", "wide"],
        "--draft-trees wide: shape.trees: rank 7 needs more than",
    ),
    "a sure draft": (["--draft", "head", "--draft-trees", "sure"], "sure: stop_below: 1 is greater than or equal to"),
    "too wide to end": (["--draft", "head", "--draft-trees", "ends"], "--draft-trees ends: shape.tree: rank 7 needs"),
}


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_options_of_a_draft_that_cannot_be_met_are_refused(
    name: str, work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint(work / "target")
    save_head(work / "head", EAGLE3, "safeailab")
    wide_tree = {"parent": [0] * 9, "rank": [0, *range(8)]}
    (work / "wide").write_text(json.dumps({"up_to": [1], "trees": [wide_tree]}))
    (work / "sure").write_text(json.dumps({"tree": "D2", "stop_below": 1}))
    (work / "ends").write_text(json.dumps({"tree": wide_tree, "stop_below": 0.4}))
    arguments, words = WRONG_OPTIONS[name]
    code, output = run_command(capfd, "diff", "--model", "target", *arguments, *SHORT)
    assert code == 2
    assert words in " ".join(output.split())
