"""A fourth kind of draft, added here and nowhere else: it reads hidden states of the target, in oracle and engine."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from specverify.backends.base import Unsupported
from specverify.backends.engine.draft import OPENERS, Opening
from specverify.backends.engine.draft.base import Proposal
from specverify.backends.engine.kv.base import KvCache
from specverify.backends.engine.sampling.step import StepSampling
from specverify.backends.registry import open_backend
from specverify.campaign.against import ByTransformers
from specverify.properties.invariants import ALL
from specverify.properties.shrinking.cases import nearer, size
from specverify.properties.strategies.models import GALLERY
from specverify.properties.verdict.judge import judge
from specverify.reference.case import Case
from specverify.reference.case_json import case_from_json, case_to_json
from specverify.reference.draft import KINDS
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.static import Static
from specverify.reference.layout import KINDS as LAYOUTS
from specverify.reference.layout import KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.decoder import Oracle, select_states
from specverify.reference.oracle.draft import PROPOSALS, Question
from specverify.reference.sampling import Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Drafted
from specverify.reference.tree import RankTree, Tree
from specverify.reports.case_diff import differences
from specverify.setup.subjects import subject_of
from tests.models import LLAMA

READS = HiddenStates((0,))


@dataclass(frozen=True)
class Echo(Static):
    """A node's token is the place of the `rank`-th largest number in the last hidden state, plus the node's depth."""

    TAG = "echo"
    WORD = "echo"
    SCHEMA = {  # noqa: RUF012 - as a kind of the product would have it
        "type": "object",
        "additionalProperties": False,
        "required": ["kind", "shape", "reads"],
        "properties": {"kind": {}, "shape": {"$ref": "#/$defs/rankTree"}, "reads": {"type": "object"}},
    }
    model = None
    vocabulary = ()

    shape: RankTree
    reads: HiddenStates | None = READS

    def with_renamed_tokens(self, rename: Callable[[tuple[int, ...]], tuple[int, ...]], relabel: int) -> None:
        return None


def tree_of(shape: RankTree, root: int, order: list[int], vocab: int) -> Tree:
    """The tree that both sides fill once the largest numbers of the hidden state are ordered."""
    named = [(order[shape.rank[node]] + shape.depth[node]) % vocab for node in range(1, len(shape))]
    return Tree(shape.parent, (root, *named))


VOCAB = GALLERY[1].vocab_size


def meaning(draft: Echo, question: Question) -> Drafted:
    assert question.hidden is not None
    assert len(question.hidden) == len(question.tokens) - 1
    last = question.hidden[-1] if len(question.hidden) else np.zeros(8)
    return Drafted(tree_of(draft.shape, question.tokens[-1], np.argsort(-last, kind="stable").tolist(), VOCAB))


class EchoDraft:
    cache: KvCache | None = None
    calls = 0
    reads: HiddenStates | None = READS

    def __init__(self, shape: RankTree) -> None:
        self._shape = shape

    def propose(self, tokens: list[int], chance: StepSampling | None = None, hidden: Tensor | None = None) -> Proposal:
        assert hidden is not None
        assert len(hidden) == len(tokens) - 1
        last = hidden[-1] if len(hidden) else torch.zeros(8)
        order = torch.sort(last, descending=True, stable=True).indices.tolist()
        return Proposal(tree_of(self._shape, tokens[-1], order, VOCAB))

    def settle(self, rows: list[int]) -> None:
        pass

    def resume(self, cache: KvCache | None) -> None:
        pass

    def abandon(self) -> None:
        pass


class LateDraft(EchoDraft):
    """Reads the state of the token before the last: the fault that this wall is there to show."""

    def propose(self, tokens: list[int], chance: StepSampling | None = None, hidden: Tensor | None = None) -> Proposal:
        assert hidden is not None
        return super().propose(tokens, chance, torch.cat([hidden[:1], hidden[:-1]]))


def open_echo(opening: Opening) -> EchoDraft:
    assert isinstance(opening.case.draft, Echo)
    return EchoDraft(opening.case.draft.shape)


@pytest.fixture(autouse=True)
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, Echo.TAG, Echo)
    monkeypatch.setitem(PROPOSALS, Echo.TAG, meaning)
    monkeypatch.setitem(OPENERS, Echo.TAG, open_echo)


KINDS.pop(Echo.TAG)  # the class entered itself; outside of these tests there are three kinds

SHAPE = RankTree((0, 0, 0, 1, 1), (0, 0, 1, 0, 1))
CASE = Case(LLAMA, (3, 1, 4, 1, 5), Echo(SHAPE), stops=Stops(6), dtype="float64")
ORACLE = Oracle()


def findings_of(case: Case) -> list[str]:
    backend = open_backend("cpu-eager")
    backend_declared = replace(backend.declaration, drafts=(*backend.declaration.drafts, Echo.TAG))
    backend.declaration = backend_declared
    verdict = judge(case, ALL, ORACLE, subject_of(backend))
    assert verdict.unsupported is None, verdict.unsupported
    assert verdict.outcomes["draft.fidelity"] in ("checked", "failed")
    return [f"{finding.invariant} {finding.where}" for finding in verdict.findings]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_draft_that_reads_hidden_states_is_judged_in_every_layout(kind: str) -> None:
    page = {"page_size": 2} if kind in ("paged", "prefix") else {}
    assert findings_of(replace(CASE, layout=KvLayout(kind=kind, **page))) == []  # type: ignore[arg-type]


def test_in_a_session_with_forks_and_evictions() -> None:
    actions = (
        Action("add", (0,)), Action("add", (1,)), Action("step", (0, 1)), Action("evict", (1,)),
        Action("restore", (1,)), Action("fork", (0, 2)), Action("step", (0, 1, 2)), Action("step", (0, 1, 2)),
    )  # fmt: skip
    mates = (Mate((3, 1, 4, 2), Echo(SHAPE), stops=Stops(4)), Mate((7,), Echo(SHAPE), stops=Stops(4)))
    layout = KvLayout(kind="prefix", page_size=2)
    assert findings_of(replace(CASE, layout=layout, session=Session(mates, actions))) == []


def test_a_state_of_the_wrong_position_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPENERS, Echo.TAG, lambda opening: LateDraft(SHAPE))
    assert any(line.startswith("draft.fidelity") for line in findings_of(CASE))


def test_the_states_that_the_backend_reveals_are_the_oracles() -> None:
    trace = open_backend("cpu-eager").run(CASE)
    for step, true in zip(trace.steps, ORACLE(CASE).steps, strict=True):
        assert step.scored is not None
        assert true.scored is not None
        assert step.scored.hidden is not None
        assert true.scored.hidden is not None
        np.testing.assert_allclose(step.scored.hidden, true.scored.hidden, atol=1e-12)


@pytest.mark.parametrize("reads", [HiddenStates((-1, 1)), HiddenStates(place="normed"), HiddenStates((1, 0))])
def test_each_place_is_what_transformers_calls_it(reads: HiddenStates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EchoDraft, "reads", reads)
    case = replace(CASE, draft=Echo(SHAPE, reads))
    assert findings_of(case) == []
    plain = select_states(ByTransformers(LLAMA, "float64").states(CASE.prompt), reads)
    np.testing.assert_allclose(
        select_states(ORACLE.model(LLAMA, "float64").states(CASE.prompt), reads), plain, atol=1e-10
    )
    scored = open_backend("cpu-eager").run(case).steps[0].scored
    assert scored is not None
    assert scored.hidden is not None
    np.testing.assert_allclose(scored.hidden[0], plain[-1], atol=1e-10)


def test_a_mismatch_names_both_descriptors() -> None:
    other_case = replace(CASE, draft=Echo(SHAPE, HiddenStates(place="normed")))
    with pytest.raises(Unsupported, match=r"reads residual stream after layer 0, .* gives it output of the last norm"):
        open_backend("cpu-eager").run(other_case)
    with pytest.raises(Malformed, match="residual stream after layer 9: the target has layers 0 to"):
        replace(CASE, draft=Echo(SHAPE, HiddenStates((9,))))


def test_it_is_saved_loaded_shrunk_and_told() -> None:
    assert case_from_json(case_to_json(CASE)) == CASE
    smaller = [
        smaller_case
        for smaller_case in nearer(CASE)
        if isinstance(smaller_case.draft, Echo) and len(smaller_case.draft.shape) < len(SHAPE)
    ]
    assert smaller
    assert min(map(size, smaller)) < size(CASE)
    assert CASE.draft.description == "echo draft of 5 nodes (D2-BF2-N5)"
    assert differences(smaller[0], CASE)
