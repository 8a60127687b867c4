"""A stranger's target in our engine: last and all logits, hidden states and kept rows are judged, calls are counted."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from specverify.adapt import component
from specverify.properties.invariants import ALL
from specverify.properties.verdict.judge import judge
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import TargetCalls
from specverify.reference.tree import RankTree, Tree
from specverify.setup.subjects import subject_of
from tests.models import LARGE_LLAMA
from tests.strangers.components import targets

ORACLE = Oracle(keep=64)
PLAIN = Case(LARGE_LLAMA, (3, 1, 4), stops=Stops(5), dtype="float32")
AHEAD = ORACLE(PLAIN).output
WRONG_TOKEN = (AHEAD[0] + 1) % LARGE_LLAMA.vocab_size
BRANCHING = replace(PLAIN, draft=Scripted((Tree((0, 0, 0, 2, 2), (4, WRONG_TOKEN, AHEAD[0], WRONG_TOKEN, AHEAD[1])),)))
FUSED = HiddenStates((-1, 0, 1), shift=1)
HEAD = Eagle3(RankTree((0, 0, 0, 1), (0, 0, 1, 0)), FUSED, HeadLayer(4, 2, 4, 12), vocabulary=(1, 2, 5, 11, 16))
HEADED = replace(PLAIN, draft=HEAD)
CHAINED = replace(PLAIN, draft=replace(HEAD, shape=RankTree((0, 0, 1), (0, 0, 0))))
SAMPLED = replace(
    PLAIN,
    draft=LanguageModel(LARGE_LLAMA, RankTree((0, 0, 0), (0, 0, 1))),
    sampling=Sampling(1.5, draws="top-k", seed=4),
)
SAMPLED_HEAD = replace(HEADED, sampling=Sampling(1.5, draws="top-k", seed=4))
HEAVY = ("acceptance.law-", "acceptance.renamed-law", "acceptance.support-at-edges", "lossless.distribution")
LIGHT = tuple(invariant for invariant in ALL if not invariant.name.startswith(HEAVY))


@pytest.mark.parametrize(
    ("case", "checked"),
    [
        (PLAIN, "attention.context-exact"),
        (BRANCHING, "acceptance.greedy-walk"),
        (HEADED, "draft.hidden-state-descriptor"),
        (CHAINED, "draft.fidelity"),
        (SAMPLED, "acceptance.sampled-walk"),
        (SAMPLED_HEAD, "acceptance.sampled-walk"),
    ],
    ids=["plain", "branching", "head", "chain", "sampled", "sampled-head"],
)
def test_a_right_target_agrees(case: Case, checked: str) -> None:
    verdict = judge(case, LIGHT, ORACLE, subject_of(targets.open_target()))
    assert verdict.findings == ()
    assert verdict.unsupported is None
    for name in ("attention.context-exact", "lossless.accounting", checked):
        assert verdict.outcomes[name] == "checked", name


def test_calls_are_counted_by_kind() -> None:
    def calls(case: Case) -> TargetCalls:
        accounting = targets.open_target().run(case).accounting
        assert accounting is not None
        assert accounting.target_calls is not None
        return accounting.target_calls

    steps = len(AHEAD)
    assert calls(PLAIN) == TargetCalls(prefill=1, decode=steps - 1, verify=0), "the prompt is prefilled with its root"
    assert calls(BRANCHING) == TargetCalls(prefill=1, decode=steps - 3, verify=1), "the tree gives three tokens"


FAULTS: dict[str, tuple[Case, str]] = {
    "before": (PLAIN, "attention.context-exact"),
    "root": (PLAIN, "attention.context-exact"),
    "sibling": (BRANCHING, "attention.context-exact"),
    "late": (BRANCHING, "attention.context-exact"),
    "layer": (HEADED, "draft.hidden-state-descriptor"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_target_is_found(fault: str) -> None:
    case, invariant = FAULTS[fault]
    invariants = [candidate for candidate in ALL if candidate.name == invariant]
    verdict = judge(case, invariants, ORACLE, subject_of(component(target=targets.target(fault))()))
    assert invariant in {finding.invariant for finding in verdict.findings}


class Half:
    """A target without two of its methods."""

    def begin(self) -> None: ...

    def prefill(self, tokens: Any) -> Any: ...

    def verify(self, tokens: Any, positions: Any, parent: Any) -> Any: ...


class Short(targets.Recomputing):
    """A target whose states are one number too few."""

    def verify(self, *arguments: Any) -> Any:
        logits, states = super().verify(*arguments)
        return logits, None if states is None else states[:, 1:]


BAD: dict[str, tuple[Case, Callable[..., Any], str]] = {
    "methods": (PLAIN, lambda checkpoint: Half(), "returned Half without decode, keep"),
    "states": (
        HEADED,
        lambda checkpoint, layers, width: Short(checkpoint, layers, width, ""),
        "states: .*expected float",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_mismatch_is_one_line(bad: str) -> None:
    case, open_target, line = BAD[bad]
    invariants = [invariant for invariant in ALL if invariant.name == "lossless.completes"]
    verdict = judge(case, invariants, ORACLE, subject_of(component(target=open_target)()))
    (finding,) = [finding for finding in verdict.findings if finding.invariant == "lossless.completes"]
    assert str(finding.observed).count("\n") == 0
    assert re.search(line, str(finding.observed)), finding.observed
