"""Drafts on ranks of their own: they do what they do on all ranks, in sessions too, and are refused by name."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from specverify.backends.base import Unsupported
from specverify.backends.compositions import open_cpu
from specverify.backends.engine.collectives import Group
from specverify.backends.engine.ranks.threads import Meeting
from specverify.backends.registry import open_backend
from specverify.properties.invariants import ALL
from specverify.properties.strategies.models import GALLERY
from specverify.properties.strategies.swarm import EVERYTHING
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Draft, LanguageModel, Ngram, Scripted
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.medusa import Medusa
from specverify.reference.draft.mtp import Mtp
from specverify.reference.layout import KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.parallel import PART, SHARDED, draft_refusal
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Trace
from specverify.reference.tree import RankTree, Tree
from specverify.setup.subjects import subject_of
from tests.meta.engine.test_head_pages import HEADS, LAYER, NORMED, PLAIN, PROMPT, TREE
from tests.models import LLAMA

ORACLE = Oracle()
CLEAN = subject_of(open_backend("cpu-eager"))
JUDGING = tuple(
    invariant for invariant in ALL if invariant.name.split(".")[0] in ("cache", "draft", "lossless", "serving")
)
WIDE = replace(LLAMA, architecture=replace(LLAMA.architecture, heads=4, kv_heads=2))
MODEL = LanguageModel(replace(WIDE, seed=9), TREE)
SCRIPTED = Scripted((Tree((0, 0, 0, 1), (5, 1, 2, 4)),))
WHOLE = {"ngram": Ngram(TREE, 2), "medusa": Medusa(TREE, HiddenStates(place="normed"), 3), "scripted": SCRIPTED}
DRAFTS: dict[str, Draft] = {"model": MODEL, **HEADS, **WHOLE}
BASE = replace(PLAIN, model=WIDE, ranks=4)
PLACES = [
    *((name, ranks) for name in DRAFTS for ranks in (1, 2) if ranks == 1 or name not in ("ngram", "medusa")),
    ("model", 4),
]


def same_run(trace: Trace, plain: Trace) -> None:
    """Check that both runs have one output, one tree in each step, and equal laws and draft KV within rounding."""
    assert trace.output == plain.output
    for step, plain_step in zip(trace.steps, plain.steps, strict=True):
        assert step.drafted is not None
        assert plain_step.drafted is not None
        assert step.committed is not None
        assert plain_step.committed is not None
        assert step.drafted.tree == plain_step.drafted.tree
        assert step.accepted == plain_step.accepted
        kv, plain_kv = step.committed.draft, plain_step.committed.draft
        assert (kv is None) == (plain_kv is None)
        pairs = [(step.drafted.logits, plain_step.drafted.logits), (step.drafted.proposal, plain_step.drafted.proposal)]
        if kv is not None and plain_kv is not None:
            pairs += [(kv.keys, plain_kv.keys), (kv.values, plain_kv.values)]
        for array, plain_array in pairs:
            assert (array is None) == (plain_array is None)
            if array is not None and plain_array is not None:
                assert array.shape == plain_array.shape
                assert np.allclose(array, plain_array, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("name", "ranks"), PLACES)
def test_a_draft_on_some_ranks_does_what_it_does_on_all(name: str, ranks: int, temperature: float) -> None:
    draft = DRAFTS[name]
    draws = "with-replacement" if draft.has_law else "top-k"
    case = replace(BASE, draft=draft, sampling=Sampling(temperature, seed=3, draws=draws))
    trace = open_cpu().run(replace(case, draft_ranks=ranks))
    same_run(trace, open_cpu().run(case))
    assert trace.ranks is not None
    drafting = ranks if draft.has_weights else 1
    for rank, run in enumerate(trace.ranks):
        own_calls = [call for call in run.calls if call.startswith(PART)]
        assert bool(own_calls) == (rank < drafting and drafting > 1)
        assert [call for call in run.calls if not call.startswith(PART)] == [
            call for call in trace.ranks[0].calls if not call.startswith(PART)
        ]
    assert any(call.startswith("broadcast") for call in trace.ranks[-1].calls)


KINDS = (
    ("add", (0,)), ("step", (0,)), ("preempt", (0,)), ("fork", (0, 1)), ("step", (0, 1)), ("hand-over", (0,)),
    ("step", (0,)), ("evict", (0,)), ("restore", (0,)), ("step", (0, 1)), ("cancel", (1,)), ("add", (2,)),
    ("step", (0, 2)), ("step", (2,)),
)  # fmt: skip
LAUNCHED = (
    ("add", (0,)), ("add", (2,)), ("launch", (0, 2)), ("launch", (2, 0)), ("resolve", (0,)), ("preempt", (2,)),
    ("launch", (0, 2)), ("evict", (0,)), ("restore", (0,)), ("fork", (0, 1)), ("step", (0, 1, 2)),
)  # fmt: skip
LAYOUTS = {
    "branch": KvLayout(draft_sync="refeed"),
    "sliding": KvLayout(kind="sliding", poison="others"),
    "prefix": KvLayout(kind="prefix", page_size=2, first_tier=2, second_tier=64, poison="nan"),
    "apart": KvLayout(kind="prefix", page_size=2, draft_page_size=3, page_states="recomputed", poison="large"),
}


def session(draft: Draft, layout: KvLayout, kinds: tuple[tuple[str, tuple[int, ...]], ...], ranks: int) -> Case:
    """Three requests with one draft, of which one is a fork and one begins as the first."""
    mates = (Mate((7,), draft, stops=Stops(6)), Mate((*PROMPT, 2), draft, stops=Stops(6)))
    actions = tuple(Action(kind, requests) for kind, requests in kinds)
    case = replace(PLAIN, model=WIDE, draft=draft, layout=layout, session=Session(mates, actions))
    return replace(case, ranks=2, draft_ranks=ranks)


SESSIONS = [
    ("model", "branch", 1), ("model", "prefix", 2), ("model", "apart", 1), ("eagle1", "sliding", 2),
    ("eagle3", "prefix", 1), ("eagle3", "apart", 2), ("mtp", "prefix", 2), ("medusa", "prefix", 1),
    ("ngram", "apart", 1),
]  # fmt: skip


@pytest.mark.parametrize("kinds", [KINDS, LAUNCHED], ids=["steps", "launches"])
@pytest.mark.parametrize(("name", "layout", "ranks"), SESSIONS)
def test_every_action_of_a_session(
    name: str, layout: str, ranks: int, kinds: tuple[tuple[str, tuple[int, ...]], ...]
) -> None:
    case = session(DRAFTS[name], LAYOUTS[layout], kinds, ranks)
    verdict = judge(case, JUDGING, ORACLE, CLEAN)
    assert verdict.unsupported is None
    assert not verdict.findings
    assert verdict.outcomes["lossless.ranks-agree"] == "checked"
    assert verdict.trace is not None
    assert verdict.trace.shared is not None
    plain = open_cpu().run(replace(case, draft_ranks=0))
    assert plain.shared is not None
    for account, plain_account in zip(verdict.trace.shared.accounts, plain.shared.accounts, strict=True):
        assert account == plain_account


@pytest.mark.parametrize("engine_name", ["cpu-ranks", "cpu-ranks-by-requests"])
@pytest.mark.parametrize(("name", "ranks"), [("model", 2), ("eagle3", 1)])
def test_processes_and_ranks_by_requests(engine_name: str, name: str, ranks: int) -> None:
    case = replace(BASE, draft=DRAFTS[name], sampling=Sampling(1.0, seed=3, draws="with-replacement"))
    engine = open_backend(engine_name)
    same_run(engine.run(replace(case, draft_ranks=ranks)), open_cpu().run(case))


def test_ranks_of_a_part_meet_while_the_others_wait() -> None:
    meeting = Meeting(4)

    def work(group: Group) -> tuple[int, int]:
        part, total = group.part(2), 0
        if group.rank < 2:
            for _ in range(3):
                total += int(part.all_reduce(torch.tensor(1 + group.rank)))
        return total, int(group.broadcast(torch.tensor(10 * group.rank + total)))

    assert [outcome.value for outcome in meeting.run(work)] == [(9, 9), (9, 9), (0, 9), (0, 9)]
    assert meeting.parted is None
    assert meeting.groups[0].calls == [f"{PART}all_reduce sum []"] * 3 + ["broadcast []"]
    assert meeting.groups[2].calls == ["broadcast []"]


def test_a_rank_that_misses_a_collective_of_a_part_is_named() -> None:
    meeting = Meeting(4)

    def work(group: Group) -> None:
        part = group.part(2)
        if group.rank == 0:
            part.all_gather(torch.zeros(1))
        group.all_gather(torch.zeros(2))

    assert all(outcome.error is not None for outcome in meeting.run(work))
    assert meeting.parted == (
        f"rank 1 is out of step: it enters all_gather [2], and rank 0 enters {PART}all_gather [1]"
    )


def test_what_is_refused() -> None:
    case = replace(BASE, draft=MODEL)
    for fields, words in (
        ({"draft_ranks": 3}, r"draft_ranks: 3 is none of 0, 1, 2, 4"),
        ({"ranks": 2, "draft_ranks": 4}, r"draft_ranks: 4 is more than the 2 ranks of the target"),
        ({"ranks": 1, "draft_ranks": 1}, r"draft_ranks: one rank has the draft: shard the target over more ranks"),
        ({"spread": True, "draft_ranks": 1}, r"draft_ranks: requests spread over ranks take their drafts along"),
        ({"draft": HEADS["eagle1"], "draft_ranks": 4}, r"draft_ranks: eagle1 draft of 2 heads on 4 ranks"),
        ({"draft": WHOLE["medusa"], "draft_ranks": 2}, r"draft_ranks: medusa draft on 2 ranks, where it has no parts"),
        ({"draft": Mtp(TREE, NORMED), "draft_ranks": 2}, r"draft_ranks: mtp draft on 2 ranks, where it has no parts"),
    ):
        with pytest.raises(Malformed, match=words):
            replace(case, **fields)
    other = Seeded(next(arch for arch in GALLERY if arch.family not in SHARDED), 0)
    assert draft_refusal(LanguageModel(other, TREE), 2) == f"draft model family {other.architecture.family} on 2 ranks"
    assert draft_refusal(LanguageModel(other, TREE), 1) is None
    assert draft_refusal(replace(HEADS["mtp"], layer=replace(LAYER, heads=4)), 4) is None
    assert replace(case, draft=WHOLE["ngram"], draft_ranks=4).drafting_ranks == 1
    assert replace(case, draft_ranks=2).drafting_ranks == 2
    assert case.drafting_ranks == 4
    able = replace(EVERYTHING, continuous=False)
    assert able.outside(replace(case, draft_ranks=1)) is None
    assert replace(able, draft_ranks=False).outside(replace(case, draft_ranks=1)) == "draft on ranks of its own"


def test_a_prefix_cache_keeps_no_recurrent_states_of_such_a_draft() -> None:
    hybrid = Seeded(next(arch for arch in GALLERY if arch.recurrent), 1)
    draft = LanguageModel(hybrid, RankTree((0, 0), (0, 0)))
    model = replace(WIDE, architecture=replace(WIDE.architecture, vocab_size=hybrid.vocab_size))
    case = replace(PLAIN, model=model, prompt=(1, 0, 1), draft=draft, stops=Stops(3), ranks=2, draft_ranks=1)
    assert open_cpu().run(case).output == open_cpu().run(replace(case, draft_ranks=0)).output
    with pytest.raises(Unsupported, match="a prefix cache with recurrent states of a draft on ranks of its own"):
        open_cpu().run(replace(case, layout=KvLayout(kind="prefix", page_size=2)))
