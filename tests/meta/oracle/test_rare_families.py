"""Experts, partial rotary embedding, post-norms, multipliers, sinks: each family within 1e-9 of transformers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specverify.backends import faults
from specverify.backends.base import Unsupported
from specverify.backends.compositions import open_cpu
from specverify.campaign.against import TransformersOracle
from specverify.properties.invariants import ALL
from specverify.properties.strategies.models import ROPES
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.layout import KINDS, KvLayout
from specverify.reference.oracle.checkpoint import identify
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.model import PathByPath
from specverify.reference.oracle.parameters import load
from specverify.reference.sampling import Stops
from specverify.reference.trace import Trace
from specverify.reference.tree import RankTree, Tree
from specverify.reference.weights import probe_architecture
from specverify.setup.subjects import subject_of
from tests.checkpoints import MODEL_TYPES, save_checkpoint
from tests.drawn_families import RARE, draw_architecture, listed_architectures
from tests.meta.oracle.test_against_transformers import assert_same_trace, case_of
from tests.tiers import each, gated

PROMPT = (1, 2, 3, 4, 9, 8, 7, 1, 0, 6, 3, 2)
TREE, CHAIN = RankTree((0, 0, 0, 1, 2, 1), (0, 0, 1, 0, 0, 1)), RankTree((0, 0, 1, 2), (0, 0, 0, 0))


def case_for(arch: Architecture, layout: KvLayout | None = None, dtype: str = "float64", chain: bool = False) -> Case:
    prompt = tuple(token % arch.vocab_size for token in PROMPT)
    draft = LanguageModel(Seeded(arch, 1), CHAIN if chain else TREE)
    return Case(Seeded(arch, 1), prompt, draft, layout or KvLayout(), stops=Stops(5), dtype=dtype)


def far_apart(case: Case, run: Callable[[Case], Trace], other_run: Callable[[Case], Trace]) -> float:
    """The largest difference of logits and attention outputs between two runs that say the same tokens."""
    trace, other_trace = run(case), other_run(case)
    assert trace.output == other_trace.output
    worst = 0.0
    for step, other_step in zip(trace.steps, other_trace.steps, strict=True):
        assert step.scored is not None
        assert other_step.scored is not None
        assert step.attended is not None
        assert other_step.attended is not None
        pairs = ((step.scored.logits, other_step.scored.logits), (step.attended.output, other_step.attended.output))
        worst = max(worst, *(float(np.abs(a - b).max()) for a, b in pairs))
    return worst


@pytest.mark.parametrize(
    ("family", "seed"),
    gated([(family, seed) for seed in range(30) for family in RARE], lambda index: index < len(RARE)),
)
def test_a_drawn_configuration_says_what_transformers_says(family: str, seed: int) -> None:
    arch, engine = draw_architecture(family, seed), open_cpu()
    for chain in (False, True):
        case = case_for(arch, chain=chain)
        assert far_apart(case, Oracle(), TransformersOracle()) < 1e-9
        assert far_apart(case, Oracle(), engine.run) < 1e-9


@pytest.mark.parametrize("family", RARE)
def test_both_evaluators_agree(family: str) -> None:
    case = case_for(listed_architectures(family)[-1])
    assert far_apart(case, Oracle(), Oracle(evaluator=PathByPath)) < 1e-12


@pytest.mark.parametrize(
    ("family", "kind"),
    gated([(family, kind) for family in RARE for kind in KINDS], lambda index: index % (2 * len(KINDS) + 1) == 0),
)
def test_every_layout_is_within_a_billionth(family: str, kind: str) -> None:
    layout = KvLayout(kind=kind, page_size=4 if KINDS[kind].pages else KvLayout().page_size)
    for arch in listed_architectures(family):
        assert far_apart(case_for(arch, layout), Oracle(), open_cpu().run) < 1e-9


@pytest.mark.parametrize("dtype", gated(["float64", "bfloat16"], lambda index: index == 0))
@pytest.mark.parametrize("family", each(sorted(MODEL_TYPES), 3))
def test_a_checkpoint_says_what_transformers_says(family: str, dtype: str, tmp_path: Path) -> None:
    folder = save_checkpoint(family, tmp_path)
    assert load(identify(folder), dtype).architecture.family in RARE
    assert_same_trace(
        Oracle()(case_of(folder, understood=True, dtype=dtype)), TransformersOracle()(case_of(folder, dtype=dtype))
    )
    verdict = judge(case_of(folder, understood=True, dtype=dtype), ALL, Oracle(), subject_of(open_cpu()))
    assert verdict.findings == ()
    assert verdict.outcomes["attention.context-exact"] == "checked"


@pytest.mark.parametrize("family", RARE)
def test_every_setting_changes_the_logits(family: str) -> None:
    """Else the comparisons above would not see it dropped."""

    def logits(arch: Architecture) -> Any:
        prompt = tuple(token % arch.vocab_size for token in PROMPT)
        scored = Oracle()(Case(Seeded(arch, 1), prompt, Scripted(), stops=Stops(1))).steps[0].scored
        assert scored is not None
        return scored.logits[0]

    # Sizes change the weights, and with them everything; they are no settings in this sense.
    sizes = {"experts", "experts_per_token", "expert_size", "shared_size", "dense_layers", "groups", "top_groups",
             "sparse_step", "query_rank", "latent_rank", "rotary_dim", "value_dim", "attention_every", "key_heads",
             "attention_layers", "key_width", "value_heads", "value_width", "conv_width", "mixer_heads",
             "mixer_width", "mixer_groups", "state_width", "time_pairs", "height_pairs", "width_pairs",
             "full_head_dim", "full_kv_heads", "keys_as_values", "shared_layers", "wide_blocks",
             "layer_input_width", "index_heads", "index_width", "following_layers"}  # fmt: skip
    for arch in listed_architectures(family):
        whole_logits = logits(arch)
        defaults = vars(arch.words.settings())
        for name, _ in arch.settings.pairs:
            if name not in sizes:
                settings = replace(arch.settings, **{name: defaults[name]})
                assert np.abs(logits(replace(arch, settings=settings)) - whole_logits).max() > 1e-3, name
        if any(arch.windows):
            assert np.abs(logits(replace(arch, windows=(0,) * arch.layers)) - whole_logits).max() > 1e-3
        if any(arch.chunks):
            assert np.abs(logits(replace(arch, chunks=())) - whole_logits).max() > 1e-3
        if arch.floor_scale:
            assert np.abs(logits(replace(arch, floor_scale=0)) - whole_logits).max() > 1e-3
        if arch.unrotated:
            assert np.abs(logits(replace(arch, unrotated=(), floor_scale=0)) - whole_logits).max() > 1e-3


@pytest.mark.parametrize("family", RARE)
def test_the_transparent_probe_sees_through_it(family: str) -> None:
    arch = listed_architectures(family)[-1]
    probe = probe_architecture(arch)
    model = Seeded(probe, 0, "transparent", arch.layers - 1)
    assert load(model, "float64").architecture.settings == arch.settings.probed(probe.head_dim)
    mask = tuple(
        invariant for invariant in ALL if invariant.name in ("attention.no-leakage", "structure.mask-is-ancestry")
    )
    verdict = judge(case_for(arch, dtype="float32"), mask, Oracle(), subject_of(open_cpu()))
    assert verdict.findings == ()
    assert set(verdict.outcomes.values()) == {"checked"}


def test_experts_computed_row_by_row_leave_the_bits_of_other_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The strict twin of the grouped loop: the leakage that the bound forgives is the kernel's, and not the mask's."""
    monkeypatch.setattr(
        "specverify.backends.engine.model.built_in.loop_over_experts",
        lambda network: setattr(network.config, "_experts_implementation", "batched_mm"),
    )
    (leakage,) = (invariant for invariant in ALL if invariant.name == "attention.no-leakage")
    monkeypatch.setattr(Seeded, "mixes_rows", False)
    for family in ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe"):
        case = replace(
            case_for(listed_architectures(family)[0], dtype="float32"),
            draft=Scripted((Tree((0, 0, 0, 1), (2, 5, 7, 3)),)),
        )
        verdict = judge(case, (leakage,), Oracle(), subject_of(open_cpu()))
        assert (verdict.findings, verdict.outcomes) == ((), {"attention.no-leakage": "checked"}), family


