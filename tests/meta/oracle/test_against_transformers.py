"""Plain transformers as the reference: equal to the oracle where both know a model, and no crib of the engine."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from specverify.backends import faults
from specverify.backends.base import Unsupported
from specverify.backends.compositions import open_cpu
from specverify.backends.transformers_reference import PlainTransformers
from specverify.campaign.against import ByTransformers, TransformersOracle, open_reference
from specverify.campaign.replay import replay
from specverify.cli import main
from specverify.properties.invariants import ALL
from specverify.properties.invariants.attention.visibility import WITHIN_NOISE
from specverify.properties.tally import Counts, Failure, Tally
from specverify.properties.verdict.finding import Finding, Verdict
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Checkpoint, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.layout import KvLayout
from specverify.reference.oracle.checkpoint import identify
from specverify.reference.sampling import Stops
from specverify.reference.trace import Stage, Trace
from specverify.reference.tree import RankTree, Tree
from specverify.reports import bundle
from specverify.reports.junit import junit
from specverify.reports.pages.summary import summary_page
from specverify.reports.pages.terminal import failure_page
from specverify.reports.record import summary
from specverify.setup.errors import UnusableInput
from specverify.setup.subjects import subject_of
from tests.checkpoints import save_checkpoint
from tests.corruption import ORACLE
from tests.inprocess import in_this_process
from tests.meta.oracle.test_oracle_against_transformers import MODELS

TREE = Tree((0, 0, 0, 1, 2, 1), (3, 5, 7, 5, 11, 4))
CONTEXT = (1, 2, 3, 4, 9, 8, 7, 1, 0, 6)

LOOKING = tuple(
    invariant
    for invariant in ALL
    if invariant.name
    in (
        "attention.context-exact",
        "attention.no-leakage",
        "acceptance.greedy-walk",
        "cache.commit-equivalence",
        "lossless.greedy-match",
        "structure.mask-is-ancestry",
    )
)


def case_of(folder: Path, understood: bool = False, dtype: str = "float32") -> Case:
    model = identify(folder, understood)
    return Case(model, (*CONTEXT, 3), Scripted((TREE, TREE)), KvLayout("fast"), stops=Stops(4), dtype=dtype)


def assert_same_trace(oracle_trace: Trace, transformers_trace: Trace) -> None:
    """Both traces say the same, numbers within 1e-9."""
    assert (oracle_trace.output, oracle_trace.finish, len(oracle_trace.steps)) == (
        transformers_trace.output,
        transformers_trace.finish,
        len(transformers_trace.steps),
    )
    for oracle_step, transformers_step in zip(oracle_trace.steps, transformers_trace.steps, strict=True):
        assert oracle_step.accepted == transformers_step.accepted
        assert oracle_step.emitted is not None
        assert transformers_step.emitted is not None
        assert oracle_step.emitted.tokens == transformers_step.emitted.tokens
        for stage, name in (("scored", "logits"), ("attended", "output"), ("committed", "before")):
            pair = [getattr(getattr(step, stage), name) for step in (oracle_step, transformers_step)]
            if pair[0] is None and pair[1] is None:
                continue  # KV is held for the first steps alone
            arrays = [(kv.keys, kv.values) for kv in pair] if stage == "committed" else [(array,) for array in pair]
            for oracle_array, transformers_array in zip(*arrays, strict=True):
                np.testing.assert_allclose(oracle_array, transformers_array, rtol=0, atol=1e-9)
        assert oracle_step.lowered is not None
        assert transformers_step.lowered is not None
        assert oracle_step.lowered.visible is not None
        assert transformers_step.lowered.visible is not None
        for oracle_array, transformers_array in zip(
            oracle_step.lowered.visible, transformers_step.lowered.visible, strict=True
        ):
            np.testing.assert_array_equal(oracle_array, transformers_array)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_it_says_what_the_oracle_says_of_a_checkpoint(family: str, dtype: str, tmp_path: Path) -> None:
    folder = save_checkpoint(family, tmp_path)
    assert not identify(folder).mixes_rows
    theirs = TransformersOracle()(case_of(folder, dtype=dtype))
    assert_same_trace(ORACLE(case_of(folder, understood=True, dtype=dtype)), theirs)


@pytest.mark.parametrize("name", ["qwen2-windows", "pangu-tied", "llama4-tempered", "soft cap"])
def test_it_says_what_the_oracle_says_of_a_built_in(name: str) -> None:
    draft = LanguageModel(Seeded(MODELS["llama"], 4), RankTree((0, 0, 1, 0), (0, 0, 0, 1)))
    arch = replace(MODELS["qwen2-windows"], score_cap=1.5) if name == "soft cap" else MODELS[name]
    case = Case(Seeded(arch, 2), (*CONTEXT, 3), draft, stops=Stops(5))
    assert_same_trace(ORACLE(case), TransformersOracle()(case))


def test_what_goes_into_attention_is_what_the_oracle_says() -> None:
    """The page names the column that an engine attended to wrongly from these."""
    model = Seeded(MODELS["mistral-window"], 1)
    oracle_model, transformers_model = ORACLE.model(model, "float32"), ByTransformers(model, "float32")
    for kind in ("queries", "keys", "values"):
        expected, actual = (
            getattr(side_model.inputs(CONTEXT, TREE), kind) for side_model in (oracle_model, transformers_model)
        )
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-9)
    assert transformers_model.kv(()).keys.shape == oracle_model.kv(()).keys.shape


def test_it_leaves_torch_as_it_was(tmp_path: Path) -> None:
    before = torch.get_default_dtype()
    PlainTransformers(identify(save_checkpoint("llama", tmp_path)), "float32").run((1, 2))
    assert torch.get_default_dtype() == before
    assert torch.ones(1).float().dtype == torch.float32
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("family", ["gemma2", "mixtral", "qwen3-moe", "cohere2", "nemotron"])
def test_a_model_without_an_oracle_agrees(family: str, tmp_path: Path) -> None:
    verdict = judge(case_of(save_checkpoint(family, tmp_path)), LOOKING, TransformersOracle(), subject_of(open_cpu()))
    assert verdict.findings == ()
    assert set(verdict.outcomes.values()) == {"checked"}


def test_a_dropped_soft_cap_is_found_on_gemma_2(tmp_path: Path) -> None:
    """It agreed with itself while both sides dropped it: the first logits were off by 0.70 of 1."""
    backend = open_cpu()
    faults.plant(backend, faults.fault_named("soft-cap-dropped"))
    finding = judge(
        case_of(save_checkpoint("gemma2", tmp_path)), LOOKING, TransformersOracle(), subject_of(backend)
    ).first
    assert finding is not None
    assert (finding.invariant, finding.stage) == ("attention.context-exact", Stage.ATTENDED)


def test_experts_do_not_hide_a_leak(tmp_path: Path) -> None:
    """Where rows are computed together, no-leakage asks for a bound in place of the same bits, and says so."""
    backend = open_cpu()
    faults.plant(backend, faults.fault_named("tiles-below-diagonal-unmasked"))
    case = case_of(save_checkpoint("mixtral", tmp_path))
    assert isinstance(case.model, Checkpoint)
    (leakage,) = (invariant for invariant in LOOKING if invariant.name == "attention.no-leakage")
    finding = judge(case, (leakage,), TransformersOracle(), subject_of(backend)).first
    assert finding is not None
    assert finding.expected == WITHIN_NOISE
    assert finding.measure is not None
    assert finding.measure > 100
    independent = replace(case, model=replace(case.model, mixes_rows=False))
    exact = judge(independent, (leakage,), TransformersOracle(), subject_of(open_cpu())).first
    assert exact is not None, "rows of this model are no longer computed together: the bound is asked for in vain"
    assert (exact.expected, exact.measure) == ("bit-identical", None)


def test_a_planted_fault_is_found(tmp_path: Path) -> None:
    backend = open_cpu()
    faults.plant(backend, faults.fault_named("kv-truncated-not-gathered"))
    case = replace(case_of(save_checkpoint("mixtral", tmp_path)), layout=KvLayout("path"))
    # The tree's second branch holds what the model says, so that the accepted rows are not the first ones.
    oracle = TransformersOracle()
    first = oracle(case.plain_decode()).output
    branch = Tree((0, 0, 0, 2), (case.prompt[-1], (first[0] + 1) % 32, first[0], first[1]))
    verdict = judge(replace(case, draft=Scripted((branch,))), LOOKING, oracle, subject_of(backend))
    assert verdict.first is not None
    assert (verdict.first.invariant, verdict.first.stage) == ("cache.commit-equivalence", Stage.COMMITTED)


def test_a_model_that_it_cannot_run_is_refused_before_any_case(tmp_path: Path) -> None:
    model = identify(save_checkpoint("mamba", tmp_path), understood=False)
    assert isinstance(model, Checkpoint)
    with pytest.raises(
        Unsupported, match=r"linear_attention: plain transformers is a reference for|layers \[\] call attention"
    ):
        open_reference("transformers", ExitStack(), model)


def test_a_backend_that_declines_the_checkpoint_is_no_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_this_process(monkeypatch)
    with pytest.raises(Unsupported, match="softcap: SDPA computes no soft cap"):
        open_reference("cpu-fused", ExitStack(), identify(save_checkpoint("gemma2", tmp_path), understood=False))


def test_a_float_that_stays_narrow_is_refused(tmp_path: Path) -> None:
    """Rule N grants a float64 run nothing: a reference in float32 would call every engine wrong."""
    plain = PlainTransformers(identify(save_checkpoint("llama", tmp_path)), "float32")
    norm = plain._network.model.norm
    norm.weight.data = norm.weight.data.float()
    forward, norm.forward = norm.forward, lambda hidden: forward(hidden).mul(torch.from_numpy(np.ones(1, np.float32)))
    plain.run((1, 2))  # what is promoted to float64 is float64
    norm.forward = lambda hidden: torch.from_numpy(forward(hidden).numpy().astype(np.float32)).mul(1.0).double()
    with pytest.raises(Unsupported, match=r"computes .*mul.* narrower than float64"):
        plain.run((1, 2))


def test_a_mask_other_than_the_configured_one_is_refused(tmp_path: Path) -> None:
    plain = PlainTransformers(identify(save_checkpoint("mistral", tmp_path)), "float32")
    plain.run(tuple(range(9)))
    plain.reaches = ((5, 0), (6, 0))
    with pytest.raises(Unsupported, match="the mask that transformers makes for layer 0 is not causal with window 5"):
        plain.run(tuple(range(9)))
    plain.run(tuple(range(5)))


@pytest.mark.parametrize("against", [None, "transformers", "cpu-split"])
def test_every_report_names_the_reference(against: str | None) -> None:
    """The page said "agrees with the oracle" where none ran."""
    tally = Tally("cpu-eager", invariants={"structure.parent-range": Counts(checked=1)}, against=against)
    page = " ".join(summary_page(tally, verbose=True).split())
    words = {
        None: "the target model, run alone by the oracle",
        "transformers": "plain transformers",
        "cpu-split": "the backend cpu-split",
    }[against]
    assert f"everything that could be compared agrees with {words} " in page
    assert ("the NumPy oracle did not run" in page) == (against is not None)
    assert summary(tally)["reference"] == (against or "oracle")
    assert f'<property name="reference" value="{against or "oracle"}"' in junit(tally).decode()


def test_a_bundle_is_replayed_against_what_it_was_compared_with(tmp_path: Path) -> None:
    folder = save_checkpoint("mixtral", tmp_path)
    case = case_of(folder)
    finding = Finding("acceptance.greedy-walk", Stage.ACCEPTED, 0, {"node": 1}, 1, 2)
    verdict = Verdict(case, "cpu-eager", {finding.invariant: "failed"}, (finding,))
    failure = Failure(verdict, finding, case.id, model=str(folder), against="transformers")
    file = bundle.save(tmp_path, failure, {})
    assert bundle.load(file).against == "transformers"
    command = bundle.replay_command(replace(failure, file=str(file)))
    assert command is not None
    assert command.endswith("--against transformers")
    assert "reference plain transformers: the NumPy oracle did not run" in " ".join(failure_page(failure).split())
    assert replay(str(file), None, None, models=(str(folder),)).word == "FIXED"
    assert "against" not in bundle.bundle_content(replace(failure, against=None), {})
    foreign = bundle.save(tmp_path, replace(failure, against="stranger:engine"), {})
    with pytest.raises(UnusableInput, match="compared with stranger:engine, code of its own"):
        replay(str(foreign), None, None, models=(str(folder),))


@pytest.mark.parametrize("family", ["glm4-moe-lite"])
def test_a_model_that_the_engine_declines_is_no_pass(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_this_process(monkeypatch)
    monkeypatch.chdir(tmp_path)
    folder = save_checkpoint(family, tmp_path)
    words = ["diff", "--model", str(folder), "--against", "transformers", "--cases", "1", "--new-tokens", "4"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    page = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 3
    assert "COULD NOT JUDGE" in page
    assert "latent attention" in page
