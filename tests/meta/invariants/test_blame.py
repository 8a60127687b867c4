"""An error of code that draft and target share is told of the target, on a case without a model draft."""

from dataclasses import replace

import pytest
from torch import Tensor

from specverify.backends.engine.attention.eager import eager
from specverify.backends.engine.backend import EngineBackend
from specverify.backends.engine.columns import Attend, AttentionInputs
from specverify.backends.engine.composition import SEAMS
from specverify.backends.engine.seams import Seams
from specverify.campaign.search import Search
from specverify.plan import Plan
from specverify.properties.invariants import ALL
from specverify.properties.same_cause import by_cause
from specverify.properties.shrinking.without_draft import CHAIN_NODES, without_draft
from specverify.properties.strategies.models import GALLERY
from specverify.properties.tally import Failure
from specverify.properties.verdict.finding import CONTROL, DRAFT_NUMBERS, FINISHED, TARGET_ALONE, Finding, Verdict
from specverify.properties.verdict.invariant import Invariant
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Ngram, Scripted
from specverify.reference.sampling import Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Stage
from specverify.reference.tree import RankTree
from specverify.reports.pages.terminal import failure_page
from specverify.setup.subjects import open_planted, subject_of
from tests.corruption import BY_NAME, ORACLE

TARGET, DRAFT = Seeded(GALLERY[3], 0), Seeded(replace(GALLERY[1], vocab_size=13), 5)
SHAPE = RankTree((0, 0, 0, 1), (0, 0, 1, 0))
CASE = Case(TARGET, (3, 1, 4, 1, 5, 9), LanguageModel(DRAFT, SHAPE), stops=Stops(6))
LONG = replace(CASE, prompt=tuple(number % 13 for number in range(24)))
SESSION = replace(
    CASE,
    draft=Scripted(),
    session=Session(
        (Mate((2, 7, 1), LanguageModel(DRAFT, SHAPE), stops=Stops(6)),),
        (Action("add", (1,)), Action("step", (0, 1)), Action("step", (1,))),
    ),
)


