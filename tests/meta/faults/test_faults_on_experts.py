"""Faults of cache, mask, positions and scores on checkpoints with experts in bfloat16, where nearly every row ties."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specverify.backends import faults
from specverify.backends.compositions import open_cpu
from specverify.checkpoints.cases import own_top_tokens
from specverify.properties.invariants import ALL
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.judge import judge
from specverify.reference.case import Case
from specverify.reference.layout import KvLayout
from specverify.reference.oracle.checkpoint import identify
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.trace import Trace
from specverify.setup.subjects import subject_of
from tests import checkpoints
from tests.checkpoints import save_checkpoint

FAMILIES = ("mixtral", "qwen3-moe", "gpt-oss", "deepseek-v2")

PAGED, LEFT_PADDED = KvLayout(kind="paged", page_size=4), KvLayout(left_pad=3)

FAULTS = {
    "kv-truncated-not-gathered": KvLayout(),
    "last-layer-not-moved": KvLayout(),
    "fast-reorder-without-offset": KvLayout(commit="fast"),
    "scratch-committed-in-row-order": KvLayout(kind="scratch"),
    "overlapping-compaction": KvLayout(kind="overwrite"),
    "branch-of-sibling-committed": KvLayout(branches=3),
    "values-moved-by-other-layout": KvLayout(),
    "crop-makes-new-tensors": KvLayout(kind="static"),
    "branch-row-written-to-shared-prefix": KvLayout(branches=3),
    "slot-from-position": PAGED,
    "tree-masked-as-chain": KvLayout(),
    "prefix-entry-hidden": KvLayout(),
    "verify-block-sees-itself-only": KvLayout(),
    "tiles-below-diagonal-unmasked": KvLayout(),
    "expert-router-fed-sibling-row": KvLayout(),
    "left-pad-open-after-prefill": LEFT_PADDED,
    "position-advances-by-one": KvLayout(),
    "positions-jump-by-left-pad": LEFT_PADDED,
    "logit-rows-shifted": KvLayout(),
    "softmax-twice": KvLayout(),
}
"""Twenty faults, each with a layout on which it strikes."""

JUDGED_INVARIANTS = tuple(
    invariant
    for invariant in ALL
    if invariant.name
    in (
        "structure.mask-is-ancestry",
        "structure.positions-are-depth",
        "attention.context-exact",
        "attention.experts-best",
        "cache.commit-equivalence",
        "cache.isolation",
        "cache.untouched-slots",
    )
)

LEAST_NOT_SHOWN = 16
"""Of the twenty, those that are found although the engine does not show its experts."""


def hidden(trace: Trace) -> Trace:
    """`trace` of an engine that does not show its experts."""
    steps = [
        step if step.scored is None else replace(step, scored=replace(step.scored, routed=None)) for step in trace.steps
    ]
    return replace(trace, steps=tuple(steps))


def verdict_on(
    folder: Path, fault: str | None, layout: KvLayout, seed: int, shows_experts: bool, oracle: Oracle
) -> Verdict:
    """The verdict on scripted trees of the checkpoint's own best tokens, after a drawn prompt."""
    checkpoint = identify(folder)
    prompt = tuple(np.random.default_rng(seed).integers(0, checkpoint.vocab_size, size=10).tolist())
    base = Case(checkpoint, prompt, layout=layout, stops=Stops(10), dtype="bfloat16", steps=4)
    plain = open_cpu().run(replace(base.plain_decode(), layout=KvLayout()))
    backend = open_cpu()
    if fault is not None:
        faults.plant(backend, faults.fault_named(fault))
    run = backend.run
    if not shows_experts:
        backend.run = lambda case: hidden(run(case))  # type: ignore[method-assign]
    return judge(
        replace(base, draft=own_top_tokens(plain, prompt[-1], seed=seed)),
        JUDGED_INVARIANTS,
        oracle,
        subject_of(backend),
    )


def is_found(folder: Path, fault: str, shows_experts: bool, oracle: Oracle) -> bool:
    """Whether one of three prompts shows the fault, at its stage or, where it strikes inside the forward, behind it."""
    for seed in range(3):
        first = verdict_on(folder, fault, FAULTS[fault], seed, shows_experts, oracle).first
        if first is not None:
            return first.stage >= faults.fault_named(fault).stage
    return False


@pytest.mark.parametrize("fault", ["kv-truncated-not-gathered", "logit-rows-shifted"])
@pytest.mark.parametrize("shows_experts", [True, False])
def test_a_fault_on_a_mixtral_is_found(fault: str, shows_experts: bool, tmp_path: Path) -> None:
    assert is_found(save_checkpoint("mixtral", tmp_path), fault, shows_experts, Oracle())


def test_the_clean_engine_agrees_whether_it_shows_its_experts_or_not(tmp_path: Path) -> None:
    folder, oracle = save_checkpoint("mixtral", tmp_path), Oracle()
    for shows_experts in (True, False):
        verdict = verdict_on(folder, None, KvLayout(), 0, shows_experts, oracle)
        assert verdict.findings == ()
        assert verdict.outcomes["cache.commit-equivalence"] == "checked"


@pytest.mark.parametrize("seed", [1, 2])
def test_plain_decode_of_a_right_engine_is_not_at_fault(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On this gpt-oss, a cap calibrated on seeded models blames plain decode, which no tie between experts excuses."""
    name, fields = checkpoints.FAMILIES["gpt-oss"]
    wide = {**fields, "num_local_experts": 8, "vocab_size": 64, "sliding_window": 16}
    monkeypatch.setitem(checkpoints.FAMILIES, "gpt-oss", (name, wide))
    verdict = verdict_on(save_checkpoint("gpt-oss", tmp_path), None, KvLayout(), seed, False, Oracle())
    assert verdict.findings == ()
    assert verdict.outcomes["attention.context-exact"] == "checked"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_twenty_faults_are_found_with_experts_shown_and_sixteen_without(family: str, tmp_path: Path) -> None:
    folder, oracle = save_checkpoint(family, tmp_path), Oracle()
    missed = [fault for fault in FAULTS if not is_found(folder, fault, True, oracle)]
    assert missed == []
    assert sum(is_found(folder, fault, False, oracle) for fault in FAULTS) >= LEAST_NOT_SHOWN