def test_a_ramp_that_transformers_truncates_all_the_same_is_refused(tmp_path: Path) -> None:
    """transformers 5.23 looks for `truncate` beside the dictionaries of the kinds of layers, where no file has it."""
    arch = replace(listed_architectures("olmo3")[0], rope=replace(ROPES["yarn"], truncate=False))
    with pytest.raises(Unsupported, match="olmo3 with yarn and truncate false"):
        open_cpu().run(case_for(arch))
    folder = save_checkpoint("gemma3", tmp_path)
    content = json.loads((folder / "config.json").read_text())
    content["rope_parameters"]["full_attention"] |= {"rope_type": "yarn", "factor": 2.0, "truncate": False}
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(UnreadableCheckpoint, match="truncate is false"):
        identify(folder)


def test_a_tie_between_experts_is_counted_and_hides_no_fault(tmp_path: Path) -> None:
    """In bfloat16 this model's rows lie near the border between two experts, and the engine shows which it took."""
    invariants = tuple(
        invariant for invariant in ALL if invariant.name in ("attention.context-exact", "attention.experts-best")
    )
    folder = save_checkpoint("mixtral", tmp_path)
    verdict = judge(case_of(folder, True, "bfloat16"), invariants, Oracle(), subject_of(open_cpu()))
    assert (verdict.findings, verdict.routing_ties) == ((), ())
    assert verdict.routed.near
    assert verdict.routed.ties
    backend = open_cpu()
    faults.plant(backend, faults.fault_named("expert-router-fed-sibling-row"))
    for dtype in ("float32", "bfloat16"):
        red_verdict = judge(case_of(folder, True, dtype), invariants, Oracle(), subject_of(backend))
        assert red_verdict.routing_ties == ()
        assert {finding.invariant for finding in red_verdict.findings} >= {"attention.experts-best"}, dtype
