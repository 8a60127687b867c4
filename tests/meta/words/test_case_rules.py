"""Rules of cases, sessions and worlds: each is broken once, one step past what it allows, and kept beside it."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from specverify.campaign.case_stream import stream
from specverify.reference.case import Case
from specverify.reference.case_json import case_from_json, case_to_json
from specverify.reference.draft import LanguageModel, Ngram, Scripted
from specverify.reference.layout import KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.probability_world import GivenTree, World
from specverify.reference.rules import Rule
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.tree import RankTree, Shape, Tree
from tests.models import FOUR_TOKENS

BASE = Case(FOUR_TOKENS, (3, 1), Scripted((Tree((0, 0), (1, 2)),)), stops=Stops(3))
DRAWN = replace(BASE, draft=Ngram(RankTree((0, 0), (0, 0)), 2), sampling=Sampling(0.5))
MATE = Mate((2, 1), Scripted((Tree((0,), (1,)),)), Sampling(), Stops(3))


def session(*actions: Action, mate: Mate = MATE, base: Case = BASE) -> Case:
    return replace(base, session=Session((mate,), actions))


def world(**changes: object) -> World:
    facts = {
        "shape": Shape((0, 0)),
        "target": np.zeros((2, 3)),
        "drafts": np.zeros((1, 2, 3)),
        "sampling": Sampling(1.0),
    }
    return World(**{**facts, **changes})  # type: ignore[arg-type]


def given_tree(
    which: str = "target", row: int = 0, law: tuple[float, ...] = (0.5, 0.25, 0.25), **changes: object
) -> GivenTree:
    """A verification of three nodes whose laws are one-hot, but for one row of one table."""
    tables = {"target": np.eye(3), "proposal": np.eye(3)}
    tables[which][row] = law
    facts = {"tree": Tree((0, 0, 0), (0, 1, 2)), **tables, "sampling": Sampling(1.0)}
    return GivenTree(**{**facts, **changes})  # type: ignore[arg-type]


ALLOWED: dict[str, Callable[[], object]] = {
    "the last token of the vocabulary": lambda: replace(BASE, stops=Stops(3, (3,))),
    "all but one token banned": lambda: replace(BASE, sampling=Sampling(bad_words=((0,), (1, 2), (2, 3)))),
    "all tokens banned, but ends only while min_tokens": lambda: replace(
        BASE, stops=Stops(3, (3,)), sampling=Sampling(bad_words=((0,), (1,), (2,)))
    ),
    "words that begin with every token and end with one": lambda: replace(
        BASE, sampling=Sampling(bad_words=((0, 3), (1, 3), (2, 3), (3, 3)))
    ),
    "as long as the model admits": lambda: replace(BASE, stops=Stops(9)),
    "one token after the prompt": lambda: replace(BASE, stops=Stops(3, max_length=3)),
    "max_length of the model's context": lambda: replace(BASE, stops=Stops(3, max_length=12)),
    "as many pages as it takes": lambda: replace(
        BASE, layout=KvLayout(kind="paged", page_size=1, pages=tuple(range(7)))
    ),
    "as many pages as there may be": lambda: replace(
        BASE, layout=KvLayout(kind="paged", page_size=1, pages=tuple(range(65536)))
    ),
    "a greedy request switches": lambda: session(Action("switch", (0,), Scripted())),
    "a sampled mate beside a greedy switch": lambda: session(
        Action("switch", (0,), Scripted()), mate=replace(MATE, sampling=Sampling(1.0))
    ),
    "a fork of two": lambda: Action("fork", (0, 1)),
    "a step of one": lambda: Action("step", (0,)),
    "a preemption of two": lambda: Action("preempt", (0, 1)),
    "the last mate": lambda: session(Action("step", (1,))),
    "a sampled world": world,
    "a world that knows its tokens": lambda: world(tokens=(0, 2)),
    "laws that are given": given_tree,
    "a law that rounds": lambda: given_tree(law=(0.5, 0.25, 0.25 + 0.9e-6)),
    "any proposal for the root, which has none": lambda: given_tree("proposal", 0, (0.0, 0.0, 5.0)),
    "a world in which a token is impossible": lambda: world(target=np.array([[0.0, -np.inf, 0.0]] * 2)),
}

BROKEN: dict[str, tuple[Callable[[], object], str]] = {
    "an empty prompt": (lambda: replace(BASE, prompt=()), "prompt: "),
    "an odd head": (lambda: replace(FOUR_TOKENS.architecture, head_dim=3), "head_dim: "),
    "an epsilon above 1": (lambda: replace(FOUR_TOKENS.architecture, norm_eps=1.5), "norm_eps: "),
    "a token past the vocabulary": (lambda: replace(BASE, stops=Stops(3, (4,))), "stops.eos[0]: 4 is not"),
    "a negative token": (lambda: replace(BASE, prompt=(-1, 1)), "prompt[0]: -1 is not"),
    "every token banned": (
        lambda: replace(BASE, sampling=Sampling(bad_words=((0,), (1,), (2,), (3,)))),
        "sampling: bad_words",
    ),
    "words that end with every token": (
        lambda: replace(BASE, sampling=Sampling(bad_words=((3, 0), (3, 1), (3, 2), (3, 3)))),
        "sampling: bad_words",
    ),
    "the only end banned by min_tokens": (
        lambda: replace(BASE, stops=Stops(3, (3,)), sampling=Sampling(bad_words=((0,), (1,), (2,)), min_tokens=1)),
        "sampling: bad_words",
    ),
    "the only stop token banned by min_tokens": (
        lambda: replace(BASE, stops=Stops(3, (), (3,)), sampling=Sampling(bad_words=((0,), (1,), (2,)), min_tokens=1)),
        "sampling: bad_words",
    ),
    "longer than the model admits": (lambda: replace(BASE, stops=Stops(10)), "prompt: needs up to 13 positions"),
    "a draft for a shorter context": (
        lambda: replace(
            BASE,
            draft=LanguageModel(
                replace(FOUR_TOKENS, architecture=replace(FOUR_TOKENS.architecture, max_positions=5)),
                RankTree((0, 0), (0, 0)),
            ),
        ),
        "draft.model: needs up to 6 positions",
    ),
    "no token after the prompt": (lambda: replace(BASE, stops=Stops(3, max_length=2)), "stops.max_length: 2 leaves"),
    "max_length past the context": (
        lambda: replace(BASE, stops=Stops(3, max_length=13)),
        "stops.max_length: 13 is more",
    ),
    "texts for too few tokens": (
        lambda: replace(BASE, stops=Stops(3, stop_strings=("a",), pieces=("a",))),
        "stops.pieces: 1 texts",
    ),
    "a parent past the last node": (lambda: Shape((0, 2)), "parent[1]: 2 is not a node of this 2-node tree"),
    "a negative parent": (lambda: Shape((0, -1)), "parent[1]: -1 is not a node"),
    "a root below another": (lambda: Shape((1, 1)), "parent[0]: the root is its own parent"),
    "parents in a circle": (lambda: Shape((0, 2, 1)), "parent[1]: the parents form a circle"),
    "a tree of nothing": (lambda: Shape(()), "parent: a tree has at least its root"),
    "a negative token in a tree": (lambda: Tree((0, 0), (0, -1)), "token[1]: -1 is not a token id"),
    "a token too many": (lambda: Tree((0,), (0, 0)), "token: 2 tokens for 1 nodes"),
    "a rank too many": (lambda: RankTree((0,), (0, 0)), "rank: 2 ranks for 1 nodes"),
    "a root with a rank": (lambda: RankTree((0, 0), (1, 0)), "rank[0]: 1 is not a rank"),
    "a negative rank": (lambda: RankTree((0, 0), (0, -1)), "rank[1]: -1 is not a rank"),
    "a rank of two siblings": (lambda: RankTree((0, 0, 1, 1), (0, 0, 1, 1)), "rank: two children of node 1"),
    "a tree under another root": (lambda: replace(BASE, prompt=(3, 2)), "draft.trees[0].token[0]: 1 is not"),
    "a page too few": (
        lambda: replace(BASE, layout=KvLayout(kind="paged", page_size=1, pages=tuple(range(6)))),
        "layout.pages: out of pages",
    ),
    "a page too many": (
        lambda: KvLayout(kind="paged", page_size=1, pages=tuple(range(65537))),
        "pages: 65537 pages; at most 65536",
    ),
    "a rule that takes no tree": (
        lambda: replace(
            BASE, sampling=Sampling(1.0, rule=Rule("chain")), draft=Scripted((Tree((0, 0, 0), (1, 2, 3)),))
        ),
        "sampling.rule",
    ),
    "a mate that is no case": (lambda: session(mate=replace(MATE, prompt=(9, 1))), "session.mates[0].prompt[0]: 9"),
    "a sampled request switches": (
        lambda: session(Action("switch", (1,), Scripted()), mate=replace(MATE, sampling=Sampling(1.0))),
        "session.actions[0]: a request that samples",
    ),
    "a switch to a tree that does not fit": (
        lambda: session(
            Action("switch", (0,), Ngram(RankTree(tuple(max(0, node - 1) for node in range(9)), (0,) * 9), 2))
        ),
        "session.actions[0].prompt: needs up to 13",
    ),
    "an action that there is not": (lambda: Action("jump", (0,)), "kind: 'jump' is none"),
    "a request twice": (lambda: Action("step", (0, 0)), "requests: a request is named twice"),
    "a fork of one": (lambda: Action("fork", (0,)), "requests: fork takes 2, not 1"),
    "two that are added at once": (lambda: Action("add", (0, 1)), "requests: add takes 1, not 2"),
    "a step of none": (lambda: Action("step", ()), "requests: step takes at least one, not 0"),
    "a switch to nothing": (lambda: Action("switch", (0,)), "draft: belongs to switch"),
    "a step with a draft": (lambda: Action("step", (0,), Scripted()), "draft: belongs to switch"),
    "a request that there is not": (lambda: Session((), (Action("step", (1,)),)), "actions[0].requests: request 1"),
    "a greedy world": (lambda: world(sampling=Sampling()), "sampling.temperature: a greedy world"),
    "a world without a prompt": (lambda: world(prompt=()), "prompt: empty"),
    "a world with a token too few": (lambda: world(tokens=(0,)), ""),
    "drafts of another vocabulary": (lambda: world(drafts=np.zeros((1, 2, 4))), "drafts: (1, 2, 4) does not fit"),
    "target rows without an axis": (lambda: world(target=np.zeros(3)), "drafts: "),
    "a logit that is no number": (lambda: world(target=np.array([[0.0, np.nan, 0.0]] * 2)), "target: a logit is NaN"),
    "an infinite logit": (lambda: world(drafts=np.full((1, 2, 3), np.inf)), "drafts: a logit is NaN or infinite"),
    "a row without a token": (
        lambda: world(target=np.array([[0.0] * 3, [-np.inf] * 3])),
        "target: a row gives no token",
    ),
    "a negative probability": (lambda: given_tree(law=(0.5, 0.75, -0.25)), "target: holds a negative number"),
    "a probability that is no number": (
        lambda: given_tree("proposal", 2, (1.0, np.nan, 0.0)),
        "proposal: holds a negative",
    ),
    "a negative proposal": (lambda: given_tree("proposal", 2, (1.5, -0.5, 0.0)), "proposal: holds a negative number"),
    "a law of too little": (lambda: given_tree(row=1, law=(0.5, 0.25, 0.2)), "target[1]: sums to 0.95, not to 1"),
    "a law of a little too much": (lambda: given_tree(law=(0.5, 0.25, 0.25 + 1.1e-6)), "target[0]: sums to 1.0000011"),
    "a proposal of too much": (
        lambda: given_tree("proposal", 2, (1.0, 0.5, 0.0)),
        "proposal[2]: sums to 1.5, not to 1",
    ),
    "laws for too few nodes": (lambda: given_tree(target=np.eye(3)[:2]), "target: has shape (2, 3) where (3, 3)"),
    "proposals of another vocabulary": (
        lambda: given_tree(proposal=np.eye(3)[:, :2]),
        "proposal: has shape (3, 2) where",
    ),
    "laws whose rule takes no tree": (
        lambda: given_tree(sampling=Sampling(1.0, rule=Rule("block"))),
        "sampling.rule: rule",
    ),
    "a world whose rule takes no tree": (
        lambda: world(shape=Shape((0, 0, 0)), sampling=Sampling(1.0, rule=Rule("chain"))),
        "sampling.rule",
    ),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_a_rule_allows_is_made(name: str) -> None:
    ALLOWED[name]()


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_a_rule_is_refused_where_it_stands(name: str) -> None:
    make, line = BROKEN[name]
    with pytest.raises(Malformed) as error:
        make()
    assert str(error.value).startswith(line)


def test_a_request_alone_keeps_what_is_its_own() -> None:
    mate = Mate((2, 0, 1), Ngram(RankTree((0, 0), (0, 0)), 2), Sampling(0.5), Stops(2, (3,)))
    case = replace(session(Action("fork", (1, 0)), mate=mate), steps=3, dtype="float64")
    first, second = case.alone(), case.alone(1, (2, 2))
    assert first == replace(case, session=None)
    assert case.alone(0, (2, 2)) == replace(first, prompt=(2, 2, 3, 1)), "a fork of a mate's tokens begins with them"
    assert second == Case(FOUR_TOKENS, (2, 2, 2, 0, 1), mate.draft, BASE.layout, mate.sampling, mate.stops, "float64")


def test_a_drawn_case_is_read_back_as_it_was() -> None:
    rules = set()
    for case in islice(stream(5, ("float32", "float64")), 30):
        rules.add(case.sampling.rule.name)
        again = case_from_json(json.loads(json.dumps(case_to_json(case))))
        assert again == case
        assert again.id == case.id
    assert len(rules) > 3, "sampling was drawn in several ways"
