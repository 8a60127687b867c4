"""Drafts of blocks: one law for each depth, trees by marginals, formulas derived twice, known pages, refusals."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from specverify.backends.engine.draft.block import BlockHead
from specverify.backends.registry import open_backend
from specverify.properties.invariants import ALL
from specverify.properties.shrinking.cases import nearer, size
from specverify.properties.verdict.judge import judge
from specverify.reference.case import Case
from specverify.reference.draft.block import Block
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.draft_trees import Expansion, Stopped
from specverify.reference.layout import PAGE_STATES, KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.draft.level_by_level import log_law
from specverify.reference.oracle.model import PathByPath
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Array, Drafted
from specverify.reference.tree import RankTree
from specverify.reference.weights import seeded_head, seeded_weights
from specverify.setup.subjects import subject_of
from tests.meta.engine.test_head_pages import GREEDY, LONGER, findings, inputs
from tests.models import LLAMA

LAYER = HeadLayer(2, 1, 4, 12)
STATES = HiddenStates((-1, 0, 1))
TREE = RankTree((0, 0, 0, 1, 1, 3), (0, 0, 1, 0, 1, 0))
NEAR = Block(TREE, STATES, LAYER, 4, 16, vocabulary=tuple(sorted({*GREEDY[:4], 16})), layers=2)
"""A draft that names few tokens, of which the target takes some."""

CASE = Case(LLAMA, (3, 1, 4, 1, 5), NEAR, stops=Stops(6), dtype="float64")
ORACLE = Oracle()


def block_of(case: Case) -> Block:
    assert isinstance(case.draft, Block)
    return case.draft


def first_draft(case: Case) -> Drafted:
    drafted = ORACLE(case).steps[0].drafted
    assert drafted is not None
    return drafted


def scratch(case: Case) -> Array:
    """The scores of every slot by formulas of this test's own."""
    every_slot: Array = outputs_from_scratch(case) @ seeded_head(block_of(case), LLAMA)["lm_head.weight"].T
    return every_slot


