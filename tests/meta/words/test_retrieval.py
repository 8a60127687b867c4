"""Drafts that look tokens up: the engine's structures equal the oracle's lists, words, files, and refusals."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from specverify.backends.engine.composition import SEAMS
from specverify.backends.engine.draft import Opening, open_draft
from specverify.backends.engine.draft.automaton import SuffixAutomaton
from specverify.backends.engine.draft.ngram_trie import NgramTrie
from specverify.backends.registry import open_backend
from specverify.properties.shrinking.cases import nearer
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.case_json import case_from_json, case_to_json
from specverify.reference.draft import Draft, Ngram, Scripted
from specverify.reference.draft.automaton import Automaton
from specverify.reference.draft.merged import Merged
from specverify.reference.draft.trie import Trie
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.draft.automaton import continuation
from specverify.reference.oracle.draft.trie import entries, trie_grams
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.tree import RankTree
from specverify.setup.subjects import subject_of
from tests.meta.words.test_head_drafts import DRAFTS as INVARIANTS
from tests.meta.words.test_head_drafts import ORACLE
from tests.models import LLAMA

BUSHY = RankTree((0, 0, 0, 1, 1, 2, 3, 6), (0, 0, 1, 0, 1, 0, 0, 0))
CHAIN = RankTree((0, 0, 1, 2, 3), (0, 0, 0, 0, 0))
DRAFTS: dict[str, Draft] = {
    "small trie": Trie(BUSHY, 3, 9),
    "tiny trie": Trie(BUSHY, 4, 3),
    "whole trie": Trie(BUSHY, 3),
    "first occurrence": Automaton(CHAIN),
    "last occurrence": Automaton(CHAIN, 2, latest=True),
    "merged": Merged((Trie(BUSHY, 3, 9), Automaton(CHAIN, latest=True), Ngram(BUSHY, 2)), 7),
    "merged whole": Merged((Automaton(CHAIN), Automaton(CHAIN, latest=True)), 99),
}
TEXT = (3, 1, 4, 3, 1, 5, 3, 1, 4, 1, 4)


def case_of(draft: Draft, prompt: tuple[int, ...] = TEXT) -> Case:
    return Case(LLAMA, prompt, draft, stops=Stops(8))


def findings_of(case: Case) -> list[str]:
    verdict = judge(case, INVARIANTS, ORACLE, subject_of(open_backend("cpu-eager")))
    assert verdict.unsupported is None, verdict.unsupported
    assert verdict.outcomes["draft.fidelity"] in ("checked", "failed")
    return [f"{finding.invariant} {finding.where}" for finding in verdict.findings]


def texts(count: int, most: int = 40) -> Iterator[tuple[int, ...]]:
    draw = np.random.default_rng(7)
    for _ in range(count):
        yield tuple(draw.integers(0, int(draw.integers(2, 5)), size=int(draw.integers(1, most))).tolist())


@pytest.mark.parametrize("name", DRAFTS)
def test_structures_that_grow_propose_what_the_oracle_finds_in_the_whole_text(name: str) -> None:
    branched = 0
    for text in texts(12, 24):
        case = case_of(DRAFTS[name])
        draft = open_draft(Opening(case, None, None, SEAMS))
        for length in sorted({1 + len(text) // 3, 1 + 2 * len(text) // 3, len(text)}):
            tree = draft.propose(list(text[:length])).tree
            alone = replace(case, prompt=text[:length], steps=1, stops=Stops(1))
            (step,) = ORACLE(alone).steps
            assert step.drafted is not None
            assert tree == step.drafted.tree
            branched += len(tree) > 2
    assert branched > 4


def test_a_trie_holds_the_n_grams_of_its_definition_in_the_order_of_their_use() -> None:
    for text in texts(40):
        for order, capacity in ((2, 5), (3, 8), (4, 2), (3, 99)):
            trie = NgramTrie(order, capacity)
            for position in range(len(text)):
                trie.learn(list(text), position)
            expected_grams = trie_grams(entries(text), order, capacity)
            counts: dict[tuple[int, ...], int] = {}
            for node in trie.recency:
                up, gram = node, [node.token]
                while up.parent is not None and up.parent is not trie.root:
                    up = up.parent
                    gram = [up.token, *gram]
                counts[tuple(gram)] = node.count
            assert counts == {gram: count for gram, (count, _) in expected_grams.items()}
            assert list(counts) == sorted(expected_grams, key=lambda gram: expected_grams[gram][1])


def test_the_least_recently_used_n_gram_leaves_and_is_no_beginning_of_another() -> None:
    # After 1 2 1: (2, 1) and (1) are used with the last token; (1, 2) and (2) before them, the longer one first.
    trie = NgramTrie(2, 3)
    for position in range(3):
        trie.learn([1, 2, 1], position)
    assert [node.token for node in trie.root.children.values()] == [1, 2]
    assert trie.followers([1]) == [], "1 2 was the least recently used"
    assert trie.followers([2]) == [1]


def test_an_automaton_finds_the_longest_suffix_and_both_its_places() -> None:
    for text in texts(60):
        automaton = SuffixAutomaton()
        for length, token in enumerate(text, 1):
            automaton.extend(token)
            widths = [width for width in range(1, length) if occurs_before(text[:length], width)]
            assert automaton.match == max(widths, default=0)
            if widths:
                assert text[automaton.first : length] == continuation(text[:length], 1, latest=False)
                assert text[automaton.latest : length] == continuation(text[:length], 1, latest=True)


def occurs_before(text: tuple[int, ...], width: int) -> bool:
    return any(text[start : start + width] == text[-width:] for start in range(len(text) - width))


def test_joined_candidates_stand_once_level_by_level_within_the_limit() -> None:
    repeated = (1, 2, 3, 9, 1, 2, 5, 8, 1, 2)
    two = Merged((Automaton(CHAIN), Automaton(CHAIN, latest=True)), 99)
    (step,) = ORACLE(replace(case_of(two, repeated), steps=1)).steps
    assert step.drafted is not None
    assert step.drafted.tree.token == (2, 3, 5, 9, 8, 1, 1, 2, 2)
    assert step.drafted.tree.parent == (0, 0, 0, 1, 2, 3, 4, 5, 6)
    twin_draft = Merged((Automaton(CHAIN), Automaton(CHAIN)), 4)
    (step,) = ORACLE(replace(case_of(twin_draft, repeated), steps=1)).steps
    assert step.drafted is not None
    assert step.drafted.tree.token == (2, 3, 9, 1)


@pytest.mark.parametrize("name", DRAFTS)
def test_a_case_is_saved_loaded_judged_and_made_smaller(name: str) -> None:
    case = case_of(DRAFTS[name])
    assert case_from_json(case_to_json(case)) == case
    assert findings_of(case) == []
    smaller = list(nearer(case))
    assert any(
        smaller_case.draft.TAG == case.draft.TAG and smaller_case.draft != case.draft for smaller_case in smaller
    )


@pytest.mark.parametrize("name", ["small trie", "last occurrence", "merged"])
def test_in_a_session_and_sampled(name: str) -> None:
    draft = DRAFTS[name]
    assert findings_of(replace(case_of(draft), sampling=Sampling(temperature=1.0))) == []
    actions = (
        Action("add", (0,)), Action("add", (1,)), Action("step", (0, 1)), Action("preempt", (0,)),
        Action("evict", (1,)), Action("step", (0,)), Action("restore", (1,)), Action("step", (1, 0)),
        Action("fork", (0, 2)), Action("step", (2, 0, 1)), Action("switch", (0,), Scripted()), Action("step", (0, 2)),
    )  # fmt: skip
    mates = (Mate((5, 1, 4, 5, 1), draft, stops=Stops(8)), Mate((1, 4), draft, stops=Stops(8)))
    assert findings_of(replace(case_of(draft), session=Session(mates, actions))) == []


ACTIONS = (
    Action("add", (0,)), Action("step", (0,)), Action("add", (1,)), Action("preempt", (1,)), Action("step", (1, 0)),
    Action("evict", (1,)), Action("step", (0,)), Action("fork", (0, 2)), Action("restore", (1,)),
    Action("step", (2, 1, 0)), Action("switch", (0,), Scripted()), Action("step", (0, 1, 2)), Action("step", (2, 1)),
)  # fmt: skip


def company(shared: bool) -> Case:
    draft = Trie(BUSHY, 3, 12, shared)
    mates = (Mate((4, 3), draft, stops=Stops(8)), Mate((1, 4), draft, stops=Stops(8)))
    return replace(case_of(draft), session=Session(mates, ACTIONS))


def test_requests_share_a_trie_only_where_the_case_asks_for_it() -> None:
    subject, sizes = subject_of(open_backend("cpu-eager")), []
    for shared in (False, True):
        case = company(shared)
        assert case_from_json(case_to_json(case)) == case
        verdict = judge(case, INVARIANTS, ORACLE, subject)
        assert verdict.findings == ()
        assert verdict.outcomes["draft.shared"] == ("checked" if shared else "not_applicable")
        session_trace = subject(case).shared
        assert session_trace is not None
        assert session_trace.requests[1] is not None
        first = session_trace.requests[1].steps[0].drafted
        assert first is not None
        sizes.append(len(first.tree))
    assert sizes == [1, 4], "4 3 was met in the text of request 0 alone"


def test_a_shared_trie_that_lacks_a_text_is_found() -> None:
    engine = subject_of(open_backend("cpu-eager"))
    apart = Subject("apart", lambda case: engine(company(False) if case == company(True) else case), engine.reveals)
    first, *_ = judge(company(True), INVARIANTS, ORACLE, apart).findings
    assert (first.invariant, first.where) == ("draft.shared", {"side": "tree", "request": 1})


def test_what_no_draft_can_be_is_refused() -> None:
    with pytest.raises(Malformed, match="capacity: 0: a trie holds at least one"):
        Trie(BUSHY, 3, 0)
    with pytest.raises(Malformed, match="shape: an automaton continues one occurrence"):
        Automaton(BUSHY)
    with pytest.raises(Malformed, match="least: 0: a suffix"):
        Automaton(CHAIN, 0)
    with pytest.raises(Malformed, match="drafts: 0 drafts"):
        Merged((), 3)
    with pytest.raises(Malformed, match=r"drafts\[1\]: no scripted draft is joined"):
        Merged((Automaton(CHAIN), Scripted()), 3)
    with pytest.raises(Malformed, match=r"drafts\[0\]: no shared trie is joined"):
        Merged((Trie(BUSHY, shared=True),), 3)
    switch = Action("switch", (0,), Trie(BUSHY, shared=True))
    with pytest.raises(Malformed, match=r"actions\[0\]\.draft: a request shares a trie from its start"):
        replace(case_of(Scripted()), session=Session((), (switch,)))
    with pytest.raises(Malformed, match="a request that samples shares no trie"):
        replace(case_of(Trie(BUSHY, shared=True)), sampling=Sampling(temperature=1.0))
