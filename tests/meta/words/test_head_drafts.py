"""Heads and drafts of blocks: the engine within 1e-9 of the oracle in float64, words, files, and refusals."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from specverify.backends.base import Unsupported
from specverify.backends.engine.draft import OPENERS, Opening
from specverify.backends.engine.draft.head import HeadDraft
from specverify.backends.registry import open_backend
from specverify.properties.invariants import ALL
from specverify.properties.strategies.acceptance import continuation
from specverify.properties.strategies.draft.drawing import DRAWN, DraftSetting
from specverify.properties.strategies.models import GALLERY, targets
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Architecture, Checkpoint, Seeded
from specverify.reference.case import Case
from specverify.reference.case_json import case_from_json, case_to_json
from specverify.reference.draft import Ngram
from specverify.reference.draft.block import Block
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft.head import Head
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.draft.medusa import Medusa
from specverify.reference.draft.mtp import Mtp
from specverify.reference.draft.peagle import PEagle
from specverify.reference.layout import KINDS, KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.model import PathByPath
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Array, Trace
from specverify.reference.tree import RankTree, Tree
from specverify.reference.weights import seeded_head, seeded_weights
from specverify.setup.subjects import subject_of
from tests.models import LLAMA
from tests.tiers import first

CLOSE = 1e-9
"""The largest difference of scores, relative to the larger of 1 and the largest score."""

TREE = RankTree((0, 0, 0, 1, 1, 3), (0, 0, 1, 0, 1, 0))
LAYER = HeadLayer(2, 1, 4, 12)
NORMED, FUSED = HiddenStates(place="normed", shift=1), HiddenStates((-1, 0, 1), shift=1)
ALONE = HiddenStates((-1, 0, 1))
FEW = (1, 2, 5, 11, 16)
HEADS: dict[str, Head] = {
    "eagle1": Eagle1(TREE, NORMED, LAYER),
    "eagle1 without bias": Eagle1(TREE, HiddenStates((0,), shift=1), LAYER, bias=False),
    "eagle3": Eagle3(TREE, FUSED, LAYER),
    "eagle3 reduced": Eagle3(TREE, FUSED, LAYER, vocabulary=(1, 2, 5, 11, 16)),
    "eagle3 norm_before_residual": Eagle3(TREE, FUSED, LAYER, norm_before_residual=True),
    "eagle3 norm_output": Eagle3(TREE, FUSED, LAYER, norm_output=True),
    "eagle3 of three layers": Eagle3(TREE, FUSED, LAYER, vocabulary=(1, 2, 5, 11, 16), layers=3),
    "peagle": PEagle(TREE, FUSED, LAYER, (1, 2, 5, 11, 16), layers=2, mask_slots=3, mask_token=9),
    "medusa": Medusa(TREE, HiddenStates(place="normed"), 3),
    "medusa with the target's head": Medusa(TREE, HiddenStates((0,)), 4, bias=False, shared_head=True),
    "mtp": Mtp(TREE, NORMED, LAYER, 2, zero_first=True),
    "mtp of three modules": Mtp(TREE, NORMED, LAYER, 3, normed_back=True, state_first=True),
    "block": Block(TREE, ALONE, LAYER, 4, 16, layers=2),
    "block with windows": Block(TREE, ALONE, LAYER, 5, 3, layers=2, windows=(2, 0), causal="windowed", vocabulary=FEW),
    "block with windows that look ahead": Block(TREE, ALONE, LAYER, 5, 3, layers=2, windows=(2, 3)),
    "block from the anchor": Block(TREE, ALONE, LAYER, 3, 16, causal="all", from_anchor=True, markov_rank=3),
    "block with a gate": Block(TREE, ALONE, LAYER, 4, 16, vocabulary=FEW, markov_rank=3, markov="gated"),
    "block with a state": Block(TREE, ALONE, LAYER, 4, 16, from_anchor=True, markov_rank=3, markov="rnn"),
}
CASES = {name: Case(LLAMA, (3, 1, 4, 1, 5), head, stops=Stops(6), dtype="float64") for name, head in HEADS.items()}
ORACLE = Oracle()
DRAFTS = tuple(
    invariant
    for invariant in ALL
    if invariant.name.startswith(("draft.", "lossless.completes", "lossless.greedy-match"))
)


def findings_of(case: Case) -> list[str]:
    verdict = judge(case, DRAFTS, ORACLE, subject_of(open_backend("cpu-eager")))
    assert verdict.unsupported is None, verdict.unsupported
    for name in ("draft.fidelity", "draft.hidden-state-descriptor"):
        assert verdict.outcomes[name] in ("checked", "failed")
    return [f"{finding.invariant} {finding.where}" for finding in verdict.findings]


def rows_of(trace: Trace) -> Iterator[tuple[Tree, Array]]:
    """Each drafted tree with its scores; a bare root without a row has none."""
    for step in trace.steps:
        if step.drafted is not None and step.drafted.logits is not None:
            yield step.drafted.tree, step.drafted.logits


def compare_trees(case: Case, trace: Trace) -> int:
    """The number of trees of a run whose tokens are the oracle's and whose scores lie within CLOSE of its scores."""
    count = 0
    for (tree, scores), (true, true_scores) in zip(rows_of(trace), rows_of(ORACLE(case)), strict=True):
        assert tree == true
        np.testing.assert_array_equal(np.isnan(scores), np.isnan(true_scores))
        largest = max(1.0, float(np.nanmax(np.abs(true_scores))))
        assert float(np.nanmax(np.abs(scores - true_scores))) <= CLOSE * largest
        count += 1
    return count