def scores_halved(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
    return eager(query, columns, scaling / 2)


def root_hidden(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
    """The block's first column is hidden from every row but its own."""
    rows, width = columns.visible.shape[-2:]
    visible = columns.visible.clone()
    visible[..., 1:, width - rows] = False
    return eager(query, replace(columns, visible=visible), scaling)


def long_blocks_halved(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
    """Blocks of more than 16 rows are scaled wrongly: prompts of a draft are, the trees of these cases are not."""
    return eager(query, columns, scaling / (2 if query.shape[2] > 16 else 1))


def seams_sharing(attend: Attend) -> Seams:
    """The engine whose draft and target attend by the same function; prefills of the target are right."""
    return replace(SEAMS, attend=attend, draft_attend=attend, prefill_attend=eager)


BLAME_INVARIANTS = tuple(invariant for invariant in ALL if invariant.name in TARGET_ALONE | DRAFT_NUMBERS)
"""The invariants between which the blame lies."""


def search_failure(seams: Seams, case: Case, invariants: tuple[Invariant, ...] = BLAME_INVARIANTS) -> Failure:
    """What a search that is given `case` alone reports."""
    subject = subject_of(EngineBackend("x", "cpu", seams))
    search = Search(Plan(shrink_s=0.7), invariants, ORACLE, subject, lambda verdict: None, lambda: False)
    search.run_given([(case, invariants)])
    failure = search.failure(search_nearest=False)
    assert failure is not None
    return failure


@pytest.mark.parametrize(
    ("attend", "case"),
    [(scores_halved, CASE), (root_hidden, CASE), (long_blocks_halved, LONG), (scores_halved, SESSION)],
    ids=["scale", "mask", "long-blocks", "session"],
)
def test_attention_that_draft_and_target_share_is_told_of_the_target(attend: Attend, case: Case) -> None:
    failure = search_failure(seams_sharing(attend), case)
    assert failure.finding.stage is Stage.ATTENDED
    assert failure.finding.invariant.startswith("attention.")
    assert isinstance(failure.verdict.case.draft, Scripted)
    assert "began at stage attended" in failure_page(failure)
    assert failure.drawn == case.id


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16",)], ids=["both", "16 bits alone"])
def test_attention_that_shows_late_in_16_bits_is_located_in_float32(dtypes: tuple[str, ...]) -> None:
    """Where float32 is no dtype of the plan, the case stays in its own."""
    case = Case(
        Seeded(next(arch for arch in GALLERY if arch.family == "llama4" and arch.head_dim == 8), 1, "margin"),
        (7, 6, 4, 0, 3, 2, 5, 4, 5, 4, 5, 5, 3, 3, 8, 1, 2, 2),
        Ngram(RankTree((0, 0, 0, 0, 0, 1), (0, 1, 2, 3, 0, 0)), 2),
        stops=Stops(8),
        dtype="bfloat16",
    )
    invariants = tuple(invariant for invariant in ALL if invariant.name == "attention.context-exact")
    subject = subject_of(open_planted("ascend-fused-emulated", "ascend-default-scale"))
    search = Search(Plan(shrink_s=0.7, dtypes=dtypes), invariants, ORACLE, subject, lambda verdict: None, lambda: False)
    drawn: list[Failure] = []
    search.on_failure = drawn.append
    search.run_given([(case, invariants)])
    failure = search.failure(search_nearest=False)
    assert failure is not None
    assert drawn[0].finding.step > 0
    assert failure.verdict.case.dtype == dtypes[0]
    assert (failure.finding.step, failure.finding.stage) == (0, Stage.ATTENDED) or dtypes == ("bfloat16",)


@pytest.mark.parametrize("attend", [scores_halved, root_hidden])
def test_attention_of_the_draft_alone_stays_told_of_the_draft_with_its_numbers(attend: Attend) -> None:
    failure = search_failure(replace(SEAMS, draft_attend=attend), CASE)
    finding = failure.finding
    assert (finding.invariant, finding.stage) == ("draft.fidelity", Stage.DRAFTED)
    assert isinstance(finding.expected, float)
    assert isinstance(finding.observed, float)
    assert finding.expected != finding.observed
    assert 0 <= int(finding.where["token"]) < 13
    page = failure_page(failure)
    assert f"token {finding.where['token']}" in page
    assert "the draft's own" not in page


def test_a_reduced_vocabulary_is_told_by_the_target_id_of_the_worst_score() -> None:
    vocabulary = (1, 4, 6, 9, 11)
    case = replace(CASE, draft=LanguageModel(DRAFT, SHAPE, vocabulary))
    subject = subject_of(EngineBackend("x", "cpu", replace(SEAMS, draft_attend=scores_halved)))
    (finding, *_) = judge(case, (BY_NAME["draft.fidelity"],), ORACLE, subject).findings
    backend_draft, true = subject(case).steps[0].drafted, ORACLE(case).steps[0].drafted
    assert backend_draft is not None
    assert true is not None
    assert backend_draft.logits is not None
    assert true.logits is not None
    worst = int(abs(backend_draft.logits[0] - true.logits[0]).argmax())
    assert finding.where == {"node": 0, "token": vocabulary[worst], "side": "logits"}
    assert (finding.expected, finding.observed) == (float(true.logits[0, worst]), float(backend_draft.logits[0, worst]))


def test_without_an_invariant_about_the_target_the_draft_keeps_the_blame() -> None:
    failure = search_failure(seams_sharing(scores_halved), CASE, (BY_NAME["draft.fidelity"],))
    assert failure.finding.invariant == "draft.fidelity"


DRIFT = Finding("draft.fidelity", Stage.DRAFTED, 0, {"node": 1, "token": 2, "side": "logits"}, 0.5, 0.7, 40.0)
TOKEN = Finding("draft.fidelity", Stage.DRAFTED, 0, {"node": 1, "side": "token"}, 3, 4)
ATTENDED = Finding("attention.context-exact", Stage.ATTENDED, 1, {"layer": 0, "head": 0, "node": 1}, [1.0], [2.0], 9.0)
COMMITTED = Finding("cache.commit-equivalence", Stage.COMMITTED, 0, {"cache": "target"}, [1.0], [2.0], 9.0)
OF_DRAFT = replace(COMMITTED, where={"cache": "draft"})
CONTROLLED = replace(ATTENDED, stage=Stage.SCORED, where={"side": CONTROL})
BROKEN = Finding("attention.no-leakage", Stage.ATTENDED, 1, {}, FINISHED, "IndexError")
EMITTED = Finding("lossless.logprobs", Stage.EMITTED, 0, {}, 1.0, 2.0, 3.0)


def verdict(*findings: Finding) -> Verdict:
    return Verdict(CASE, "x", {}, findings)


@pytest.mark.parametrize(
    ("findings", "first"),
    [
        ((DRIFT, ATTENDED), ATTENDED),
        ((DRIFT, ATTENDED, COMMITTED), COMMITTED),
        ((DRIFT, EMITTED, ATTENDED), ATTENDED),
        ((TOKEN, ATTENDED), TOKEN),
        ((DRIFT, OF_DRAFT), DRIFT),
        ((DRIFT, CONTROLLED), DRIFT),
        ((DRIFT, BROKEN), DRIFT),
        ((DRIFT, EMITTED), DRIFT),
    ],
)
def test_wrong_numbers_of_a_draft_give_way_to_findings_about_the_target_alone(
    findings: tuple[Finding, ...], first: Finding
) -> None:
    assert verdict(*findings).first is first


def test_of_one_cause_the_failure_about_the_target_is_told() -> None:
    drifted, attended = (
        Failure(verdict(*findings), findings[0], CASE.id) for findings in ((DRIFT, ATTENDED), (ATTENDED,))
    )
    (failure,) = by_cause([drifted, attended])
    assert failure.finding is ATTENDED
    assert [also.invariant for also in failure.also] == ["draft.fidelity"]


def test_the_invariants_between_which_the_blame_lies_exist() -> None:
    assert set(BY_NAME) > TARGET_ALONE | DRAFT_NUMBERS
    assert {name for name in BY_NAME if name.startswith("structure.")} < TARGET_ALONE


def test_cases_without_a_draft_hold_what_the_draft_proposed_and_ask_both_models() -> None:
    trace = subject_of(EngineBackend("x", "cpu", SEAMS))(CASE)
    assert len(trace.steps) > 1
    cases = list(without_draft(CASE, trace, 0, 1))
    assert [case.model for case in cases] == [TARGET] * 3 + [DRAFT] * 3
    trees = [step.drafted.tree for step in trace.steps[:2] if step.drafted is not None]
    for single, several, chained in (cases[:3], cases[3:]):
        assert (single.prefix, single.draft) == (trace.steps[1].context, Scripted((trees[1],)))
        assert several.draft == Scripted(tuple(trees))
        assert several.prompt == CASE.prompt
        assert isinstance(chained.draft, Scripted)
        assert chained.prefix + chained.draft.trees[0].token == (*trace.steps[1].context, trees[1].token[0])
        assert len(chained.draft.trees[0]) == min(CHAIN_NODES, len(trace.steps[1].context) + 1)
    assert not list(without_draft(CASE, replace(trace, steps=()), 0, 1))


def test_an_n_gram_draft_has_no_model_of_its_own() -> None:
    case = replace(CASE, prompt=(3, 1, 3, 1, 3), draft=Ngram(SHAPE))
    trace = subject_of(EngineBackend("x", "cpu", SEAMS))(case)
    assert {case.model for case in without_draft(case, trace, 0, 0)} == {TARGET}
