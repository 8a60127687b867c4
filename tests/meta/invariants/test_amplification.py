"""Rows of logits and of attention that amplify roundings are granted what the oracle says of them, and no more."""

from collections.abc import Callable
from dataclasses import replace
from math import nan
from pathlib import Path

import numpy as np
import pytest

from specverify.backends.compositions import open_cpu
from specverify.properties.invariants.draft import scores
from specverify.properties.invariants.draft.hidden_states import HIDDEN
from specverify.properties.invariants.draft.scores import DRAFT_K, draft_sigma, row_excused, scores_of
from specverify.properties.invariants.rows import KvExcuses, compare_kv
from specverify.properties.strategies.draft.head import LAYERS
from specverify.properties.strategies.models import GALLERY
from specverify.properties.tolerance.amplification import (
    CONTROL,
    MAX_AMPLIFICATION,
    ROWS,
    Amplification,
    excuses_row,
    explained_distance,
)
from specverify.properties.tolerance.bounds import UNIT, largest
from specverify.properties.tolerance.closeness import kv_case, noise, rows_beyond
from specverify.properties.verdict.finding import Finding
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Subject
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Draft, Scripted
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.language_model import LanguageModel
from specverify.reference.oracle.amplification import PERTURBED, RowMovements, amplification
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.trace import Array, Attended, Committed, Drafted, Kv, Stage, Step, Trace
from specverify.reference.tree import RankTree, Tree
from specverify.reports import bundle
from specverify.setup.subjects import subject_of
from tests.cases import CORPUS
from tests.corruption import BY_NAME, ORACLE, entry, in_stage, where, wrong

CASE = bundle.load(CORPUS / "clean/row-that-amplifies-roundings.json").case
"""EXAONE 4 in float32: node 3 of step 1 shows 9.8 times as much of the roundings as the rows of plain decode."""

HYBRID = Seeded(next(arch for arch in GALLERY if arch.family == "qwen3_next" and arch.layers == 3), 0)

ATTENDED = Case(
    HYBRID, (34, 36, 32, 18), Scripted((Tree((0, 0, 0, 0), (18, 19, 25, 0)),)), stops=Stops(4), dtype="float32"
)
"""Qwen3-Next, whose keys are normed: head 0 of layer 2 shows at node 3 some 24 times as much as in plain decode."""

FED_BACK = bundle.load(CORPUS / "clean/head-fed-back-for-24-levels.json").case
"""A head's chain of 24 levels in float32, whose errors grow along it to some 200 times the limit of rows in general."""

SUBJECT = subject_of(open_cpu())

NAME = "attention.context-exact"


def test_a_right_run_is_right_at_an_ill_conditioned_row() -> None:
    error = noise(CASE, ORACLE, SUBJECT)
    step, true = SUBJECT(CASE).steps[1], ORACLE(CASE).steps[1]
    assert step.scored is not None
    assert true.scored is not None
    rows = dict(rows_beyond(step.scored.logits, true.scored.logits, error.logits_limit()))
    # The case asks for the rule only on machines whose kernels round as the one that drew it.
    assert all(node == (3,) and measure < 4 for node, measure in rows.items())
    verdict = judge(CASE, (BY_NAME[NAME],), ORACLE, SUBJECT)
    assert verdict.outcomes[NAME] == "checked"
    assert not verdict.findings


def test_only_the_row_that_amplifies_is_excused_and_only_so_far() -> None:
    error = noise(CASE, ORACLE, SUBJECT)
    step = ORACLE(CASE).steps[1]
    assert [error.amplification.excuses(step, node, 1.5) for node in range(5)] == [False, False, False, True, False]
    assert error.amplification.excuses(step, 3, 9)
    assert not error.amplification.excuses(step, 3, 11)
    for measure in (2 * MAX_AMPLIFICATION, nan, np.inf):
        assert not error.amplification.excuses(step, 3, measure)


@pytest.mark.parametrize(("node", "limits", "is_found"), [(3, 5.0, False), (3, 15.0, True), (2, 2.5, True)])
def test_a_larger_error_is_found(node: int, limits: float, is_found: bool) -> None:
    limit = limits * noise(CASE, ORACLE, SUBJECT).logits_limit()
    moved = in_stage(
        "scored", lambda stage: replace(stage, logits=entry(stage.logits, node, stage.logits[node] + limit)), 1
    )
    verdict = judge(CASE, (BY_NAME[NAME],), ORACLE, wrong(where(lambda case: case == CASE, moved)))
    assert [finding.where["node"] for finding in verdict.findings] == ([node] if is_found else [])