def outputs_from_scratch(case: Case) -> Array:
    """The normed outputs of every slot by formulas of this test's own: all rows at once, under a mask."""
    draft = block_of(case)
    w, target = seeded_head(draft, LLAMA), seeded_weights(LLAMA)
    states = PathByPath(ORACLE.model(LLAMA, "float64").parameters).states(case.prompt[:-1])
    wide = np.concatenate(list(states[:3]), axis=-1)  # embeddings and the outputs of both layers

    def norm(x: Array, name: str) -> Array:
        normed: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + LAYER.norm_eps) * w[f"{name}.weight"]
        return normed

    context = norm(wide @ w["fc.weight"].T, "hidden_norm")
    x = target["model.embed_tokens.weight"][[case.prompt[-1]] + [draft.mask_token] * (draft.slots - 1)]
    count, half = len(context), LAYER.head_dim // 2
    rows = np.arange(count + draft.slots)
    turn = np.exp(1j * rows[:, None] * LAYER.theta ** (-np.arange(half) / half))
    for number in range(draft.layers):
        name = f"layers.{number}"
        inputs_of_layer = np.concatenate([context, norm(x, f"{name}.input_layernorm")])
        heads = {
            part: (inputs_of_layer @ w[f"{name}.self_attn.{part}_proj.weight"].T).reshape(len(rows), -1, 4)
            for part in "qkv"
        }
        for part in "qk":
            y = norm(heads[part], f"{name}.self_attn.{part}_norm")
            z = (y[..., :half] + 1j * y[..., half:]) * turn[:, None]
            heads[part] = np.concatenate([z.real, z.imag], -1)
        away = rows[count:, None] - rows
        visible = away >= 0 if draft.is_causal(number) else away == away
        if draft.window(number):
            visible = visible & (np.abs(away) < draft.window(number))
        scores = np.einsum("ihd,jhd->hij", heads["q"][count:], heads["k"].repeat(2, 1)) / 2
        weights = np.exp(np.where(visible, scores, -np.inf))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hij,jhd->ihd", weights, heads["v"].repeat(2, 1)).reshape(draft.slots, -1)
        x = x + mixed @ w[f"{name}.self_attn.o_proj.weight"].T
        y = norm(x, f"{name}.post_attention_layernorm")
        gate, up = (y @ w[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{name}.mlp.down_proj.weight"].T
    return norm(x, "norm")


SWITCHES = {
    "plain": NEAR,
    "causal": replace(NEAR, causal="all"),
    "windows": replace(NEAR, windows=(2, 3), causal="windowed"),
    "windows that look ahead": replace(NEAR, windows=(2, 3)),
    "from the anchor": replace(NEAR, from_anchor=True),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_the_oracles_formulas_are_derived_twice(name: str) -> None:
    case = replace(CASE, draft=SWITCHES[name])
    drafted, every_slot = first_draft(case), scratch(case)
    assert drafted.logits is not None
    for node in (0, 1, 3):  # the inner nodes
        slot = block_of(case).slot_of(TREE.depth[node])
        np.testing.assert_allclose(drafted.logits[node], every_slot[slot], rtol=0, atol=1e-12)


def test_nodes_of_one_depth_share_a_law_and_a_markov_head_tells_them_apart() -> None:
    tree = RankTree((0, 0, 0, 1, 2), (0, 0, 1, 0, 0))
    plain = first_draft(replace(CASE, draft=replace(NEAR, shape=tree)))
    biased = first_draft(replace(CASE, draft=replace(NEAR, shape=tree, markov_rank=3)))
    assert plain.logits is not None
    assert biased.logits is not None
    np.testing.assert_array_equal(plain.logits[1], plain.logits[2])
    assert np.abs(biased.logits[1] - biased.logits[2]).max() > 0.01


@pytest.mark.parametrize("nodes", [3, 6, 8])
def test_the_best_first_tree_of_marginals_is_a_dynamic_one(nodes: int) -> None:
    """With as many candidates of each node as nodes below the root, a dynamic tree holds the likeliest paths of all."""
    wide = replace(NEAR, vocabulary=(1, 2, 5, 7, 9, 11, 13, 16))
    drafted = first_draft(replace(CASE, draft=replace(wide, shape=Expansion(nodes - 1, 3, nodes))))
    every_slot = scratch(replace(CASE, draft=wide))
    laws = [log_law(every_slot[slot]) for slot in (1, 2, 3)]
    worth = {
        path: sum(law[draft_id] for law, draft_id in zip(laws, path, strict=False))
        for depth in (1, 2, 3)
        for path in product(range(8), repeat=depth)
    }
    best = sorted(worth, key=lambda path: -worth[path])[: nodes - 1]
    tokens = {tuple(wide.vocabulary[draft_id] for draft_id in path) for path in best}
    assert {drafted.tree.tokens_to(node)[1:] for node in range(1, nodes)} == tokens


@pytest.mark.parametrize("page_states", PAGE_STATES)
def test_the_context_goes_on_behind_known_pages(page_states: str) -> None:
    actions = tuple(
        Action(kind, (request,))
        for kind, request in (("add", 0), ("step", 0), ("step", 0), ("cancel", 0), ("add", 1), ("step", 1), ("step", 1))
    )
    layout = KvLayout(kind="prefix", page_size=2, page_states=page_states)
    session = Session((Mate(LONGER, NEAR, stops=Stops(6)),), actions)
    case = replace(CASE, layout=layout, session=session, stops=Stops(10))
    first = inputs(open_backend("cpu-eager").run(case), 1)[0]
    # A column follows from the tokens up to its own, so that whole pages are taken, with their states or without.
    assert first.first == first.adopted > 0
    assert first.adopted % 2 == 0
    assert np.isfinite(first.hidden).all()
    assert findings(case) == []
    assert any("draft.fidelity" in finding for finding in findings(case, "block-context-missing-behind-hit"))


def test_tokens_are_accepted_and_the_backends_agree() -> None:
    case = replace(CASE, sampling=Sampling(temperature=1.0))
    for backend in ("cpu-eager", "cpu-fused", "cpu-split"):
        trace = open_backend(backend).run(case)
        assert trace.output == ORACLE(case).output
    accounting = open_backend("cpu-eager").run(CASE).accounting
    assert accounting is not None
    assert accounting.accepted > 0


@pytest.mark.parametrize("confidence", ["state", "markov"])
@pytest.mark.parametrize("from_anchor", [False, True])
def test_a_confidence_head_ends_paths_where_its_formula_does(confidence: str, from_anchor: bool) -> None:
    """The product of sigmoids along a path, by this test's own formula; the law of the block plays no part."""
    wide = replace(NEAR, markov_rank=3, confidence=confidence, from_anchor=from_anchor, layers=1, causal="all")
    plain = first_draft(replace(CASE, draft=wide))
    assert plain.confidence is not None
    w = seeded_head(wide, LLAMA)
    w_slot, bias = w["confidence_head.proj.weight"][0], w["confidence_head.proj.bias"][0]
    outputs = outputs_from_scratch(replace(CASE, draft=wide))
    survival = {0: 1.0}
    for node in range(len(TREE)):
        if not TREE.children[node]:
            continue
        read = outputs[wide.slot_of(TREE.depth[node])]
        if confidence == "markov":
            read = np.concatenate([read, w["markov_head.markov_w1.weight"][plain.tree.token[node]]])
        surely = 1 / (1 + np.exp(-(read @ w_slot + bias)))
        assert np.exp(plain.confidence[node]) == pytest.approx(surely, abs=1e-9)
        survival |= dict.fromkeys(TREE.children[node], survival[node] * surely)
    for bound in (0.1, 0.3, 0.6):
        stop = Stopped(TREE, bound, "head", cumulated=True)
        ended = first_draft(replace(CASE, draft=replace(wide, shape=stop)))
        expected = {plain.tree.tokens_to(node) for node, product_ in survival.items() if not node or product_ >= bound}
        assert {ended.tree.tokens_to(node) for node in range(len(ended.tree))} == expected


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, draws="with-replacement", seed=3)], ids=["", "drawn"])
def test_a_block_that_its_confidence_head_ends_is_right(sampling: Sampling) -> None:
    stop = Stopped(TREE, 0.3, "head", cumulated=True)
    draft = replace(NEAR, shape=stop, markov_rank=3, confidence="markov")
    case = replace(CASE, draft=draft, sampling=sampling)
    assert findings(case) == []
    assert len({len(step.drafted.tree) for step in open_backend("cpu-eager").run(case).steps if step.drafted}) > 1


