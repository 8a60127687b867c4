"""The verdict rules in 16 bits: bounds above clean runs, ties at the rate that the control predicts, and blindness."""

import json
import sys
from collections import defaultdict
from dataclasses import replace
from itertools import chain, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import Tensor

from specverify.backends.compositions import open_cpu
from specverify.backends.engine.attention.sdpa import Sdpa
from specverify.backends.engine.backend import EngineBackend
from specverify.backends.engine.columns import AttentionInputs
from specverify.backends.engine.composition import SEAMS
from specverify.cli import main
from specverify.properties.invariants import rows
from specverify.properties.invariants.draft import proposals as drafts
from specverify.properties.invariants.draft.scores import DRAFT_SIGMA
from specverify.properties.run_statistics import INFLATION, excess_ties, undecided_comparison
from specverify.properties.strategies import cases
from specverify.properties.strategies.models import GALLERY
from specverify.properties.tally import Tally
from specverify.properties.tolerance.bounds import INNER, LOGITS, PAIR, UNIT
from specverify.properties.tolerance.closeness import rms, rows_beyond
from specverify.properties.tolerance.ties import near_and_predicted
from specverify.properties.verdict.finding import Comparisons, Finding, PredictedTies, Tie
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Subject
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.sampling import Stops
from specverify.reference.trace import Array, Drafted, Step, Trace
from specverify.reference.tree import RankTree, Tree
from specverify.setup.subjects import open_planted, subject_of
from tests.corruption import BY_NAME, ORACLE
from tests.inprocess import in_this_process
from tests.models import LARGE_LLAMA
from tests.tiers import gated

NUMERIC = (
    "attention.context-exact",
    "attention.order-equivariant",
    "attention.subtree-removal",
    "attention.prefix-split",
    "cache.commit-equivalence",
)


def test_every_bound_has_room_above_what_clean_runs_showed() -> None:
    for bound in chain(LOGITS.values(), PAIR.values(), INNER.values()):
        assert 1.3 * bound.worst < bound.sigmas
    assert set(LOGITS) == set(PAIR) == set(INNER) == {"float32", "bfloat16", "float16"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(LOGITS))