def test_a_row_may_lie_as_far_off_as_the_unit_roundoff_moves_it() -> None:
    """Qwen3-Next: rows of plain decode move as far as node 0 of step 7, but were rounded better."""
    case = bundle.load(Path(__file__).resolve().parents[2] / "corpus/clean/row-rounded-beyond-plain-decode.json").case
    error, step = noise(case, ORACLE, SUBJECT), ORACLE(case).steps[7]
    assert not error.amplification.excuses(step, 0, 1.8)
    assert error.excuses(step, 0, 1.8)
    assert not error.excuses(step, 0, 4.0)


@pytest.mark.parametrize("times", [0.5, 7.0, 9.0, nan])
def test_plain_decode_may_lie_as_far_off_as_the_unit_roundoff_moves_it(times: float) -> None:
    """Qwen3-Next, whose one row moves 3.6 times its ceiling: at `times` that movement it is right up to 8."""
    folder = Path(__file__).resolve().parents[2] / "corpus/clean"
    case = bundle.load(folder / "plain-decode-that-amplifies-roundings.json").case
    error = noise(case, ORACLE, SUBJECT)
    amplification = error.amplification
    (moved,) = ORACLE.amplification(amplification.control, amplification.control.prefix, amplification.tree).logits  # type: ignore[union-attr]
    off = replace(error, measured=times * moved * UNIT["float32"])
    assert moved * UNIT["float32"] > 3 * error.ceiling
    assert off.control_at_fault is not (times <= CONTROL["float32"][0])
    # No other dtype's factor is asked, and none at all beyond MOST times the ceiling.
    assert replace(off, dtype="float64").control_at_fault
    assert replace(off, ceiling=off.ceiling / 100).control_at_fault


def test_an_oracle_without_weights_excuses_nothing() -> None:
    error, steps = noise(CASE, ORACLE, SUBJECT), ORACLE(CASE).steps
    # Plain transformers in the oracle's place is a function to the judge.
    peer = replace(error.amplification, oracle=lambda case: ORACLE(case))
    assert error.amplification.excuses(steps[1], 3, 1.5)
    assert not peer.excuses(steps[1], 3, 1.5)


def test_only_the_attended_row_that_amplifies_is_excused_and_only_so_far() -> None:
    error, step = noise(ATTENDED, ORACLE, SUBJECT), ORACLE(ATTENDED).steps[0]
    assert [error.amplification.excuses_attended(step, (2, 0, node), 5.0) for node in range(4)] == [False] * 3 + [True]
    assert not error.amplification.excuses_attended(step, (2, 1, 3), 15.0)
    assert not error.amplification.excuses_attended(step, (2, 0, 3), 30.0)
    for measure in (2 * MAX_AMPLIFICATION, nan, np.inf):
        assert not error.amplification.excuses_attended(step, (2, 0, 3), measure)


@pytest.mark.parametrize(
    ("head", "node", "limits", "is_found"),
    [(0, 3, 5.0, False), (0, 3, 30.0, True), (0, 2, 2.5, True), (1, 3, 15.0, True)],
)
@pytest.mark.parametrize("name", [NAME, "attention.order-equivariant"])
def test_a_larger_error_of_attention_is_found(name: str, head: int, node: int, limits: float, is_found: bool) -> None:
    limit = limits * noise(ATTENDED, ORACLE, SUBJECT).inner_limit("attended", 2) * (1 if name == NAME else 2)

    def move_entry(stage: Attended) -> Attended:
        output = stage.output.copy()
        output[2, head, node] += limit
        return replace(stage, output=output)

    changed = where(lambda case: case.draft == ATTENDED.draft, in_stage("attended", move_entry, 0))
    found_by = judge(ATTENDED, (BY_NAME[name],), ORACLE, wrong(changed)).findings
    assert [(finding.stage.name, finding.where["layer"], finding.where["node"]) for finding in found_by] == (
        [("ATTENDED", 2, node)] if is_found else []
    )


