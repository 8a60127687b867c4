"""Chunked attention with layers without rotary embedding: words, temperature, and trees cut at a chunk's end."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from specverify.backends.base import Unsupported
from specverify.backends.compositions import open_cpu
from specverify.backends.engine.draft.base import inside_chunk
from specverify.backends.engine.model.built_in import config_of
from specverify.backends.engine.model.family.llama4 import Temperature
from specverify.backends.engine.reach import Reach, reaches_of
from specverify.properties.invariants import ALL
from specverify.properties.strategies.models import GALLERY
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.case_json import case_from_json, case_to_json
from specverify.reference.draft import Draft, LanguageModel, Ngram, Scripted
from specverify.reference.files.json_types import plain
from specverify.reference.layout import KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.formulas.layer import temperature
from specverify.reference.oracle.lowering import cut_to_chunk
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Drafted
from specverify.reference.tree import RankTree, Tree
from specverify.setup.subjects import subject_of
from tests.tiers import each

CHUNKED = [arch for arch in GALLERY if arch.chunks]
ARCH = Architecture(
    "llama4", 11, 12, 16, 2, 1, 4, (0, 0), qk_norm=True, chunks=(4, 0), unrotated=(1,), floor_scale=3, attn_scale=0.5
)
SHAPE = RankTree((0, 0, 0, 1, 3, 2, 4), (0, 0, 1, 0, 0, 0, 0))
"""Two branches, the first of depth 4."""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"chunks": (4,)}, "chunks: 1 entries for 2 layers"),
        ({"chunks": (4, -1)}, "chunks: a chunk is a number"),
        ({"chunks": (0, 0)}, "chunks: no layer has a chunk"),
        ({"windows": (3, 0)}, r"chunks\[0\]: a layer has a window or a chunk"),
        ({"unrotated": (2,)}, r"unrotated: layers 0\.\.1 in ascending order"),
        ({"unrotated": (1, 0)}, "unrotated: "),
        ({"unrotated": (1, 1)}, "unrotated: "),
        ({"unrotated": ()}, "floor_scale: scales the queries of unrotated layers"),
        ({"floor_scale": -1}, "floor_scale: -1 is negative"),
        ({"attn_scale": 0.0}, "attn_scale: "),
        ({"attn_scale": float("nan")}, "attn_scale: "),
    ],
)
def test_nonsense_is_refused_by_its_field(change: dict[str, Any], words: str) -> None:
    with pytest.raises(Malformed, match=words):
        replace(ARCH, **change)


def test_files_of_other_models_do_not_know_the_new_fields() -> None:
    content = plain(Case(Seeded(GALLERY[5], 0), (1, 2)))
    assert not {"chunks", "unrotated", "floor_scale", "attn_scale"} & set(content["model"]["architecture"])
    assert "stay_in_chunk" not in content["layout"]


@pytest.mark.parametrize("arch", [ARCH, *CHUNKED])
def test_a_file_holds_all_of_it(arch: Architecture) -> None:
    case = Case(Seeded(arch, 3), (1, 2), layout=KvLayout(stay_in_chunk=True))
    assert case_from_json(case_to_json(case)) == case


@pytest.mark.parametrize(
    ("arch", "words"),
    [
        (replace(ARCH, family="llama", qk_norm=False), "llama with chunks or layers without rotary"),
        (replace(ARCH, chunks=(4, 8)), "llama4 needs equal chunks in all layers that have one"),
        (replace(ARCH, chunks=(), windows=(3, 3)), "llama4 with a sliding window"),
    ],
)
def test_what_transformers_lacks_is_unsupported(arch: Architecture, words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        config_of(arch)


def test_reaches_are_read_off_the_config() -> None:
    assert reaches_of(config_of(ARCH)) == [Reach(chunk=4), Reach()]
    assert reaches_of(config_of(GALLERY[5])) == [Reach(window=5)] * 2
    odd = config_of(ARCH)
    odd.layer_types = ["full_attention", "mamba"]
    with pytest.raises(Unsupported, match="layers of kind mamba"):
        reaches_of(odd)


def test_the_temperature_is_that_of_the_position() -> None:
    """By hand: floor 3 leaves positions 0 and 1 alone, then goes up every third one."""
    positions = np.array([0, 1, 2, 4, 5, 8, 2])
    expected = 1 + 0.5 * np.log([1, 1, 2, 2, 3, 4, 2])
    np.testing.assert_allclose(temperature(ARCH, 1, positions), expected, rtol=1e-15)
    assert (temperature(ARCH, 0, positions) == 1).all()
    query = torch.ones(1, 2, len(positions), 4, dtype=torch.float64)
    scaled = Temperature(3, 0.5)(query, torch.tensor(positions)[None])
    np.testing.assert_allclose(scaled[0, 1, :, 2].numpy(), expected, rtol=1e-15)


def test_both_cuts_keep_the_nodes_of_the_roots_chunk() -> None:
    """Every tree of up to 5 nodes, every chunk and position, against a walk from token to token."""
    for nodes in range(1, 6):
        for ups in product(*(range(node) for node in range(1, nodes))):
            tree = Tree((0, *ups), tuple(range(nodes)))
            for chunk, position in product((1, 2, 3, 4), (0, 1, 2, 5, 7, 11)):
                kept_nodes = [node for node in range(nodes) if not _crosses(len(tree.path(node)) - 1, position, chunk)]
                reaches = [Reach(), Reach(chunk=chunk), Reach(window=1), Reach(chunk=9)]
                assert inside_chunk(tree, position, reaches) == kept_nodes
                arch = replace(ARCH, windows=(0, 0), chunks=(chunk, 9))
                cut = cut_to_chunk(Drafted(tree, draft_ids=tree.token), position, arch)
                assert cut.tree.token == tuple(kept_nodes) == cut.draft_ids
                assert [kept_nodes[up] for up in cut.tree.parent] == [tree.parent[node] for node in kept_nodes]


def _crosses(steps: int, position: int, chunk: int) -> bool:
    """Whether any of `steps` steps from `position` lands on the first token of a chunk."""
    return any((position + step) % chunk == 0 for step in range(1, steps + 1))


DRAFTS: list[Draft] = [
    Scripted((Tree(SHAPE.parent, (3, 1, 2, 4, 5, 6, 0)),) * 2),
    Ngram(SHAPE, 2),
    LanguageModel(Seeded(ARCH, 1), SHAPE),
]
LAYOUTS = [
    KvLayout(),
    KvLayout(stay_in_chunk=True),
    KvLayout(stay_in_chunk=True, padded_nodes=9, prefill_chunk=3),
    KvLayout(kind="sliding", poison="nan"),
    KvLayout(kind="sliding", stay_in_chunk=True, prefill_chunk=5),
    KvLayout(kind="paged", page_size=3),
]


@pytest.mark.parametrize(("layout", "draft"), each(product(LAYOUTS, DRAFTS), 2))
def test_the_engine_equals_the_oracle_around_a_chunks_end(draft: Draft, layout: KvLayout) -> None:
    """Trees begin at every place of a chunk of 4, greedy and sampled."""
    backend, oracle = open_cpu(), Oracle()
    cut = 0
    for length, heat in product((1, 2, 3, 4), (0.0, 1.0)):
        prompt = (*(1, 4, 3) * 3, 3)[-length:]
        sampling = Sampling(heat, draws="without-replacement")
        case = Case(Seeded(ARCH, 0), prompt, draft, layout, sampling, Stops(6), "float64")
        trace, true = backend.run(case), oracle(case)
        assert trace.output == true.output
        for step, true_step in zip(trace.steps, true.steps, strict=True):
            assert step.drafted is not None
            assert true_step.drafted is not None
            assert step.scored is not None
            assert true_step.scored is not None
            assert step.drafted.tree == true_step.drafted.tree
            ends = (len(step.context) + true_step.drafted.tree.height) // 4
            crosses = ends != len(step.context) // 4
            cut += len(true_step.drafted.tree) < len(SHAPE)
            assert not (crosses and layout.stay_in_chunk)
            np.testing.assert_allclose(step.scored.logits, true_step.scored.logits, rtol=0, atol=1e-9)
            assert step.accepted == true_step.accepted
    assert cut or not layout.stay_in_chunk


@pytest.mark.parametrize("draws", ["without-replacement", "with-replacement"])
def test_coins_of_a_cut_tree_keep_the_places_of_the_whole(draws: str) -> None:
    """A cut renumbers nodes; the coins that drew them were those of the draft's own shape."""
    model = Seeded(next(arch for arch in CHUNKED if arch.chunks == (8, 8)), 0)
    shape = RankTree((0, 0, 1, 2, 2, 0), (0, 2, 0, 0, 1, 1))
    case = Case(
        model,
        (1, 6, 4, 4, 3, 6),
        LanguageModel(model, shape),
        KvLayout(stay_in_chunk=True),
        Sampling(8.0, draws=draws),
        Stops(1),
    )
    subject = subject_of(open_cpu())
    drafted = subject(case).steps[0].drafted
    assert drafted is not None
    assert len(drafted.tree) == 4
    invariants = [
        invariant
        for invariant in ALL
        if invariant.name in ("acceptance.proposal-consistent", "acceptance.sampled-walk")
    ]
    verdict = judge(case, invariants, Oracle(), subject)
    assert (verdict.findings, set(verdict.outcomes.values())) == ((), {"checked"})