@pytest.mark.parametrize("name", ["cpu-eager", "cpu-fused"])
def test_clean_runs_stay_where_the_bounds_say(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures the figures of `properties/tolerance/bounds.py` anew: 60 cases, each row in units of its own limit."""
    worst: dict[str, float] = defaultdict(float)
    judged = rows_beyond

    def note_rows(engine_rows: Array, true: Array, limit: float) -> object:
        if engine_rows.shape == true.shape and engine_rows.size and limit > 0:
            caller = sys._getframe(1).f_code.co_name
            worst[caller] = max(
                worst[caller], float(np.sqrt(np.mean((engine_rows - true) ** 2, axis=-1)).max() / limit)
            )
        return judged(engine_rows, true, limit)

    monkeypatch.setattr(rows, "rows_beyond", note_rows)
    subject = subject_of(open_planted(name, None))
    invariants = tuple(BY_NAME[name] for name in NUMERIC)

    @seed(11)
    @settings(max_examples=60, phases=(Phase.generate,), suppress_health_check=list(HealthCheck), deadline=None)
    @given(cases((dtype,)))
    def run(case: Case) -> None:
        if case.session is None:
            assert not judge(case, invariants, ORACLE, subject).findings

    run()
    assert set(worst) == {"attended_beyond", "logits_beyond", "compared", "kv_differs"}
    assert all(0 <= figure < 0.85 for figure in worst.values()), dict(worst)
    assert worst["logits_beyond"] > 0.05, "so far inside its bound, the bound says nothing"


def test_ties_come_at_the_rate_the_noise_predicts_and_more_are_called_out() -> None:
    """20,000 rows of 64 logits, sd 2, with the noise of bfloat16 added: the count of other arg-maxes is predicted."""
    rng = np.random.default_rng(5)
    sigma = 0.02
    true = rng.normal(0, 2, (20_000, 64))
    noisy_logits = true + rng.normal(0, sigma, true.shape)
    flips = int((noisy_logits.argmax(1) != true.argmax(1)).sum())
    near, predicted = near_and_predicted(true, sigma)
    assert predicted / INFLATION < flips < predicted * INFLATION
    tally = Tally("x")
    tally.positions = replace(tally.positions, judged=len(true), near=near, predicted=predicted)
    tally.predicted_ties = {"lossless.greedy-match": predicted}
    tie = Tie("lossless.greedy-match", 0, 1.0)
    tally.ties = [tie] * flips
    assert excess_ties(tally) is None
    assert undecided_comparison(tally) is None
    tally.ties = [tie] * round(2 * predicted)
    assert excess_ties(tally) is not None
    _, louder = near_and_predicted(true, 10 * sigma)
    tally.positions = replace(tally.positions, near=near_and_predicted(true, 10 * sigma)[0], predicted=louder)
    assert "inconclusive" in str(undecided_comparison(tally))


FAMILIES = ("structure", "attention", "acceptance", "cache", "draft", "lossless", "serving")
"""The families of invariants, each of which may be the only one that a run asks."""


@pytest.mark.parametrize(
    ("family", "seed_", "count"), [("draft", 3, 8), *gated(product(FAMILIES, range(6), (150,)), lambda place: False)]
)
def test_a_family_by_itself_is_clean_in_bfloat16(
    family: str, seed_: int, count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its ties are counted by the control of its own population, whatever else the run does not ask."""
    in_this_process(monkeypatch)
    monkeypatch.chdir(tmp_path)
    words = ["--dtype", "bfloat16", "--invariant", f"{family}.*", "--cases", str(count), "--seed", str(seed_)]
    with pytest.raises(SystemExit) as ended:
        main(["diff", "--jobs", "1", "--json", "told.json", *words])
    result = json.loads((tmp_path / "told.json").read_text())
    assert (ended.value.code, result["excess_ties"]) == (0, None), result["errors"]
    predicted = {name for name in result["predicted_ties"] if result["predicted_ties"][name] > 0}
    assert {tie["invariant"] for tie in result["ties"]} <= predicted
    assert (predicted != set()) == (family in ("draft", "lossless"))


def noisily_drafted(step: Step, rng: np.random.Generator) -> Step:
    """The step with the children of the root as scores would rank them that are off by the a-priori noise."""
    assert step.drafted is not None
    assert step.drafted.logits is not None
    row, tree = step.drafted.logits[0], step.drafted.tree
    order = np.argsort(-(row + rng.normal(0, DRAFT_SIGMA * UNIT["bfloat16"] * float(rms(row)) / 2, len(row))))
    token = list(tree.token)
    for rank, node in enumerate(tree.children[0]):
        token[node] = int(order[rank])
    ids = (0, *token[1:])
    return replace(step, drafted=replace(step.drafted, tree=replace(tree, token=tuple(token)), draft_ids=ids))


@pytest.mark.slow
def test_a_draft_whose_scores_are_noisier_than_its_control_has_too_many_ties() -> None:
    """The root of the first step, by which the noise is measured, is exact; later rows are noisy within their bound."""
    rng, tally = np.random.default_rng(1), Tally("noisy")
    clean = subject_of(open_cpu())

    def run(case: Case) -> Trace:
        trace = clean(case)
        return replace(trace, steps=(*trace.steps[:1], *(noisily_drafted(step, rng) for step in trace.steps[1:])))

    subject = Subject("noisy", run, clean.reveals)
    for number in range(60):
        model = Seeded(GALLERY[number % 12], 0)
        prompt = tuple(int(token) for token in rng.integers(0, model.vocab_size, 6))
        draft = LanguageModel(model, RankTree((0, 0, 0, 1, 1), (0, 0, 1, 0, 1)))
        case = Case(model, prompt, draft, stops=Stops(12), dtype="bfloat16")
        tally.add(judge(case, (BY_NAME["draft.fidelity"],), ORACLE, subject))
    assert tally.differed == 0
    assert "ties of draft.fidelity" in str(excess_ties(tally))


@pytest.mark.slow
def test_clean_ties_of_fused_attention_in_bfloat16_are_as_many_as_predicted() -> None:
    """Greedy runs of the built-in models in bfloat16: never beyond the budget, whose false alarm rate is 1e-9."""
    tally = Tally("cpu-fused")
    subject = subject_of(open_planted("cpu-fused", None))
    rng = np.random.default_rng(3)
    for number in range(150):
        model = Seeded(GALLERY[number % len(GALLERY)], number % 2)
        prompt = tuple(int(token) for token in rng.integers(0, model.vocab_size, 12))
        tree = Tree((0, 0, 0, 1), (prompt[-1], *(int(token) for token in rng.integers(0, model.vocab_size, 3))))
        case = Case(model, prompt, Scripted((tree,)), stops=Stops(24), dtype="bfloat16")
        tally.add(judge(case, (BY_NAME["lossless.greedy-match"],), ORACLE, subject))
    assert tally.positions.judged > 2000
    assert tally.positions.predicted > 5
    assert excess_ties(tally) is None
    assert tally.positions.predicted / 4 < len(tally.ties) < 2 * INFLATION * tally.positions.predicted


def widened_sdpa(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
    """SDPA in which row 3 of a tree also sees node 1, which is not on its path."""
    visible = columns.visible
    if visible.shape[-2] == 5 and columns.prefix.any():
        visible = visible.clone()
        visible[:, :, 3, int(columns.prefix[0]) + 1] = True
    mixed: Tensor = Sdpa()(query, replace(columns, visible=visible), scaling)
    return mixed


BLIND = ("attention.context-exact",)
SHARP = ("attention.visibility-exact", "attention.no-leakage")
LONG = replace(GALLERY[7], max_positions=2200)


def judged_at(prefix: int, dtype: str, names: tuple[str, ...]) -> dict[str, str]:
    rng = np.random.default_rng(prefix)
    prompt = tuple(int(token) for token in rng.integers(0, LONG.vocab_size, prefix + 1))
    tree = Tree((0, 0, 0, 2, 3), (prompt[-1], 11, 12, 13, 14))
    case = Case(Seeded(LONG, 0), prompt, Scripted((tree,)), stops=Stops(1), steps=1, dtype=dtype)
    backend = EngineBackend("x", "cpu", replace(SEAMS, attend=widened_sdpa))
    return judge(case, tuple(BY_NAME[name] for name in names), ORACLE, subject_of(backend)).outcomes


def test_a_short_context_shows_one_extra_column_to_every_rule() -> None:
    assert set(judged_at(8, "float32", (*BLIND, *SHARP)).values()) == {"failed"}


@pytest.mark.slow
def test_at_2048_columns_rule_n_is_blind_in_bfloat16_and_bits_are_not() -> None:
    """One weight in 2048 lies inside the rounding of bfloat16; in float32 it does not, and a changed bit is a bit."""
    outcomes = {dtype: judged_at(2048, dtype, (*BLIND, *SHARP)) for dtype in ("float32", "bfloat16")}
    assert [outcomes["float32"][name] for name in BLIND] == ["failed"]
    assert [outcomes["bfloat16"][name] for name in BLIND] == ["checked"]
    for dtype in outcomes:
        assert [outcomes[dtype][name] for name in SHARP] == ["failed", "failed"], dtype


def test_a_tie_in_the_draft_is_no_drift_of_what_comes_after_it() -> None:
    """A node that carries another token, by a tie, rightly scores its children otherwise."""
    case = Case(LARGE_LLAMA, (5,), Scripted(), stops=Stops(1), dtype="bfloat16")
    scores = np.full((3, 101), np.nan)
    scores[:2] = np.random.default_rng(0).normal(0, 1, (2, 101))
    scores[0, 7], scores[0, 8] = 9.0, 9.0 - 2.0**-8
    true = Drafted(Tree((0, 0, 1), (5, 7, 9)), scores, (0, 7, 9))
    tied_scores = scores.copy()
    tied_scores[0, 7], tied_scores[0, 8] = scores[0, 8], scores[0, 7]
    tied_scores[1] = -scores[1]
    by_tie = Drafted(Tree((0, 0, 1), (5, 8, 9)), tied_scores, (0, 8, 9))
    assert [type(fact) for fact in drafts._compare_drafted("draft.fidelity", case, 0, by_tie, true, None)] == [
        Comparisons,
        PredictedTies,
        Tie,
    ]
    *_, drift = drafts._compare_drafted("draft.fidelity", case, 0, replace(by_tie, tree=true.tree), true, None)
    assert isinstance(drift, Finding)
    assert {**drift.where, "token": 0} == {"node": 1, "side": "logits", "token": 0}