def test_an_oracle_answers_once_for_a_tree() -> None:
    asked_trees = []

    class CountingOracle:
        def __call__(self, case: Case) -> Trace:
            return ORACLE(case)

        def amplification(self, case: Case, context: tuple[int, ...], tree: Tree) -> RowMovements | None:
            asked_trees.append(tree)
            return ORACLE.amplification(case, context, tree)

    amplification = replace(noise(ATTENDED, ORACLE, SUBJECT).amplification, oracle=CountingOracle(), movements={})
    step = ORACLE(ATTENDED).steps[0]
    for node in range(4):
        amplification.excuses(step, node, 2.0)
        amplification.excuses_attended(step, (2, 0, node), 2.0)
    assert len(asked_trees) == 2


CHAIN = bundle.load(Path(__file__).resolve().parents[2] / "corpus/clean/log-probability-of-an-amplifying-row.json").case
"""Qwen3-Next in float32: the row behind token 0 moves many times as far as its bounds allow."""


def judged_by(name: str, change: Callable[[Step], Step], judged: Case = CHAIN, number: int = 0) -> list[str]:
    """The invariants that differ on `judged`, of which `name` alone is asked, after `change` of step `number`."""

    def run(case: Case) -> Trace:
        trace = open_cpu().run(case)
        if case != judged:
            return trace
        steps = trace.steps
        return replace(trace, steps=(*steps[:number], change(steps[number]), *steps[number + 1 :]))

    changed = Subject("changed", run, frozenset(Stage))
    return [finding.invariant for finding in judge(judged, (BY_NAME[name],), ORACLE, changed).findings]


def movement(rows_by: Callable[[Oracle], Array]) -> Array:
    """The rms movement of each row of `rows_by` [rows, width] for a change of weights by the unit roundoff."""
    away = [(rows_by(neighbour) - rows_by(ORACLE)) / PERTURBED for neighbour in ORACLE.neighbours()]
    moved: Array = np.sqrt(np.mean(np.square(away), axis=(0, -1))) * UNIT[CHAIN.dtype]
    return moved


@pytest.mark.parametrize(("times", "is_found"), [(3.0, False), (9.0, True)])
def test_a_key_may_be_off_as_far_as_the_unit_roundoff_moves_it(times: float, is_found: bool) -> None:
    name, emitted = "cache.commit-equivalence", ORACLE(CHAIN).steps[0].emitted
    assert emitted is not None
    tokens = (*CHAIN.prefix, CHAIN.prompt[-1], *emitted.tokens)[:-1]

    def keys_by(oracle: Oracle) -> Array:
        kv = oracle(kv_case(CHAIN, tokens)).steps[0].committed
        assert kv is not None
        assert kv.before is not None
        return kv.before.keys[:, 0, -1]

    moved = movement(keys_by)
    layer = int(moved.argmax())

    def off(step: Step) -> Step:
        assert step.committed is not None
        assert step.committed.after is not None
        keys = step.committed.after.keys.copy()
        keys[layer, 0, -1] += times * moved[layer]
        return replace(step, committed=replace(step.committed, after=replace(step.committed.after, keys=keys)))

    assert judged_by(name, off) == ([name] if is_found else [])


@pytest.mark.parametrize(("error", "is_found"), [(0.0, False), (0.1, True)])
def test_a_log_probability_may_be_off_as_its_row_of_logits(error: float, is_found: bool) -> None:
    name = "lossless.logprobs"

    def off(step: Step) -> Step:
        assert step.emitted is not None
        assert step.emitted.logprobs is not None
        return replace(
            step, emitted=replace(step.emitted, logprobs=tuple(logprob + error for logprob in step.emitted.logprobs))
        )

    assert judged_by(name, off) == ([name] if is_found else [])
    assert not judge(CHAIN, (BY_NAME["lossless.logprobs-draft-independent"],), ORACLE, SUBJECT).findings


TWO = RankTree((0, 0), (0, 0))

SCRIPTED_CASE = replace(CHAIN, prompt=(4, 0, 0), draft=Scripted())
"""CHAIN's model behind a row that moves many times as far as its bounds allow, and on one that still does."""


