"""Variants on a checkpoint or of a long prompt run on the columns of one prefill, and show the bits of other runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specverify.checkpoints.cases import CLOSE_STEPS, prepare
from specverify.checkpoints.given_draft import given_draft
from specverify.plan import Plan
from specverify.properties.invariants import ALL
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import LONG_PROMPT, Subject
from specverify.reference.architecture import Checkpoint, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.layout import KINDS, KvLayout
from specverify.reference.oracle.checkpoint import identify
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.trace import Trace
from specverify.reference.tree import RankTree, Tree
from specverify.setup.subjects import open_planted, subject_of
from tests.cases import SHORTEST
from tests.checkpoints import save_checkpoint
from tests.headfiles import save_head
from tests.meta.oracle.test_reference_memory import saved_llama
from tests.models import LLAMA

PROMPT = tuple((7 * place + 3) % 24 for place in range(21))
TREES = (Tree((0, 0, 1, 0), (9, 1, 2, 3)), Tree((0, 0, 0), (9, 4, 5)), Tree((0,), (9,)))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return saved_llama(tmp_path_factory.mktemp("target"), 2, 8, 24, 24)


def variant(model: Any, tree: Tree, layout: KvLayout = KvLayout(), prompt: tuple[int, ...] = PROMPT) -> Case:
    case = Case(model, (*prompt, 9), Scripted((tree,)), stops=Stops(4), steps=1, layout=layout)
    return replace(case, dtype="float32")


def equal_bits(first: Trace, second: Trace) -> bool:
    """Whether both show the same numbers, columns and counts; seconds and calls of attention aside."""
    of_time = ("forward_s", "attention_calls")

    def numbers(value: Any) -> Any:
        if hasattr(value, "__dataclass_fields__"):
            return {name: numbers(getattr(value, name)) for name in value.__dataclass_fields__ if name not in of_time}
        if isinstance(value, (tuple, list)):
            return [numbers(part) for part in value]
        return value.tobytes() if hasattr(value, "tobytes") else value

    return bool(numbers(first) == numbers(second))


def calls_of(backend: Any, model: Checkpoint | Seeded) -> int:
    return int(backend.models.open(model, "float32").calls)


@pytest.mark.parametrize("kind", KINDS)
def test_variants_in_every_layout_have_the_bits_of_runs_of_their_own(kind: str, target: Checkpoint) -> None:
    layout = KvLayout(kind=kind, page_size=4 if KINDS[kind].pages else 0)
    shared, alone = (subject_of(open_planted("cpu-eager", None)) for _ in range(2))
    for tree in TREES:
        assert equal_bits(shared.run_variant(variant(target, tree, layout)), alone(variant(target, tree, layout)))


@pytest.mark.parametrize("family", ["mixtral", "deepseek-v3.2"])
def test_choices_of_experts_and_columns_are_copied_too(family: str, tmp_path: Path) -> None:
    model = identify(str(save_checkpoint(family, tmp_path)))
    shared, alone = (subject_of(open_planted("cpu-eager", None)) for _ in range(2))
    for tree in TREES:
        trace = shared.run_variant(variant(model, tree))
        assert trace.steps[0].scored is not None
        assert trace.steps[0].scored.routed is not None
        assert equal_bits(trace, alone(variant(model, tree)))


@pytest.mark.parametrize("kind", ["static", "paged", "prefix"])
@pytest.mark.parametrize("family", ["lfm2", "falcon-h1", "qwen3-next"])
def test_recurrent_states_are_copied_unless_a_prefix_cache_keeps_some(family: str, kind: str, tmp_path: Path) -> None:
    model = identify(str(save_checkpoint(family, tmp_path)))
    layout = KvLayout(kind=kind, page_size=4 if KINDS[kind].pages else 0)
    shared, alone = (open_planted("cpu-eager", None) for _ in range(2))
    for tree in TREES:
        trace = subject_of(shared).run_variant(variant(model, tree, layout))
        assert equal_bits(trace, subject_of(alone)(variant(model, tree, layout)))
    saved_calls = calls_of(alone, model) - calls_of(shared, model)
    assert saved_calls == (0 if kind == "prefix" else len(TREES) - 1)


def test_a_long_prompt_of_a_drawn_model_is_prefilled_once_and_a_short_one_by_each_run() -> None:
    prompt = tuple(np.random.default_rng(0).integers(0, LLAMA.vocab_size, LONG_PROMPT).tolist())
    backend: Any = open_planted("cpu-eager", None)
    subject = subject_of(backend)
    for length, calls in ((LONG_PROMPT, 1 + len(TREES)), (LONG_PROMPT - 1, 2 * len(TREES))):
        before = calls_of(backend, LLAMA)
        for tree in TREES:
            case = variant(LLAMA, tree, prompt=prompt[:length])
            assert equal_bits(subject.run_variant(case), subject_of(open_planted("cpu-eager", None))(case))
        assert calls_of(backend, LLAMA) - before == calls


def test_one_prefill_serves_all_variants_of_a_prompt_and_may_be_continued(target: Checkpoint) -> None:
    backend: Any = open_planted("cpu-eager", None)
    subject = subject_of(backend)
    subject.run_variant(variant(target, TREES[0]))
    before = calls_of(backend, target)
    subject.run_variant(variant(target, TREES[1]))
    assert calls_of(backend, target) - before == 1  # its tree alone
    longer = variant(target, TREES[2], prompt=(*PROMPT, 9, 1))
    subject.run_variant(longer, extends=True)
    assert calls_of(backend, target) - before == 3
    in_pieces = replace(variant(target, TREES[2]), layout=KvLayout(prefill_chunk=len(PROMPT)))
    subject.run_variant(in_pieces)
    assert calls_of(backend, target) - before == 5  # another layout prefills for itself
    subject.run_variant(variant(target, TREES[2], prompt=(*PROMPT, 9, 2)))
    assert calls_of(backend, target) - before == 7  # so does another text, and one that may not be continued
    assert subject.run_again(variant(target, TREES[1])).accounting is not None
    assert calls_of(backend, target) - before == 9


def test_built_in_models_and_other_engines_run_as_ever(target: Checkpoint) -> None:
    asked: list[Case] = []
    backend = subject_of(open_planted("cpu-eager", None))

    def run(case: Case) -> Any:
        asked.append(case)
        return backend(case)

    plain = Subject("plain", run, backend.reveals)
    plain.run_variant(variant(target, TREES[0]))
    plain.share = backend.share
    plain.run_variant(SHORTEST)
    assert asked == [variant(target, TREES[0]), SHORTEST]


def test_a_planted_seam_does_not_meet_the_prefills_of_others(target: Checkpoint) -> None:
    backend: Any = open_planted("cpu-eager", None)
    backend.run_variant(variant(target, TREES[0]), False)
    prefills = backend._prefills

    def twice(*arguments: Any) -> torch.Tensor:
        doubled: torch.Tensor = 2 * seams.attend(*arguments)
        return doubled

    seams = backend.seams
    backend.seams = replace(seams, attend=twice)
    backend.run_variant(variant(target, TREES[0]), False)
    assert backend._prefills is not prefills


def test_the_variants_of_a_prompt_take_fewer_prefills(target: Checkpoint) -> None:
    plan = Plan(model=target.source, cases=1, new_tokens=8, dtypes=("float32",), draft="ngram")
    forwards = []
    for shares in (True, False):
        backend: Any = open_planted("cpu-eager", None)
        subject, oracle = subject_of(backend), Oracle()
        if not shares:
            subject.share = None
        *_, (case, invariants) = prepare(plan, subject, ALL).cases(oracle)
        assert case.steps == CLOSE_STEPS
        verdict = judge(case, invariants, oracle, subject)
        assert not verdict.findings
        assert verdict.outcomes["attention.no-leakage"] == "checked"
        forwards.append((calls_of(backend, target), subject.runs))
    (shared, runs), (alone, same_runs) = forwards
    assert runs == same_runs
    assert runs > 25
    assert alone - shared > 12


def test_a_head_reads_the_hidden_states_of_the_copied_columns(target: Checkpoint, tmp_path: Path) -> None:
    trees = RankTree((0, 0, 0), (0, 0, 1))
    save_head(tmp_path, Eagle1(trees, HiddenStates(place="normed", shift=1), HeadLayer(2, 1, 4, 12)), "vllm")
    shared, alone = (subject_of(open_planted("cpu-eager", None)) for _ in range(2))
    assert shared.abilities is not None
    head = given_draft(str(tmp_path), target, shared.abilities)
    assert head is not None
    cases = [replace(variant(target, TREES[2]), draft=head, stops=Stops(count)) for count in (2, 3)]
    for case in cases:
        trace = shared.run_variant(case)
        assert trace.steps[0].drafted is not None
        assert len(trace.steps[0].drafted.tree) > 1
        assert equal_bits(trace, alone(case))