@st.composite
def head_cases(draw: st.DrawFn, kind: str) -> Case:
    model = draw(targets())
    prompt = tuple(draw(st.lists(st.integers(0, model.vocab_size - 1), min_size=2, max_size=9)))
    draft = draw(DRAWN[kind](DraftSetting(model, prompt, continuation(model, prompt))))
    layout = draw(st.sampled_from(sorted(set(KINDS) - {"overwrite"})))
    size = draw(st.sampled_from((1, 2, 4))) if KINDS[layout].pages else KvLayout().page_size
    kv_layout = KvLayout(kind=layout, prefill_chunk=draw(st.sampled_from((0, 1, 2, 3))), page_size=size)
    return Case(model, prompt, draft, kv_layout, stops=Stops(5), dtype="float64")


@pytest.mark.parametrize(
    "kind",
    # Each takes about eight seconds; `-m slow` runs all six.
    first(["mtp", "eagle1", "eagle3", "medusa", "block", "peagle"], 1),
)
def test_two_hundred_drawn_trees_are_the_oracles(kind: str) -> None:
    backend, trees, cases = open_backend("cpu-eager"), 0, 0

    @seed(18)
    @settings(
        max_examples=90, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
    )
    @given(head_cases(kind))
    def run(case: Case) -> None:
        nonlocal trees, cases
        # Ties of scores would be named by rounding: a tree that differs by one is no error, and none is drawn here.
        if trees < 200:
            trees, cases = trees + compare_trees(case, backend.run(case)), cases + 1

    run()
    assert trees >= 200
    assert cases >= 40


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_saved_loaded_and_judged(name: str) -> None:
    case = CASES[name]
    assert case_from_json(case_to_json(case)) == case
    assert findings_of(case) == []


@pytest.mark.parametrize("name", ["eagle1", "eagle3 reduced", "medusa", "mtp", "block with a state"])
@pytest.mark.parametrize("draws", ["top-k", "without-replacement", "with-replacement"])
def test_a_head_whose_tokens_are_sampled(name: str, draws: str) -> None:
    assert findings_of(replace(CASES[name], sampling=Sampling(temperature=1.0, draws=draws))) == []


@pytest.mark.parametrize(
    "name",
    [
        "eagle1",
        "eagle3 reduced",
        "eagle3 of three layers",
        "peagle",
        "medusa",
        "mtp",
        "block",
        "block with windows",
    ],
)
def test_in_a_session_with_forks_evictions_and_preemptions(name: str) -> None:
    actions = (
        Action("add", (0,)), Action("add", (1,)), Action("step", (0, 1)), Action("evict", (1,)), Action("step", (0,)),
        Action("restore", (1,)), Action("preempt", (0,)), Action("fork", (0, 2)), Action("step", (0, 1, 2)),
        Action("step", (0, 1, 2)),
    )  # fmt: skip
    head = HEADS[name]
    mates = (Mate((3, 1, 4, 2), head, stops=Stops(4)), Mate((7,), head, stops=Stops(4)))
    layout = KvLayout(kind="prefix", page_size=2)
    assert findings_of(replace(CASES[name], layout=layout, session=Session(mates, actions))) == []