@pytest.mark.parametrize(("times", "is_found"), [(3.0, False), (9.0, True)])
def test_the_scores_of_a_draft_may_be_off_as_far_as_the_unit_roundoff_moves_them(times: float, is_found: bool) -> None:
    name, case = "draft.fidelity", replace(SCRIPTED_CASE, draft=LanguageModel(CHAIN.model, TWO))

    def scores_by(oracle: Oracle) -> Array:
        drafted = ORACLE(case).steps[0].drafted
        assert drafted is not None
        scores = scores_of(case, oracle, case.prefix, drafted.tree)
        assert scores is not None
        return scores

    moved, limit = movement(scores_by)[0], DRAFT_K * draft_sigma(case, scores_by(ORACLE))
    assert limit < 3 * moved < 9 * moved < MAX_AMPLIFICATION * limit

    def off(step: Step) -> Step:
        assert step.drafted is not None
        assert step.drafted.logits is not None
        wrong_by = entry(step.drafted.logits, 0, step.drafted.logits[0] + times * moved)
        return replace(step, drafted=replace(step.drafted, logits=wrong_by))

    assert judged_by(name, off, case) == ([name] if is_found else [])


class FedBack:
    """An oracle whose scores at each node of a chain move so many times as far as those of the node above it."""

    def __init__(self, times: float, moved: float = 0.0) -> None:
        self._times, self._moved = times, moved

    def __call__(self, case: Case) -> Trace:
        raise NotImplementedError

    def scores(self) -> Array:
        rows: Array = np.ones((4, 8)) + self._moved * self._times ** np.arange(4)[:, None]
        return rows

    def neighbours(self, size: float = PERTURBED) -> tuple["FedBack", ...]:
        return (FedBack(self._times, size), FedBack(self._times, -size))


@pytest.mark.parametrize(
    ("draft", "times", "is_excused"),
    [
        (FED_BACK.draft, 0.7 * MAX_AMPLIFICATION, True),
        (FED_BACK.draft, 1.1 * MAX_AMPLIFICATION, False),
        (LanguageModel(FED_BACK.model, TWO), 0.7 * MAX_AMPLIFICATION, False),
    ],
    ids=["fed back", "beyond what its parent explains", "no output fed back"],
)
def test_a_row_of_a_head_may_show_so_many_times_what_its_parent_does(
    monkeypatch: pytest.MonkeyPatch, draft: Draft, times: float, is_excused: bool
) -> None:
    monkeypatch.setattr(scores, "scores_of", lambda case, oracle, context, tree: oracle.scores())
    case, tree, oracle = replace(FED_BACK, draft=draft), Tree((0, 0, 1, 2), (0, 1, 2, 3)), FedBack(times)
    # A row at depth 2 has come through a head three times, through a model of its own once.
    passes = 1 if draft.reads is None else 3
    explained = passes**0.5 * ROWS * UNIT[case.dtype] * times**2
    assert row_excused(case, oracle, (), tree, 2, 0.99 * explained, 2 * MAX_AMPLIFICATION) is is_excused
    assert row_excused(case, oracle, (), tree, 2, 0.99 * explained, MAX_AMPLIFICATION)
    assert not row_excused(case, oracle, (), tree, 0, 0.99 * ROWS * UNIT[case.dtype], 2 * MAX_AMPLIFICATION)
    for distance in (1.01 * explained, np.inf, nan):
        assert not row_excused(case, oracle, (), tree, 2, distance, distance / explained)


@pytest.mark.parametrize(("times", "is_found"), [(0.5, False), (0.9 * 22**0.5, False), (1.1 * 22**0.5, True)])
def test_the_last_row_of_a_chain_may_be_off_as_far_as_conditioning_explains(times: float, is_found: bool) -> None:
    name, number = "draft.fidelity", 2
    step = SUBJECT(FED_BACK).steps[number]
    assert step.drafted is not None

    def scores_by(oracle: Oracle) -> Array:
        assert step.drafted is not None
        rows = scores_of(FED_BACK, oracle, step.context, step.drafted.tree)
        assert rows is not None
        return rows

    true, moved = scores_by(ORACLE), movement(scores_by)
    limit = DRAFT_K * draft_sigma(FED_BACK, true)
    assert MAX_AMPLIFICATION * limit < 0.5 * ROWS * moved[21]

    def off(drafted_step: Step) -> Step:
        assert drafted_step.drafted is not None
        assert drafted_step.drafted.logits is not None
        wrong_by = entry(drafted_step.drafted.logits, 21, true[21] + times * ROWS * moved[21])
        return replace(drafted_step, drafted=replace(drafted_step.drafted, logits=wrong_by))

    assert judged_by(name, off, FED_BACK, number) == ([name] if is_found else [])


