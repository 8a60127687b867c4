"""Twelve faults planted in runs on a checkpoint are found by a prompt's own runs, where no variant runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specverify.checkpoints.cases import prepare
from specverify.plan import Plan
from specverify.properties.invariants import ALL
from specverify.properties.verdict.judge import judge
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling
from specverify.reference.tree import RankTree
from specverify.setup.subjects import open_planted, subject_of
from tests.headfiles import save_head
from tests.meta.oracle.test_reference_memory import saved_llama

HEAD = Eagle1(RankTree((0,), (0,)), HiddenStates(place="normed", shift=1), HeadLayer(2, 1, 4, 12))
SAMPLED = {"sampling": Sampling(temperature=1.0), "draft": "ngram"}
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "tree-masked-as-chain": ({}, "structure.mask-is-ancestry"),
    "prefix-entry-hidden": ({}, "structure.mask-is-ancestry"),
    "position-advances-by-one": ({}, "structure.positions-are-depth"),
    "logit-rows-shifted": ({}, "attention.context-exact"),
    "last-layer-not-moved": ({}, "cache.commit-equivalence"),
    "kv-truncated-not-gathered": ({}, "cache.commit-equivalence"),
    "acceptance-ignores-coin": (SAMPLED, "acceptance.sampled-walk"),
    "speculated-tokens-reported-certain": ({}, "lossless.logprobs"),
    "first-draft-token-unverified": ({}, "acceptance.greedy-walk"),
    "block-past-max-new-tokens": ({}, "lossless.stops"),
    "bonus-without-temperature": ({"sampling": Sampling(temperature=0.5), "draft": "ngram"}, "acceptance.sampled-walk"),
    "head-reads-state-one-early": ({"draft": "head"}, "draft.hidden-state-descriptor"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "target").mkdir()
    saved_llama(folder / "target", 2, 8, 24, 24)
    save_head(folder / "head", replace(HEAD), "vllm")
    return folder


def failed(folder: Path, fault: str | None, changes: dict[str, Any]) -> set[str]:
    """The invariants that fail on six prompts without variants."""
    words = {"draft": str(folder / "head")} if changes.get("draft") == "head" else {}
    plan = Plan(model=str(folder / "target"), cases=6, new_tokens=24, dtypes=("float32",), variants=0)
    subject, oracle = subject_of(open_planted("cpu-eager", fault)), Oracle()
    names = set[str]()
    for case, invariants in prepare(replace(plan, **{**changes, **words}), subject, ALL).cases(oracle):
        names |= {finding.invariant for finding in judge(case, invariants, oracle, subject).findings}
    return names


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_run_on_a_checkpoint_is_found(fault: str, folder: Path) -> None:
    changes, invariant = FAULTS[fault]
    assert invariant in failed(folder, fault, changes)


@pytest.mark.parametrize("changes", [{}, {"draft": "head"}, SAMPLED], ids=["greedy", "head", "sampled"])
def test_a_right_engine_has_no_finding_there(changes: dict[str, Any], folder: Path) -> None:
    assert failed(folder, None, changes) == set()
