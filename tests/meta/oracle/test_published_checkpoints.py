"""Checkpoints of published configs: the right engine is right on them, by the oracle and by plain transformers."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specverify.backends.compositions import open_cpu
from specverify.campaign.against import ByBackend, TransformersOracle
from specverify.properties.strategies.models import GALLERY
from specverify.properties.tolerance.amplification import CONTROL
from specverify.properties.tolerance.bounds import UNIT
from specverify.properties.tolerance.closeness import Noise, noise
from specverify.properties.verdict.invariant import Oracle
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Subject
from specverify.reference.architecture import Checkpoint, Model, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.family.granite import GraniteSettings
from specverify.reference.oracle.checkpoint import identify
from specverify.reference.sampling import Stops
from specverify.reference.trace import Trace
from specverify.reference.trace_memory import TraceMemory
from specverify.reference.tree import Tree
from specverify.setup.subjects import subject_of
from tests.corruption import BY_NAME, ORACLE
from tests.measure.checkpoints import DTYPES, measure
from tests.models import LLAMA
from tests.published import CONFIGS, save_model
from tests.tiers import first, gated

CLOSE = (BY_NAME["attention.context-exact"],)


def save_published(name: str, folder: Path, seed: int) -> Checkpoint:
    return identify(save_model(name, folder, seed))


def case_on(model: Model, seed: int, dtype: str, turn: int = 0) -> Case:
    """A case of prompt number `turn` of `seed`, with a tree in its first step."""
    draw = np.random.default_rng(seed)
    for _ in range(turn + 1):
        prompt = tuple(draw.integers(0, 128, int(draw.integers(1, 40))).tolist())
    tree = Tree((0, 0, 0, 1), (prompt[-1], 3, 5, 7))
    return Case(model, prompt, Scripted((tree,)), stops=Stops(12), dtype=dtype)


def error_of(case: Case, oracle: Oracle) -> Noise:
    return noise(case, oracle, subject_of(open_cpu()))


def test_forty_configs_and_every_family_that_is_read_from_files() -> None:
    assert len(CONFIGS) >= 40
    kinds = {config["model_type"] for config in CONFIGS.values()}
    assert len(kinds) >= 25


@pytest.mark.parametrize(("name", "dtype", "turn"), [("qwen3-next-80b-a3b", "float16", 0)])
def test_plain_decode_beyond_its_ceiling_is_right_on_an_ill_conditioned_prompt(
    name: str, dtype: str, turn: int, tmp_path: Path
) -> None:
    case = case_on(save_published(name, tmp_path, 1), 1, dtype, turn)
    error, subject = error_of(case, ORACLE), subject_of(open_cpu())
    assert error.measured > 1.3 * error.ceiling
    assert not error.control_at_fault
    assert error.logits >= error.measured, "the unit of rule N is what the target's conditioning explains"
    assert not judge(case, CLOSE, ORACLE, subject).findings
    # What it does not explain is a fault, and widens nothing.
    cap = error.amplification.control_cap(dtype)
    assert replace(error, measured=1.1 * cap).control_at_fault


def without_routing(trace: Trace) -> Trace:
    """The trace of an engine that does not show the experts of its rows."""
    bare = [
        replace(step, scored=None if step.scored is None else replace(step.scored, routed=None)) for step in trace.steps
    ]
    return replace(trace, steps=tuple(bare))


@pytest.mark.parametrize("is_shown", first([True, False], 1))
def test_plain_decode_through_other_experts_is_not_at_fault(is_shown: bool, tmp_path: Path) -> None:
    case, backend = case_on(save_published("mixtral-8x7b", tmp_path, 1), 1, "float16", 1), open_cpu()
    subject = subject_of(backend)
    if not is_shown:
        subject = Subject("unshown", lambda case: without_routing(backend.run(case)), subject.reveals)
    error = noise(case, ORACLE, subject)
    assert error.control_at_fault is not is_shown
    verdict = judge(case, CLOSE, ORACLE, subject)
    assert not verdict.findings
    assert bool(verdict.routing_ties) is not is_shown
    assert is_shown or error.logits < error.measured, "its error widens no tolerance"


def test_plain_transformers_knows_how_rows_amplify_roundings(tmp_path: Path) -> None:
    case = case_on(save_published("gpt-oss-20b", tmp_path, 1), 1, "float32")
    plain = TransformersOracle()
    error, by_oracle = error_of(case, plain), error_of(case, ORACLE)
    moved, expected = error.amplification.control_movement(), by_oracle.amplification.control_movement()
    assert moved is not None
    assert expected is not None
    # Both change the weights at random, each in its own order.
    assert 0.5 < np.median(moved.logits / expected.logits) < 2
    assert 0.5 < np.median(moved.attended / expected.attended) < 2
    unit = UNIT["float32"] * float(np.sqrt(np.mean(np.square(moved.logits))))
    beyond = replace(error, measured=0.9 * CONTROL["float32"][0] * unit, ceiling=0.5 * unit)
    assert not beyond.control_at_fault
    assert replace(beyond, measured=1.1 * CONTROL["float32"][0] * unit).control_at_fault
    # The network has its own weights again.
    fresh = TransformersOracle()
    for oracle_side in (plain, fresh):
        oracle_side._traces = TraceMemory(8)
    assert np.array_equal(plain(case).steps[0].scored.logits, fresh(case).steps[0].scored.logits)  # type: ignore[union-attr]


def test_a_backend_as_reference_has_the_amplification_of_the_oracle() -> None:
    case = Case(LLAMA, (1, 2, 3), Scripted(), stops=Stops(3), dtype="float32")
    reference = ByBackend("cpu-eager", subject_of(open_cpu()), exact=True)
    moved, expected = error_of(case, reference).amplification.control_movement(), error_of(case, ORACLE).amplification
    assert moved is not None
    assert np.array_equal(moved.logits, expected.control_movement().logits)  # type: ignore[union-attr]


def test_log_probabilities_beside_small_logits_may_be_rounded_themselves() -> None:
    """Falcon-H1 multiplies its logits by 1/64 or less, so that the logarithm of the vocabulary outweighs them."""
    arch = next(arch for arch in GALLERY if arch.family == "granite")
    small = replace(arch, settings=replace(GraniteSettings.of(arch), logits_scaling=1e5))
    subject = subject_of(open_cpu())
    for seed in range(4):
        case = Case(Seeded(small, seed), (1, 2, 3), Scripted(), stops=Stops(6), dtype="float32")
        verdict = judge(case, (BY_NAME["lossless.logprobs"],), ORACLE, subject)
        assert verdict.outcomes["lossless.logprobs"] == "checked"
        assert not verdict.findings


@pytest.mark.parametrize(
    ("name", "dtype"), gated([(name, dtype) for name in CONFIGS for dtype in DTYPES], lambda index: index == 67)
)
@pytest.mark.parametrize("seed", first([0, 1], 1))
def test_no_case_on_a_published_config_differs(name: str, dtype: str, seed: int) -> None:
    figures = measure(1, (name,), (dtype,), seed)
    assert figures["cases"] == 3
    assert not figures["findings"]