@pytest.mark.parametrize(("times", "is_found"), [(3.0, False), (9.0, True)])
@pytest.mark.parametrize(("stage_name", "row"), [("scored", 0), ("given", 1)])
def test_a_hidden_state_may_be_off_as_far_as_the_unit_roundoff_moves_it(
    stage_name: str, row: int, times: float, is_found: bool
) -> None:
    name = "draft.hidden-state-descriptor"
    case = replace(SCRIPTED_CASE, draft=Eagle1(TWO, HiddenStates(place="normed", shift=1), LAYERS[0], seed=1))

    def states_by(oracle: Oracle) -> Array:
        scored, drafted = oracle(case).steps[0].scored, oracle(case).steps[0].drafted
        assert drafted is not None
        assert drafted.given is not None
        assert scored is not None
        assert scored.hidden is not None
        return scored.hidden if stage_name == "scored" else drafted.given.hidden

    moved, true = movement(states_by)[row], states_by(ORACLE)
    assert 3 * moved > HIDDEN[case.dtype] * UNIT[case.dtype] * np.sqrt(np.mean(np.square(true)))

    def moved_by(hidden: Array) -> Array:
        return entry(hidden, row, hidden[row] + times * moved)

    def off(step: Step) -> Step:
        assert step.drafted is not None
        assert step.drafted.given is not None
        assert step.scored is not None
        assert step.scored.hidden is not None
        scored, draft_inputs = step.scored, step.drafted.given
        if stage_name == "scored":
            return replace(step, scored=replace(scored, hidden=moved_by(step.scored.hidden)))
        return replace(
            step, drafted=replace(step.drafted, given=replace(draft_inputs, hidden=moved_by(draft_inputs.hidden)))
        )

    assert judged_by(name, off, case) == ([name] if is_found else [])


def test_rows_are_excused_by_an_oracle_with_neighbours_alone_and_not_in_float64() -> None:
    def ask(run_case: Callable[[Case], Trace]) -> Array | None:
        scored = run_case(CHAIN).steps[0].scored
        return None if scored is None else scored.logits

    exact = replace(CHAIN, dtype="float64")
    assert excuses_row(ORACLE, ask, (0,), 1e-9, CHAIN)
    assert not excuses_row(ORACLE, ask, (0,), 1.0, CHAIN)
    assert not excuses_row(ORACLE, ask, (0,), nan, CHAIN)
    assert not excuses_row(ORACLE, ask, (0,), 1e-12, exact)
    # Plain transformers in the oracle's place is a function to the judge.
    assert not excuses_row(lambda case: ORACLE(case), ask, (0,), 1e-9, CHAIN)
    assert not excuses_row(ORACLE, lambda oracle: None, (0,), 1e-9, CHAIN)


class Bent:
    """An oracle whose row moves by the change of weights, and by `bend` times its square: a large change shows it."""

    def __init__(self, bend: float, moved: float = 0.0) -> None:
        self._bend, self.moved = bend, moved

    def __call__(self, case: Case) -> Trace:
        raise NotImplementedError

    def row(self) -> Array:
        return np.full((1, 8), self.moved + self._bend * self.moved**2)

    def neighbours(self, size: float = PERTURBED) -> tuple["Bent", ...]:
        return (Bent(self._bend, size), Bent(self._bend, size))


PLAIN = Case(Seeded(GALLERY[0], 0), (1, 2))
MIXTRAL = next(arch for arch in GALLERY if arch.family == "mixtral")


@pytest.mark.parametrize(
    ("case", "of_draft", "is_asked_twice"),
    [
        (replace(PLAIN, dtype="bfloat16"), False, True),
        (replace(PLAIN, dtype="float16"), False, True),
        (PLAIN, False, False),
        (Case(Seeded(MIXTRAL, 0), (1, 2), dtype="bfloat16"), False, False),
        (replace(FED_BACK, dtype="bfloat16"), False, True),
        (replace(FED_BACK, dtype="bfloat16"), True, False),
    ],
    ids=["bfloat16", "float16", "float32", "experts", "beside experts of a head", "of experts of a head"],
)
def test_16_bits_ask_for_the_answer_to_a_change_as_large_as_their_roundings(
    case: Case, of_draft: bool, is_asked_twice: bool
) -> None:
    """Where rows choose experts, such a change would make them jump."""
    unit, bend = UNIT[case.dtype], 3.0 / UNIT[case.dtype]
    explained = explained_distance(Bent(bend), lambda oracle: oracle.row(), (0,), case, of_draft)  # type: ignore[attr-defined]
    line = ROWS * unit * (1 + bend * PERTURBED)
    assert explained == pytest.approx(ROWS * unit * 4.0 if is_asked_twice else line)


