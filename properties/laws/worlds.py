"""Worlds for a case: tables that tell a right sampler from a wrong one.

A world has the case's own rule and settings.
"""

from dataclasses import replace

import numpy as np

from specverify.properties.verdict.variants import dice
from specverify.reference.case import Case
from specverify.reference.grammar import Grammar
from specverify.reference.probability_world import World
from specverify.reference.rules import DRAWS
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Array
from specverify.reference.tree import Shape

HEAVY = (
    np.array([0.08, 0.253, 0.121, 0.029, 0.382, 0.135]),
    np.array([0.01, 0.13, 0.017, 0.822, 0.012, 0.009]),
)
"""A target law and a draft's law that together expose every fault except those of deduplication."""

KINDS = ("heavy", "peaked", "random", "random", "zeros", "narrow", "equal", "ties")
"""The kinds of rows from which a world is drawn; a kind named twice is drawn twice as often."""

LANGUAGES = ("(ab|bb?)*c?", "(a|b)*a?b", "(a|cb){1,2}b*")
"""The grammars of worlds, over `WORDS`."""

WORDS = tuple(word.encode().hex() for word in ("a", "b", "c", "ab", "bb", "ba"))
"""The words of a world's tokens, as many as it has."""

ROWS = 128
"""Most rows of a table; contexts beyond that share rows."""


def world_of(case: Case, salt: str = "world") -> World:
    """A world with the case's rule, draws, temperature and settings, on a tree like the case's first.

    All choices follow from the case and `salt`. Trees whose tokens are drawn get few nodes and tokens, since each draft
    coin multiplies the number of decisions.
    """
    rng = dice(case, salt)
    draft = case.draft
    shape = draft.shapes[0] if draft.shapes else Shape((0,))
    sampling = case.sampling
    draws_tokens = sampling.draws != "top-k"
    tree_shape = prune_tree(Shape(shape.parent), int(rng.integers(3, 5 if draws_tokens else 8)))
    kind = KINDS[int(rng.integers(len(KINDS)))]
    if kind == "equal" and sampling.rule.promise.rejects_equal_laws:
        kind = "random"
    vocab = (
        6
        if kind == "heavy" and (not draws_tokens or len(tree_shape) <= 3)
        else int(rng.integers(3, 5 if draws_tokens else 7))
    )
    drafts = 2 if sampling.rule.promise.law_by_sibling else 1
    rows = min(ROWS, sum(vocab**depth for depth in range(tree_shape.height + 1)))
    target, tables = draw_laws(kind, rng, rows, vocab, drafts)
    settings, stops = _settings(sampling, vocab, kind, LANGUAGES[int(case.id, 16) % len(LANGUAGES)])
    # A prompt of its own, because the world's vocabulary is smaller than the case's.
    prompt = tuple(int(token) for token in rng.integers(0, vocab, size=3))
    with np.errstate(divide="ignore"):
        scale = sampling.temperature
        # Times the temperature, so that dividing by it gives the designed laws back.
        world = World(tree_shape, np.log(target) * scale, np.log(tables) * scale, settings, prompt, stops)
    return replace(
        world, dtype="float64" if case.dtype == "float64" else "float32", ranks=1 if case.spread else case.ranks
    )


def prune_tree(shape: Shape, nodes: int) -> Shape:
    """The first `nodes` nodes of `shape`, level by level: whole paths from the root, in row order."""
    kept_nodes = sorted(sorted(range(len(shape)), key=lambda node: (shape.depth[node], node))[:nodes])
    row = {node: index for index, node in enumerate(kept_nodes)}
    return Shape(tuple(row[shape.parent[node]] for node in kept_nodes))


def draw_laws(kind: str, rng: np.random.Generator, rows: int, vocab: int, drafts: int) -> tuple[Array, Array]:
    """Target laws [rows, vocab] and draft laws [drafts, rows, vocab] of one kind, drawn for each row."""
    flat = np.ones(vocab)
    target = rng.dirichlet(flat, rows)
    tables = rng.dirichlet(flat, (drafts, rows))
    if kind == "heavy" and vocab == len(HEAVY[0]):
        orders = np.stack([rng.permutation(vocab) for _ in range(rows)])
        target = HEAVY[0][orders]
        tables = np.stack([HEAVY[1][orders]] + [rng.dirichlet(flat, rows) for _ in range(drafts - 1)])
    elif kind in ("heavy", "peaked"):
        peak = np.eye(vocab)[rng.integers(0, vocab, size=(drafts, rows))]
        tables = 0.85 * peak + 0.15 * tables
    elif kind == "zeros":
        target[np.arange(rows), rng.integers(0, vocab, size=rows)] = 0.0
    elif kind == "narrow":
        # A draft that can name two tokens only.
        tables = np.where(tables >= np.sort(tables, axis=-1)[..., -2:-1], tables, 0.0)
    elif kind == "equal":
        tables = np.broadcast_to(target, tables.shape).copy()
    elif kind == "ties":
        target = np.full((rows, vocab), 1.0)
        target[np.arange(rows), rng.integers(0, vocab, size=rows)] = 2.0
    return target / target.sum(-1, keepdims=True), tables / tables.sum(-1, keepdims=True)


THRESHOLD_MARGIN = 1.0 + 1.0 / 64.0
"""Factor of a threshold in a world, whose designed laws hold shares such as 1 in 5.

A threshold is one of the acceptance rule, min_p, or top_p (divided by the factor). A probability that equals a
threshold but for rounding is accepted by one right sampler and rejected by another.
"""


def _settings(sampling: Sampling, vocab: int, kind: str, language: str) -> tuple[Sampling, Stops]:
    """The case's sampling adapted to a small vocabulary, so that no row has all its tokens banned."""
    fitting = replace(sampling, tape=(), processors=(), bad_words=(), min_tokens=0, grammar=None)
    # The mass or share of tokens may be the threshold itself; rounding then decides which of them are kept.
    fitting = replace(fitting, top_p=sampling.top_p / THRESHOLD_MARGIN if sampling.top_p < 1.0 else 1.0)
    fitting = replace(fitting, min_p=min(sampling.min_p * THRESHOLD_MARGIN, 1.0))
    if sampling.rule.threshold_single < 1.0:
        rule = replace(sampling.rule, threshold_single=sampling.rule.threshold_single * THRESHOLD_MARGIN)
        fitting = replace(fitting, rule=rule)
    # These rows have tokens of probability 0 already: a ban might leave none.
    if kind in ("zeros", "narrow"):
        return fitting, Stops()
    if sampling.bad_words:
        fitting = replace(fitting, bad_words=((1,), (2, 0)) if vocab > 3 else ((2, 0),))
    if sampling.grammar is not None:
        fitting = replace(fitting, grammar=Grammar("regex", language, WORDS[:vocab]))
    if sampling.min_tokens:
        fitting = replace(fitting, min_tokens=min(sampling.min_tokens, 2))
    if sampling.top_k > 0:
        fitting = replace(fitting, top_k=1 + sampling.top_k % vocab)
    return fitting, Stops(eos=(vocab - 1,))


def is_deterministic(case: Case) -> bool:
    """Whether the tokens of the case's trees are named without coins."""
    return not case.draft.has_law or case.sampling.draws == DRAWS[0]


def is_promised(case: Case) -> bool:
    """Whether the case's rule is lossless for the trees of this case."""
    sampling = case.sampling
    if is_deterministic(case):
        twins = any(tree.has_twins for tree in case.draft.trees or ())
        return sampling.rule.lossless("top-k", not twins)
    return sampling.rule.lossless(sampling.draws, sampling.draws != "with-replacement")
