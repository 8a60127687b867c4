"""Recurrent states of hybrids: within 1e-9 of transformers' own, along every path of a tree, in both evaluators."""

from dataclasses import replace

import numpy as np
import pytest

from specverify.backends.adapt.engines.hf_generate import open_assisted, open_early_exit, open_lookup
from specverify.campaign.against import ByTransformers
from specverify.properties.strategies.models import GALLERY
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.family.hybrid_delta_rule import Qwen3NextSettings
from specverify.reference.family.recurrent import RecurrentState
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.model import PathByPath
from specverify.reference.oracle.parameters import load
from specverify.reference.oracle.shared_prefix import SharedPrefix
from specverify.reference.tree import Tree
from tests.drawn_families import HYBRID, draw_architecture
from tests.tiers import gated

TREE = Tree((0, 0, 0, 1, 2, 1), (1, 3, 0, 2, 4, 1))


def apart(state: RecurrentState | None, other_state: RecurrentState | None) -> float:
    """The largest difference of two states."""
    assert state is not None
    assert other_state is not None
    pairs = zip(state.windows + state.memories, other_state.windows + other_state.memories, strict=True)
    return max(float(np.abs(array - other_array).max(initial=0.0)) for array, other_array in pairs)


def evaluators(arch: Architecture) -> tuple[PathByPath, SharedPrefix]:
    parameters = load(Seeded(arch, 1), "float64")
    return PathByPath(parameters), SharedPrefix(parameters)


@pytest.mark.parametrize(
    ("family", "seed"),
    gated([(family, seed) for seed in range(20) for family in HYBRID], lambda index: index < len(HYBRID)),
)
def test_the_state_behind_a_text_is_that_of_transformers(family: str, seed: int) -> None:
    arch = draw_architecture(family, seed)
    if not arch.recurrent:
        return
    plain = ByTransformers(Seeded(arch, 1), "float64")
    for tokens in ((1,), (1, 3, 2), (4, 2, 0, 1, 3, 1, 1, 2)):
        for evaluator in evaluators(arch):
            assert apart(evaluator.recurrent(tokens), plain.recurrent(tokens)) < 1e-9


def test_a_node_goes_on_from_the_state_of_its_parent() -> None:
    """Each node has the logits of its path as a plain sequence, in both evaluators, whatever rows stand before it."""
    arch = next(arch for arch in GALLERY if arch.recurrent)
    for evaluator in evaluators(arch):
        tree_logits = evaluator.nodes((2, 5), TREE).logits
        for node in range(len(TREE)):
            path = TREE.tokens_to(node)
            alone = evaluator.nodes((2, 5), Tree((0, *range(len(path) - 1)), path)).logits[-1]
            assert np.abs(alone - tree_logits[node]).max() < 1e-12
        # A scan in row order would give node 2 the state behind node 1.
        scanned = evaluator.nodes((2, 5), Tree((0, 0, 1), TREE.token[:3])).logits[2]
        assert np.abs(scanned - tree_logits[2]).max() > 1e-3


def test_a_model_without_attention_is_refused() -> None:
    arch = next(arch for arch in GALLERY if arch.recurrent)
    settings = replace(Qwen3NextSettings.of(arch), attention_every=3)
    with pytest.raises(Malformed, match="no layer has attention"):
        replace(arch, settings=settings)


def test_adapters_of_generate_decline_hybrids_by_name() -> None:
    """transformers' `generate` crops keys and values, and refuses to speculate where a state would stay behind."""
    for family in HYBRID:
        arch = next(arch for arch in GALLERY if arch.family == family)
        for open_adapter in (open_assisted, open_lookup, open_early_exit):
            assert open_adapter().declaration.not_loaded(arch) == f"model family {family}"