@pytest.mark.parametrize("shape", [TREE, Stopped(TREE, 0.01, "head")], ids=["static", "stopped"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, draws="with-replacement", seed=3)], ids=["", "drawn"])
def test_a_wrong_confidence_that_ends_no_path_is_found(
    shape: RankTree | Stopped, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = replace(NEAR, shape=shape, markov_rank=3, confidence="markov")
    case = replace(CASE, draft=draft, sampling=sampling)
    assert findings(case) == []
    right = BlockHead.confidence
    monkeypatch.setattr(BlockHead, "confidence", lambda *arguments: right(*arguments) - 0.01)
    finding = judge(case, ALL, Oracle(), subject_of(open_backend("cpu-eager"))).first
    assert finding is not None
    assert (finding.invariant, finding.where["side"]) == ("draft.fidelity", "confidence")
    assert float(finding.expected) - float(finding.observed) == pytest.approx(0.01, abs=1e-3)


def test_what_makes_no_sense_is_refused() -> None:
    chain = RankTree((0, 0, 1, 2, 3), (0,) * 5)
    with pytest.raises(Malformed, match="a tree of depth 4, and a block of 4 slots reaches 3 levels"):
        replace(NEAR, shape=chain)
    assert replace(NEAR, shape=chain, from_anchor=True).levels == 4
    with pytest.raises(Malformed, match="a tree of depth 4"):
        replace(NEAR, shape=Expansion(2, 4, 6))
    with pytest.raises(Malformed, match="a block of the root alone scores no token"):
        replace(NEAR, shape=RankTree((0,), (0,)), slots=1)
    with pytest.raises(Malformed, match="1 windows for 2 layers"):
        replace(NEAR, windows=(3,))
    with pytest.raises(Malformed, match="windowed, and no layer has a window"):
        replace(NEAR, causal="windowed")
    with pytest.raises(Malformed, match="leave out zeros alone"):
        replace(NEAR, windows=(0, 0))
    with pytest.raises(Malformed, match="confidence: markov, and there is no Markov head"):
        replace(NEAR, confidence="markov")
    with pytest.raises(Malformed, match=r"shape\.when: head, and the draft has no confidence head"):
        replace(NEAR, shape=Stopped(TREE, 0.3, "head"))
    with pytest.raises(Malformed, match="gated, and there is no Markov head"):
        replace(NEAR, markov="gated")
    with pytest.raises(Malformed, match=r"reads\.shift.*the shift is 0 in block"):
        replace(NEAR, reads=HiddenStates((0,), shift=1))
    with pytest.raises(Malformed, match=r"mask_token.*17"):
        replace(CASE, draft=replace(NEAR, mask_token=17))


def test_it_is_made_simpler() -> None:
    rich = replace(
        CASE,
        draft=replace(NEAR, slots=6, windows=(2, 3), causal="all", from_anchor=True, markov_rank=3, markov="rnn"),
    )
    drafts = [block_of(case) for case in nearer(rich) if isinstance(case.draft, Block) and size(case) < size(rich)]
    for name, value in {"slots": 3, "layers": 1, "windows": (), "markov_rank": 0, "causal": "none"}.items():
        assert any(getattr(draft, name) == value for draft in drafts), name
    assert not any(draft.levels < draft.height for draft in drafts)
    rich = replace(rich, draft=replace(NEAR, conv_taps=2, conv_group=4, selector_rank=2, selector_top_k=2))
    drafts = [block_of(case) for case in nearer(rich) if isinstance(case.draft, Block) and size(case) < size(rich)]
    for name in ("conv_taps", "selector_rank"):
        assert any(getattr(draft, name) == 0 for draft in drafts), name
    sure = replace(rich, draft=replace(NEAR, markov_rank=3, confidence="markov"))
    drafts = [block_of(case) for case in nearer(sure) if isinstance(case.draft, Block) and size(case) < size(sure)]
    assert {"", "state"} <= {draft.confidence for draft in drafts}