def test_rows_of_a_target_in_16_bits_move_at_least_as_far_as_by_a_line() -> None:
    case = Case(CHAIN.model, (1, 2, 3), dtype="bfloat16")
    tree = Tree((0, 0), (1, 2))
    moved = ORACLE.amplification(case, (1, 2), tree)
    by_a_line = amplification(ORACLE.evaluator, ORACLE.target_of(case).parameters, (1, 2), tree)
    assert moved is not None
    assert by_a_line is not None
    assert (moved.logits >= by_a_line.logits).all()
    assert (moved.logits > by_a_line.logits).any()
    assert (moved.attended >= by_a_line.attended).all()


class Unequal:
    """An oracle whose outputs of attention move four times as far in channel 1 as in the others."""

    def __init__(self, moved: float = 0.0, seed: int = 0) -> None:
        self._moved, self._seed = moved, seed

    def __call__(self, case: Case) -> Trace:
        random = np.random.default_rng(self._seed)
        steps = np.array([1.0, 4.0, *(1.0,) * 14])
        output = np.ones((1, 1, 5, 16)) + self._moved * steps * random.choice([-1.0, 1.0], (1, 1, 5, 16))
        return Trace((Step(case.prefix, attended=Attended(output)),), (), None)

    def neighbours(self, size: float = PERTURBED) -> tuple["Unequal", ...]:
        return tuple(type(self)(size, seed) for seed in range(4))


@pytest.mark.parametrize(("channel", "is_excused"), [(1, True), (2, False)])
def test_an_entry_may_be_as_far_off_as_its_channel_moves(channel: int, is_excused: bool) -> None:
    tree = Tree((0, 0, 0, 0, 0), (0, 1, 2, 3, 4))
    case = replace(CASE, session=None)
    amplification = Amplification(case, tree, Unequal())
    errors = np.full(16, 1e-7)
    errors[channel] = 1e-7 * 0.9 * 4 * largest(16)
    step = Step((1, 2), Drafted(tree))
    assert amplification.excuses_channel(step, (0, 0, 1), errors, channel) is is_excused
    errors[channel] *= 2
    assert not amplification.excuses_channel(step, (0, 0, 1), errors, channel)


class UnequalColumns(Unequal):
    """An oracle whose values move four times as far in channel 1 as in the others; keys stay where they are."""

    def __call__(self, case: Case) -> Trace:
        moved = super().__call__(case).steps[0].attended
        assert moved is not None
        values = moved.output
        return Trace((Step(case.prefix, committed=Committed(5, Kv(np.ones_like(values), values))),), (), None)


@pytest.mark.parametrize(("channel", "times", "is_excused"), [(1, 0.9, True), (2, 0.9, False), (1, 1.8, False)])
def test_an_entry_of_a_value_may_be_as_far_off_as_its_channel_moves(
    channel: int, times: float, is_excused: bool
) -> None:
    errors = np.full(16, 1e-6)
    errors[channel] = 1e-6 * times * 4 * largest(16)
    excuses = KvExcuses(UnequalColumns(), replace(CASE, session=None), "float32")
    assert excuses.excuses_channel("values", (0, 0, 3), errors, channel) is is_excused
    assert not excuses.excuses_channel("keys", (0, 0, 3), errors, channel)
    assert not replace(excuses, dtype="float64").excuses_channel("values", (0, 0, 3), errors, channel)
    true = Kv(np.ones((1, 1, 5, 16)), np.ones((1, 1, 5, 16)))
    observed = replace(true, values=true.values.copy())
    observed.values[0, 0, 3] += errors
    layer = np.array([1e-6])
    error = replace(noise(CASE, ORACLE, SUBJECT), keys=layer, values=layer)
    findings = [fact for fact in compare_kv("name", 0, true, observed, error, {}, excuses=excuses)
                if isinstance(fact, Finding)]  # fmt: skip
    assert bool(findings) is not is_excused


def test_channels_that_do_not_move_excuse_nothing() -> None:
    step = Step((1, 2), Drafted(Tree((0,), (0,))))
    still = Amplification(CASE, Tree((0,), (0,)), ORACLE)
    assert not still.excuses_channel(step, (0, 0, 0), np.ones(3), 0)
    assert not replace(still, control=replace(CASE, dtype="float64")).excuses_channel(step, (0, 0, 0), np.ones(3), 0)