def test_a_request_that_leaves_its_head_goes_on_without_states() -> None:
    ngram = Ngram(RankTree((0, 0), (0, 0)))
    steps = (Action("step", (0,)),) * 3
    actions = (Action("add", (0,)), Action("step", (0,)), Action("switch", (0,), ngram), *steps)
    case = replace(CASES["eagle1"], session=Session((), actions))
    trace = open_backend("cpu-eager").run(case)
    assert [step.scored is not None and step.scored.hidden is not None for step in trace.steps] == [True] + [False] * 3
    verdict = judge(case, ALL, ORACLE, subject_of(open_backend("cpu-eager")))
    assert verdict.unsupported is None
    assert not verdict.findings
    assert verdict.outcomes["draft.switched"] == "checked"


def scratch(case: Case) -> Array:
    """Scores of the root by formulas of this test's own: all rows at once under a triangular mask."""
    assert isinstance(case.model, Seeded)
    assert isinstance(case.draft, Eagle1)
    w, target = seeded_head(case.draft, case.model), seeded_weights(case.model)
    states = PathByPath(ORACLE.model(case.model, "float64").parameters).states(case.prompt[:-1])[-1]
    x = np.concatenate([target["model.embed_tokens.weight"][list(case.prompt[1:])], states], 1) @ w["fc.weight"].T
    x = x + w["fc.bias"]
    rows, half = len(x), LAYER.head_dim // 2
    angle = np.arange(rows)[:, None] * LAYER.theta ** (-np.arange(half) / half)
    turn = np.exp(1j * angle)

    def heads(name: str, count: int) -> Array:
        y: Array = (x @ w[f"layers.0.self_attn.{name}_proj.weight"].T).reshape(rows, count, -1)
        if name == "v":
            return y
        z = (y[..., :half] + 1j * y[..., half:]) * turn[:, None]
        return np.concatenate([z.real, z.imag], -1)

    q, k, v = heads("q", 2), heads("k", 1).repeat(2, 1), heads("v", 1).repeat(2, 1)
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(LAYER.head_dim)
    scores = np.where(np.tri(rows, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.einsum("hij,jhd->ihd", weights, v).reshape(rows, -1)
    r = x + mixed @ w["layers.0.self_attn.o_proj.weight"].T
    y = r / np.sqrt((r * r).mean(-1, keepdims=True) + LAYER.norm_eps) * w["layers.0.post_attention_layernorm.weight"]
    gate, up = (y @ w[f"layers.0.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    out = r + (gate / (1 + np.exp(-gate)) * up) @ w["layers.0.mlp.down_proj.weight"].T
    logits: Array = out[-1] @ target["lm_head.weight"].T
    return logits


def test_the_oracles_formulas_are_derived_twice() -> None:
    drafted = ORACLE(CASES["eagle1"]).steps[0].drafted
    assert drafted is not None
    assert drafted.logits is not None
    np.testing.assert_allclose(drafted.logits[0], scratch(CASES["eagle1"]), rtol=0, atol=1e-12)


def test_the_shared_oracle_reads_the_naive_oracles_states() -> None:
    case = CASES["eagle3"]
    plain, shared = Oracle(PathByPath)(case), ORACLE(case)
    for plain_step, shared_step in zip(plain.steps, shared.steps, strict=True):
        assert plain_step.scored is not None
        assert shared_step.scored is not None
        assert plain_step.scored.hidden is not None
        assert shared_step.scored.hidden is not None
        np.testing.assert_allclose(plain_step.scored.hidden, shared_step.scored.hidden, atol=1e-12)


def test_offsets_and_mask_of_a_reduced_vocabulary_are_those_of_published_files() -> None:
    head = HEADS["eagle3 reduced"]
    weights = seeded_head(head, LLAMA)
    assert (np.arange(len(weights["d2t"])) + weights["d2t"]).tolist() == list(head.vocabulary)
    assert np.flatnonzero(weights["t2d"]).tolist() == list(head.vocabulary)
    assert set(seeded_head(HEADS["eagle3"], LLAMA)) == set(HEADS["eagle3"].tensors(GALLERY[1]))


def test_what_does_not_fit_is_refused_with_both_named() -> None:
    head = HEADS["eagle1"]
    with pytest.raises(Malformed, match=r"reads.*EAGLE-1 weights expect one hidden state, and the case gives the r"):
        replace(CASES["eagle1"], draft=replace(head, reads=FUSED))
    with pytest.raises(Malformed, match=r"reads\.shift.*the shift is 1 in EAGLE-1"):
        replace(head, reads=HiddenStates(place="normed"))
    with pytest.raises(Malformed, match=r"neither 0 .* nor 1"):
        HiddenStates(place="normed", shift=2)
    with pytest.raises(Malformed, match="target has layers 0 to 1"):
        replace(CASES["eagle3"], draft=replace(HEADS["eagle3"], reads=HiddenStates((0, 1, 2), shift=1)))
    with pytest.raises(Malformed, match="built-in target, not for a checkpoint"):
        replace(CASES["eagle1"], model=Checkpoint("x", "sha256:0", 17, 64))
    with pytest.raises(Malformed, match="rank 1 needs more than the 1 tokens"):
        replace(CASES["eagle3"], draft=Eagle3(TREE, FUSED, LAYER, vocabulary=(3,)))
    with pytest.raises(Malformed, match="3 heads do not share"):
        HeadLayer(3, 2, 4, 8)


def test_a_head_whose_weights_read_other_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = OPENERS["eagle1"]

    def other_opener(opening: Opening) -> HeadDraft:
        draft = right(opening)
        assert isinstance(draft, HeadDraft)
        draft.reads = HiddenStates((0,), shift=1)
        return draft

    monkeypatch.setitem(OPENERS, "eagle1", other_opener)
    with pytest.raises(Unsupported, match=r"reads residual stream after layer 0 beside .*gives it output of the last"):
        open_backend("cpu-eager").run(CASES["eagle1"])


def test_the_invariant_finds_a_missing_row_a_wrong_descriptor_a_wrong_token_and_a_wrong_state() -> None:
    backend = open_backend("cpu-eager")
    subject = subject_of(backend)
    trace = backend.run(CASES["eagle1"])
    drafted = trace.steps[1].drafted
    assert drafted is not None
    assert drafted.given is not None
    draft_inputs = drafted.given
    for wrong in (
        replace(
            draft_inputs, first=draft_inputs.first + 1, tokens=draft_inputs.tokens[1:], hidden=draft_inputs.hidden[1:]
        ),
        replace(draft_inputs, reads=HiddenStates((0,), shift=1)),
        replace(draft_inputs, tokens=tuple((token + 1) % 17 for token in draft_inputs.tokens)),
        replace(draft_inputs, hidden=draft_inputs.hidden + 0.01),
    ):
        steps = (trace.steps[0], replace(trace.steps[1], drafted=replace(drafted, given=wrong)), *trace.steps[2:])
        subject.remember(CASES["eagle1"], replace(trace, steps=steps))
        verdict = judge(CASES["eagle1"], DRAFTS, ORACLE, subject)
        assert [finding.invariant for finding in verdict.findings] == ["draft.hidden-state-descriptor"]


def test_a_target_without_states_scores_the_bare_root() -> None:
    case = replace(CASES["eagle3"], prompt=(3,))
    trace = open_backend("cpu-eager").run(case)
    first = trace.steps[0].drafted
    assert first is not None
    assert len(first.tree) == 1
    assert findings_of(case) == []


@pytest.mark.slow
def test_every_architecture_of_the_gallery_has_heads() -> None:
    def narrowest(arch: Architecture) -> Case:
        places = HiddenStates(tuple(range(-1, min(arch.layers, 2))), shift=1)
        chain = RankTree((0, 0, 1), (0, 0, 0))
        return Case(Seeded(arch, 0), (1, 0, 1), Eagle3(chain, places, LAYER), stops=Stops(3), dtype="float64")

    backend = open_backend("cpu-eager")
    for arch in GALLERY:
        case = narrowest(arch)
        assert compare_trees(case, backend.run(case))
