"""Heads in published directories: every layout gives the words and the weights that were written."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specverify.backends.registry import open_backend
from specverify.properties.invariants import ALL
from specverify.properties.verdict.judge import judge
from specverify.reference.case import Case
from specverify.reference.case_json import case_from_json, case_to_json
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft.head import Head
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.draft.medusa import Medusa
from specverify.reference.draft_files import open_head
from specverify.reference.draft_trees import Expansion
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.trace import Array, Drafted, Trace
from specverify.reference.tree import RankTree
from specverify.reference.weights import seeded_head
from specverify.setup.subjects import subject_of
from tests.headfiles import TARGET, save_head, weights_of

TREE = RankTree((0, 0, 0, 1, 1, 3), (0, 0, 1, 0, 1, 0))
LAYER = HeadLayer(2, 1, 6, 12, theta=5e5, norm_eps=1e-6)
NORMED, USUAL = HiddenStates(place="normed", shift=1), HiddenStates((1, 3, 4), shift=1)
OTHER_STATES = HiddenStates((-1, 2, 5), shift=1)
REDUCED = (1, 2, 5, 11, 16)
DEEP: dict[str, Any] = {"layers": 3, "unrotated": (1,)}
EAGLE1, EAGLE3 = Eagle1(TREE, NORMED, LAYER), Eagle3(TREE, USUAL, LAYER)
MEDUSA = Medusa(TREE, HiddenStates(place="normed"), 3)

WRITTEN: list[tuple[str, Head]] = [
    ("safeailab", EAGLE1),
    ("vllm", EAGLE1),
    ("speculators", EAGLE1),
    ("safeailab", replace(EAGLE1, bias=False)),
    ("speculators", replace(EAGLE1, bias=False)),
    ("safeailab", replace(EAGLE1, layers=2)),
    ("safeailab", replace(EAGLE1, **DEEP)),
    ("vllm", replace(EAGLE1, **DEEP)),
    ("safeailab", replace(EAGLE1, unrotated=(0,))),
    ("safeailab", replace(EAGLE1, experts=4)),
    ("vllm", replace(EAGLE1, **DEEP, experts=3, experts_per_token=2)),
    ("safeailab", EAGLE3),
    ("safeailab", replace(EAGLE3, vocabulary=REDUCED)),
    ("specforge", replace(EAGLE3, reads=HiddenStates((0, 2, 7), shift=1), vocabulary=REDUCED)),
    ("vllm", replace(EAGLE3, reads=OTHER_STATES, vocabulary=REDUCED, norm_before_residual=True)),
    ("speculators", replace(EAGLE3, reads=OTHER_STATES, norm_before_residual=True, norm_output=True)),
    ("speculators", replace(EAGLE3, vocabulary=REDUCED)),
    ("fasterdecoding", MEDUSA),
    ("vllm", replace(MEDUSA, bias=False)),
    ("vllm", replace(MEDUSA, layers=2)),
]


@pytest.mark.parametrize(
    ("layout", "head"), WRITTEN, ids=[f"{layout}-{head.TAG}-{index}" for index, (layout, head) in enumerate(WRITTEN)]
)
def test_a_layout_gives_the_words_and_the_weights_that_were_written(tmp_path: Path, layout: str, head: Head) -> None:
    opened = open_head(save_head(tmp_path / "head", head, layout), TARGET)
    assert opened.words.files is not None
    assert opened.words == replace(head.weights, files=opened.words.files)
    written = seeded_head(head, TARGET)
    assert set(opened.weights) == set(written)
    for name, array in written.items():
        np.testing.assert_array_equal(opened.weights[name], array)
        assert not opened.weights[name].flags.writeable


def drafts_of(trace: Trace) -> list[Drafted]:
    return [step.drafted for step in trace.steps if step.drafted is not None]


def outcomes_of(case: Case) -> dict[str, str]:
    drafts = tuple(
        invariant
        for invariant in ALL
        if invariant.name.startswith(("draft.", "lossless.completes", "lossless.greedy-match"))
    )
    verdict = judge(case, drafts, Oracle(), subject_of(open_backend("cpu-eager")))
    assert verdict.unsupported is None
    assert not verdict.findings, verdict.findings
    return dict(verdict.outcomes)


def run(head: Head, **fields: Any) -> Case:
    return Case(TARGET, (3, 1, 4, 1, 5), head, stops=Stops(6), **{"dtype": "float64", **fields})


STORED = (
    EAGLE1,
    replace(EAGLE1, **DEEP, experts=3, experts_per_token=2),
    replace(EAGLE3, vocabulary=REDUCED),
    MEDUSA,
)


@pytest.mark.parametrize("head", STORED, ids=("eagle1", "eagle1-deep", "eagle3", "medusa"))
def test_a_stored_head_drafts_as_the_seeded_one(tmp_path: Path, head: Head) -> None:
    layout = "fasterdecoding" if isinstance(head, Medusa) else "safeailab"
    stored = replace(open_head(save_head(tmp_path, head, layout), TARGET).words, shape=head.shape)
    case = run(stored)
    expected, trace = Oracle()(run(head)), Oracle()(case)
    assert [draft.tree for draft in drafts_of(trace)] == [draft.tree for draft in drafts_of(expected)]
    outcomes = outcomes_of(case)
    assert outcomes["draft.fidelity"] == outcomes["draft.hidden-state-descriptor"] == "checked"


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "an embedding of its own": ({}, {"embed_tokens.weight": (24, 8)}),
    "one norm before fc": ({"norm_before_fc": True}, {"input_norm.weight": (24,)}),
    "a norm for each state": ({"fc_norm": True}, {f"fc_norm.{number}.weight": (8,) for number in range(3)}),
    "positions of linear": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, {}),
    "positions of llama3": ({"rope_scaling": LLAMA3}, {}),
    "biases of attention": (
        {"attention_bias": True},
        {f"midlayer.self_attn.{name}_proj.bias": (out,) for name, out in (("q", 12), ("k", 6), ("v", 6), ("o", 8))},
    ),
}
"""For each variant of EAGLE-3 in the layout of vLLM: fields of config.json, and further tensors."""


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_changes_the_scores_alike_on_both_sides(tmp_path: Path, variant: str) -> None:
    fields, further = VARIANTS[variant]
    draw = np.random.default_rng(0)
    state = weights_of(EAGLE3) | {name: 1 + draw.normal(size=shape) for name, shape in further.items()}
    plain, varied = (
        replace(open_head(save_head(tmp_path / name, EAGLE3, "vllm", *contents), TARGET).words, shape=TREE)
        for name, contents in (("plain", ()), ("varied", (fields, state)))
    )
    first, second = (drafts_of(Oracle()(run(head)))[0].logits for head in (plain, varied))
    assert first is not None
    assert second is not None
    assert not np.allclose(first, second)
    assert outcomes_of(run(varied))["draft.fidelity"] == "checked"
    assert case_from_json(case_to_json(run(varied))) == run(varied)


def test_a_head_without_states_of_layers_reads_the_normed_one_and_has_no_fc(tmp_path: Path) -> None:
    state: dict[str, Array] = {name: array for name, array in weights_of(EAGLE3).items() if name != "fc.weight"}
    folder = save_head(tmp_path, EAGLE3, "specforge", {"eagle_config": {"use_aux_hidden_state": False}}, state)
    head = open_head(folder, TARGET).words
    assert head.reads == NORMED
    assert outcomes_of(run(replace(head, shape=Expansion(3, 2, 6))))["draft.fidelity"] == "checked"


def test_a_head_without_lm_head_scores_with_the_targets(tmp_path: Path) -> None:
    state = {name: array for name, array in weights_of(EAGLE3).items() if name != "lm_head.weight"}
    head = open_head(save_head(tmp_path, EAGLE3, "safeailab", {"draft_vocab_size": None}, state), TARGET).words
    assert outcomes_of(run(replace(head, shape=TREE)))["draft.fidelity"] == "checked"


def test_numbers_of_layers_mean_outputs_in_sglang_and_inputs_in_vllm(tmp_path: Path) -> None:
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    read = [
        open_head(save_head(tmp_path / layout, EAGLE3, layout, {"eagle_config": None, **ids}), TARGET).words.reads
        for layout in ("specforge", "vllm")
    ]
    assert [states.layers for states in read if states] == [(1, 3, 4), (0, 2, 3)]


def test_medusa_stores_a_block_that_is_run_twice_once(tmp_path: Path) -> None:
    head = replace(MEDUSA, layers=2)
    state = {name: array for name, array in weights_of(head).items() if ".1.linear" not in name}
    opened = open_head(
        save_head(tmp_path, head, "fasterdecoding", state=state, file="medusa_lm_head.safetensors"), TARGET
    )
    for part in ("weight", "bias"):
        first, second = (opened.weights[f"medusa_head.2.{layer}.linear.{part}"] for layer in (0, 1))
        np.testing.assert_array_equal(first, second)
    assert outcomes_of(run(replace(opened.words, shape=TREE)))["draft.fidelity"] == "checked"


def test_all_medusa_heads_share_one_matrix_where_vllm_says_so(tmp_path: Path) -> None:
    head = replace(MEDUSA, bias=False)
    state = {name: array for name, array in weights_of(head).items() if not name.endswith(("1.1.weight", "2.1.weight"))}
    opened = open_head(save_head(tmp_path, head, "vllm", {"original_lm_head": True}, state), TARGET)
    for number in (1, 2):
        np.testing.assert_array_equal(opened.weights[f"medusa_head.{number}.1.weight"], state["medusa_head.0.1.weight"])


def test_a_stored_head_goes_through_a_case_file_by_its_digest(tmp_path: Path) -> None:
    head = replace(EAGLE3, vocabulary=REDUCED)
    here, there = (
        run(replace(open_head(save_head(tmp_path / name, head, "safeailab"), TARGET).words, shape=TREE))
        for name in "ab"
    )
    assert here != there
    assert here.id == there.id
    again = case_from_json(case_to_json(here))
    assert again == here
    other_weights = {"midlayer.hidden_norm.weight": 2 * weights_of(head)["midlayer.hidden_norm.weight"]}
    changed = open_head(
        save_head(tmp_path / "c", head, "safeailab", state=weights_of(head) | other_weights), TARGET
    ).words
    assert run(replace(changed, shape=TREE)).id != here.id
