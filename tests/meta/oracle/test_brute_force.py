"""Brute force under the oracle: every small tree, enumerated with code of its own, says what the oracle says."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, pairwise, permutations, product
from typing import Any

import numpy as np
import pytest

from specverify.reference.architecture import Architecture, Rope, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Draft, LanguageModel, Ngram, Scripted
from specverify.reference.oracle.decoder import KV_STEPS, Oracle
from specverify.reference.oracle.evaluator import Evaluator
from specverify.reference.oracle.model import Inputs, Nodes, PathByPath
from specverify.reference.oracle.parameters import Parameters, load
from specverify.reference.oracle.shared_prefix import SharedPrefix
from specverify.reference.oracle.stopping import clip
from specverify.reference.sampling import Stops
from specverify.reference.trace import Array, Kv, Step, Trace
from specverify.reference.tree import RankTree, Tree
from tests.tiers import each, first

VOCABULARY = 3
TOKENS = range(VOCABULARY)
Path = tuple[int, ...]
Choose = Callable[[tuple[int, ...]], int]
"""The token that greedy decoding writes after a sequence."""


def architecture(family: str, windows: tuple[int, ...], rope: Rope = Rope(), hidden: int = 8) -> Architecture:
    return Architecture(
        family, VOCABULARY, hidden, 12, 2, 1, 4, windows, rope, qk_norm=family == "qwen3", qkv_bias=family == "qwen2"
    )


PLAIN = Seeded(architecture("llama", (0,)), 3)
WINDOWED = Seeded(architecture("mistral", (2, 2), Rope(100.0)), 5)
MIXED = Seeded(architecture("qwen3", (0, 3), Rope(100.0, "yarn", 4.0, 8)), 1)
BIASED = Seeded(architecture("qwen2", (0, 0), Rope(100.0, "llama3", 4.0, 16)), 2)
CHUNKED = Seeded(
    replace(architecture("llama4", (0, 0)), qk_norm=True, chunks=(3, 0), unrotated=(1,), floor_scale=2, attn_scale=0.5),
    4,
)

DRAFT = Seeded(architecture("llama", (0,), hidden=10), 7)
REAL = [PLAIN, WINDOWED, MIXED, BIASED, CHUNKED]


class Table:
    """A "model" that looks its logits up: small whole numbers drawn for each sequence, so that ties are common."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters

    def row(self, tokens: tuple[int, ...]) -> Array:
        return table_row(self.parameters.architecture.hidden_size, tokens)

    def nodes(self, context: tuple[int, ...], tree: Tree) -> Nodes:
        rows = []
        for node in range(len(tree)):
            tail, ancestor = [tree.token[node]], node
            while ancestor:
                ancestor = tree.parent[ancestor]
                tail.insert(0, tree.token[ancestor])
            rows.append(self.row((*context, *tail)))
        return Nodes(np.stack(rows), np.zeros((1, 1, len(tree), 2)))

    def node_states(self, context: tuple[int, ...], tree: Tree) -> Array:
        raise NotImplementedError

    def states(self, tokens: tuple[int, ...]) -> Array:
        raise AssertionError("no draft here reads hidden states: nobody asks for them")

    def inputs(self, context: tuple[int, ...], tree: Tree) -> Inputs:
        empty = np.zeros((1, 1, len(context) + len(tree), 2))
        return Inputs(empty[:, :, len(context) :], empty, empty, 1.0)

    def kv(self, tokens: tuple[int, ...]) -> Kv:
        empty = np.zeros((1, 1, len(tokens), 2))
        return Kv(empty, empty)


def table_row(table: int, tokens: tuple[int, ...]) -> Array:
    return np.random.default_rng([table, len(tokens), *tokens]).integers(0, 3, size=VOCABULARY).astype(np.float64)


class Sequences:
    """Logits after plain sequences, each run by itself as one chain without branches; remembered."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._rows: dict[tuple[int, ...], Array] = {}
        self._kv: dict[tuple[int, ...], Kv] = {}

    def kv(self, tokens: tuple[int, ...]) -> Kv:
        if tokens not in self._kv:
            self._kv[tokens] = self._evaluator.kv(tokens)
        return self._kv[tokens]

    def row(self, tokens: tuple[int, ...]) -> Array:
        if tokens not in self._rows:
            self._rows[tokens] = self._evaluator.nodes(tokens[:-1], Tree((0,), tokens[-1:])).logits[0]
        return self._rows[tokens]

    def choose(self, tokens: tuple[int, ...]) -> int:
        row = self.row(tokens)
        return min(token for token in TOKENS if all(row[token] >= logit for logit in row))

    def continuation(self, prompt: tuple[int, ...], length: int) -> tuple[int, ...]:
        tokens = prompt
        for _ in range(length):
            tokens = (*tokens, self.choose(tokens))
        return tokens[len(prompt) :]


def all_parents(most: int) -> Iterator[tuple[int, ...]]:
    """Every parent array of up to `most` nodes that reaches the root from everywhere, in any row order."""
    for nodes in range(1, most + 1):
        for above in product(range(nodes), repeat=nodes - 1):
            parent = (0, *above)
            reached = {0}
            for _ in range(nodes):
                reached |= {node for node in range(nodes) if parent[node] in reached}
            if len(reached) == nodes:
                yield parent


def all_trees(most: int, root: int) -> Iterator[Tree]:
    for parent in all_parents(most):
        for tokens in product(TOKENS, repeat=len(parent) - 1):
            yield Tree(parent, (root, *tokens))


BIGGER = [
    (0, 0, 0, 0, 1, 2, 3, 4, 5, 6),  # three branches of depth 3
    (0, 0, 0, 0, 1, 1, 1, 2, 2, 2),  # full, width 3
    (0, 4, 1, 4, 0, 1, 0, 6),  # parents after their children
    (0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 6),  # a crowded root
]


def bigger_trees(root: int, ahead: tuple[int, ...]) -> Iterator[Tree]:
    """Bigger trees of depth up to 3; in half of them each token is the right one for its depth, twins everywhere."""
    rng = np.random.default_rng(11)
    for parent in BIGGER:
        depths = [len(path) - 1 for path in sorted(paths_of(parent), key=lambda path: path[-1])]
        right = [ahead[depth - 1] if depth else root for depth in depths]
        for share in (0.0, 0.5, 0.8, 0.9, 1.0):
            keep_mask = rng.random(len(parent)) < share
            other_tokens = rng.integers(0, VOCABULARY, size=len(parent)).tolist()
            token = [
                right_token if keep else wrong_token
                for right_token, keep, wrong_token in zip(right, keep_mask, other_tokens, strict=True)
            ]
            yield Tree(parent, (root, *token[1:]))


def paths_of(parent: tuple[int, ...]) -> list[Path]:
    """Every root-to-node path: of all sequences of nodes that begin at the root, those that follow the parents."""
    paths: list[Path] = [(0,)]
    for length in range(1, 4):
        if len(parent) <= 5:
            candidates = ((0, *permutation) for permutation in permutations(range(1, len(parent)), length))
        else:  # only what grows out of a path already found; all permutations would be too many
            candidates = ((*path, node) for path in paths if len(path) == length for node in range(1, len(parent)))
        paths += [path for path in candidates if all(parent[lower] == upper for upper, lower in pairwise(path))]
    assert sorted(path[-1] for path in paths) == list(range(len(parent)))
    return paths


def expected_walk(tree: Tree, paths: list[Path], prompt: tuple[int, ...], choose: Choose) -> tuple[Path, int]:
    """Of all paths that hold the target's own choices, the one whose every node is the first in row order."""
    right = []
    for path in paths:
        tokens = [tree.token[node] for node in path]
        if all(choose((*prompt[:-1], *tokens[:depth])) == tokens[depth] for depth in range(1, len(tokens))):
            right.append(path)
    chosen = min(right, key=lambda path: (*path, len(tree)))  # a path beats the paths that it continues
    return chosen, choose((*prompt[:-1], *(tree.token[node] for node in chosen)))


def assert_lowered(lowered: Any, tree: Tree, paths: list[Path], context: int, arch: Architecture) -> None:
    """Every entry, out of the list of all paths."""
    height = max(map(len, paths))
    for path in paths:
        row, below = path[-1], [other_path[-1] for other_path in paths if other_path[:-1] == path]
        columns = [*range(context), *(context + node for node in path)]
        for layer, (window, chunk) in enumerate(arch.reaches):
            expected_columns = set(columns[-window:] if window else columns)
            if chunk:  # the last of the pieces into which the sequence is cut
                expected_columns = set([columns[start : start + chunk] for start in range(0, len(columns), chunk)][-1])
            actual_columns = {column for column in range(context + len(tree)) if lowered.visible[layer][row, column]}
            assert actual_columns == expected_columns, (path, layer)
        assert lowered.position[row] == len(columns) - 1
        assert lowered.depth[row] == len(path) - 1
        assert lowered.ancestor[row].tolist() == [*path, *[0] * (height - len(path))]
        assert lowered.next_token[row] == min(below, default=0)
        siblings = [
            other_path[-1]
            for other_path in paths
            if other_path[:-1] == path[:-1] and other_path[-1] > row and len(path) > 1
        ]
        assert lowered.next_sibling[row] == min(siblings, default=0)
    assert [mask.shape for mask in lowered.visible] == [(len(tree), context + len(tree))] * arch.layers
    assert lowered.token.tolist() == list(tree.token)
    assert lowered.parent.tolist() == list(tree.parent)
    assert lowered.valid.all()
    assert lowered.slot.tolist() == [context + node for node in range(len(tree))]
    assert lowered.retrieve_index.tolist() == list(range(len(tree)))


def assert_run(case: Case, trace: Trace, sequences: Sequences, tolerance: float = 1e-10) -> None:
    """A whole run: each step's walk, numbers and lowered tree, what was emitted, and the plain greedy text."""
    budget = case.stops.max_new_tokens
    assert trace.output == sequences.continuation(case.prompt, budget)
    assert trace.finish == "length"
    tokens = case.prompt
    lengths = []
    for number, step in enumerate(trace.steps):
        assert step.context == tokens[:-1]
        assert step.drafted is not None
        assert isinstance(case.draft, Scripted)
        due = case.draft.trees[number : number + 1] or (Tree((0,), (0,)),)
        assert step.drafted.tree == Tree(due[0].parent, (tokens[-1], *due[0].token[1:]))
        block = assert_step(case, step, tokens, sequences, tolerance)
        lengths.append(len(block) - 1)
        tokens_left = budget - (len(tokens) - len(case.prompt))
        assert step.emitted is not None
        assert step.emitted.tokens == block[:tokens_left]
        assert step.emitted.finish == ("length" if len(block) >= tokens_left else None)
        tokens += block[:tokens_left]
        assert step.committed is not None
        assert step.committed.length == len(tokens) - 1
        if number < KV_STEPS:
            assert step.committed.before is not None
            before = sequences.kv(step.context)
            np.testing.assert_allclose(step.committed.before.keys, before.keys, rtol=0, atol=tolerance)
            np.testing.assert_allclose(step.committed.before.values, before.values, rtol=0, atol=tolerance)
    assert tokens[len(case.prompt) :] == trace.output
    assert trace.accounting is not None
    assert trace.accounting.accept_lengths == tuple(lengths)


def assert_step(
    case: Case, step: Step, tokens: tuple[int, ...], sequences: Sequences, tolerance: float
) -> tuple[int, ...]:
    """One step from the state `tokens`; returns the block it accepted with its bonus."""
    assert step.drafted is not None
    assert step.scored is not None
    assert step.accepted is not None
    assert step.lowered is not None
    assert isinstance(case.model, Seeded)
    tree = step.drafted.tree
    assert tree.token[0] == tokens[-1]
    paths = paths_of(tree.parent)
    for path in paths:
        expected_row = sequences.row((*tokens[:-1], *(tree.token[node] for node in path)))
        np.testing.assert_allclose(step.scored.logits[path[-1]], expected_row, rtol=0, atol=tolerance)
    chosen, bonus = expected_walk(tree, paths, tokens, sequences.choose)
    assert (step.accepted.path, step.accepted.bonus) == (chosen, bonus)
    assert_lowered(step.lowered, tree, paths, len(tokens) - 1, case.model.architecture)
    return (*(tree.token[node] for node in chosen[1:]), bonus)


def test_there_are_as_many_trees_as_cayley_counts() -> None:
    assert Counter(map(len, all_parents(4))) == {1: 1, 2: 1, 3: 3, 4: 16}
    assert any(parent[node] > node for parent in all_parents(4) for node in range(len(parent)))


@pytest.mark.parametrize("root", first(TOKENS, 1))
def test_every_small_tree_on_a_table(root: int) -> None:
    """Ties among logits and twins among siblings included, from an empty context and from a longer one."""
    oracle, sequences = Oracle(Table, keep=1), Sequences(Table(load(PLAIN, "float64")))
    accepted: Counter[int] = Counter()
    for prompt in ((root,), (2, 0, 1, root)):
        for tree in all_trees(4, root):
            case = Case(PLAIN, prompt, Scripted((tree,)), stops=Stops(5))
            trace = oracle(case)
            assert_run(case, trace, sequences)
            assert trace.accounting is not None
            accepted[trace.accounting.accept_lengths[0]] += 1
    assert min(accepted[depth] for depth in range(4)) > 0


@pytest.mark.slow
def test_two_trees_in_a_row_on_a_table() -> None:
    """The second tree hangs from whatever the first led to; its script's own root token does not count."""
    oracle, sequences = Oracle(Table, keep=1), Sequences(Table(load(PLAIN, "float64")))
    small = list(all_trees(3, 1))
    for leading, second in product(small, small):
        case = Case(PLAIN, (0, 2, 1), Scripted((leading, second)), stops=Stops(7))
        assert_run(case, oracle(case), sequences)


@pytest.mark.parametrize(("model", "evaluator"), each(product(REAL, [PathByPath, SharedPrefix]), 5))
def test_every_small_tree_on_a_model(model: Seeded, evaluator: Callable[[Parameters], Evaluator]) -> None:
    oracle, sequences = Oracle(evaluator, keep=1), Sequences(PathByPath(load(model, "float64")))
    prompt = (2, 0, 1) if model is not WINDOWED else (0, 1, 1, 2)
    most = 4 if model in (PLAIN, WINDOWED) else 3
    ahead = sequences.continuation(prompt, 3)
    for tree in (*all_trees(most, prompt[-1]), *bigger_trees(prompt[-1], ahead)):
        case = Case(model, prompt, Scripted((tree,)), stops=Stops(2), dtype="float64")
        assert_run(case, oracle(case), sequences)


@pytest.mark.parametrize("evaluator", [PathByPath, SharedPrefix])
def test_whole_runs_on_models(evaluator: Callable[[Parameters], Evaluator]) -> None:
    oracle = Oracle(evaluator, keep=1)
    rng = np.random.default_rng(3)
    shapes = [*all_parents(4), *BIGGER]
    for model in REAL:
        sequences = Sequences(PathByPath(load(model, "float64")))
        for length in (1, 2, 3, 6):
            prompt = tuple(rng.integers(0, VOCABULARY, size=length).tolist())
            picked = [shapes[index] for index in rng.integers(0, len(shapes), size=3)]
            trees = [Tree(shape, (prompt[-1], *rng.integers(0, 3, size=len(shape) - 1).tolist())) for shape in picked]
            case = Case(model, prompt, Scripted(tuple(trees)), stops=Stops(9), dtype="float64")
            assert_run(case, oracle(case), sequences)


def subsets() -> list[tuple[int, ...]]:
    return [chosen for size in range(VOCABULARY + 1) for chosen in combinations(TOKENS, size)]


def expected_end(text: tuple[int, ...], stops: Stops) -> tuple[tuple[int, ...], str]:
    """The endless text `text` as it must come out: cut behind the first thing that ends it."""
    ends = [(stops.max_new_tokens, 2, "length")]
    ends += [(text.index(token) + 1, 0, "eos") for token in stops.eos if token in text]
    ends += [(text.index(token) + 1, 1, "stop") for token in stops.stop_tokens if token in text]
    end, _, why = min(ends)
    return text[:end], why


def test_every_stop_on_every_position() -> None:
    """All sets of end and stop tokens, all budgets, under trees that accept nothing, something and all they hold."""
    oracle, sequences = Oracle(Table, keep=1), Sequences(Table(load(PLAIN, "float64")))
    reasons: Counter[str] = Counter()
    inside = 0
    for prompt in ((1,), (0, 2), (2, 1, 0)):
        text = sequences.continuation(prompt, 8)
        wrong = Tree((0, 0), (prompt[-1], (text[0] + 1) % 3))
        right = Tree((0, 0, 1, 2), (prompt[-1], *text[:3]))
        again = Tree((0, 2, 0, 1), (text[3], text[5], text[4], text[6]))
        for trees in ((), (wrong,), (right,), (right, again), (wrong, wrong)):
            for budget, eos, stop in product(range(1, 8), subsets(), subsets()):
                stops = Stops(budget, eos, stop)
                trace = oracle(Case(PLAIN, prompt, Scripted(trees), stops=stops))
                expected_text, why = expected_end(text, stops)
                assert (trace.output, trace.finish) == (expected_text, why)
                emitted = [step.emitted for step in trace.steps]
                assert sum((emission.tokens for emission in emitted if emission), ()) == expected_text
                assert [emission.finish for emission in emitted if emission] == [None] * (len(emitted) - 1) + [why]
                reasons[why] += 1
                last = trace.steps[-1]
                assert last.accepted is not None
                assert last.emitted is not None
                inside += len(last.accepted.path) > len(last.emitted.tokens)
    assert set(reasons) == {"eos", "stop", "length"}
    assert inside > 100


def test_clipping_every_block() -> None:
    for size, before in product((1, 2, 3, 4), (0, 1, 2)):
        for block in product(TOKENS, repeat=size):
            for budget, eos, stop in product(range(before + 1, 7), subsets()[:5], subsets()[:5]):
                stops = Stops(budget, eos, stop)
                clipped_block, why = clip(block, (1,) * before, stops)
                # The ids of a text that went on to here are of no more concern than their number.
                expected_block, reason = expected_end(block, Stops(budget - before, eos, stop))
                cut = reason != "length" or budget - before <= size
                assert (clipped_block, why) == ((expected_block, reason) if cut else (block, None))


def tokens_of_nodes(shape: RankTree, name: Callable[[tuple[int, ...]], list[int]]) -> dict[int, int]:
    """Each node's token where it has one: the `rank`-th that `name` lists for the tokens of the path above."""
    token: dict[int, int] = {}
    for path in sorted(paths_of(shape.parent), key=len)[1:]:
        if all(node in token for node in path[1:-1]):
            listed = name(tuple(token[node] for node in path[1:-1]))
            if shape.rank[path[-1]] < len(listed):
                token[path[-1]] = listed[shape.rank[path[-1]]]
    return token


def listed_by_windows(tokens: tuple[int, ...], order: int) -> Callable[[tuple[int, ...]], list[int]]:
    """What followed the longest known suffix, from a tally of every window of the text, widest first."""

    def name(above: tuple[int, ...]) -> list[int]:
        sequence = (*tokens, *above)
        for width in reversed(range(1, order)):
            windows = list(zip(*(tokens[shift:] for shift in range(width + 1)), strict=False))
            tally = Counter(window[-1] for window in windows if window[:-1] == sequence[len(sequence) - width :])
            if tally and width <= len(sequence):
                last = {window[-1]: index for index, window in enumerate(windows) if window[:-1] == sequence[-width:]}
                latest_last = sorted(tally, key=lambda token: last[token])
                return sorted(latest_last, key=lambda token: tally[token])[::-1]
        return []

    return name


NGRAM_SHAPES = [
    RankTree((0, 0, 1, 2), (0, 0, 0, 0)),
    RankTree((0, 0, 0, 0, 1, 1, 2), (0, 0, 1, 2, 0, 1, 0)),
    RankTree((0, 2, 0, 0, 1), (0, 1, 1, 0, 0)),
]


@pytest.mark.parametrize(("shape", "order"), each(product(NGRAM_SHAPES, (2, 3, 4)), 2))
def test_ngram_proposals_on_every_text(shape: RankTree, order: int) -> None:
    """Every text of up to 6 tokens: the tree holds the nodes that have a token, in row order."""
    oracle = Oracle(Table, keep=1)
    sizes: Counter[int] = Counter()
    for length in range(1, 7):
        for text in product(TOKENS, repeat=length):
            drafted = oracle(Case(PLAIN, text, Ngram(shape, order), stops=Stops(1))).steps[0].drafted
            assert drafted is not None
            token = {0: text[-1], **tokens_of_nodes(shape, listed_by_windows(text, order))}
            kept_nodes = sorted(token)
            assert drafted.tree.token == tuple(token[node] for node in kept_nodes)
            assert tuple(kept_nodes[up] for up in drafted.tree.parent) == tuple(
                shape.parent[node] for node in kept_nodes
            )
            assert drafted.logits is None
            sizes[len(kept_nodes)] += 1
    assert len(sizes) > 1


MODEL_SHAPES = [
    RankTree((0,), (0,)),
    RankTree((0, 0, 1, 2), (0, 0, 0, 0)),
    RankTree((0, 0, 0, 0, 1, 1, 2), (0, 2, 0, 1, 0, 1, 1)),
    RankTree((0, 3, 0, 0, 1), (0, 1, 1, 0, 0)),
]
VOCABULARIES: list[tuple[int, ...]] = [(), (0, 2), (1, 2)]


@pytest.mark.parametrize("evaluator", [Table, PathByPath, SharedPrefix])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_model_proposals_by_recomputation(
    evaluator: Callable[[Parameters], Evaluator], vocabulary: tuple[int, ...]
) -> None:
    """Each child is the rank-th best token after its own plain sequence; equal logits go to the lowest id."""
    sequences = Sequences((Table if evaluator is Table else PathByPath)(load(DRAFT, "float64")))
    names = vocabulary or tuple(TOKENS)
    oracle = Oracle(evaluator, keep=1)
    prompts = [text for size in range(1, 5) for text in product(TOKENS, repeat=size)]
    for shape in MODEL_SHAPES:
        if max(shape.rank) >= len(names):
            continue
        for prompt in prompts if evaluator is Table else prompts[::7]:
            draft: Draft = LanguageModel(DRAFT, shape, vocabulary)
            trace = oracle(Case(PLAIN, prompt, draft, stops=Stops(3), dtype="float64"))
            tokens = prompt
            for step in trace.steps:
                assert step.drafted is not None
                assert step.emitted is not None
                assert_proposal(step, shape, tokens, names, sequences)
                tokens += step.emitted.tokens


def assert_proposal(
    step: Step, shape: RankTree, tokens: tuple[int, ...], names: tuple[int, ...], sequences: Sequences
) -> None:
    def name(above: tuple[int, ...]) -> list[int]:
        row = sequences.row((*tokens, *above))
        return [token for _, token in sorted((-row[token], token) for token in names)]

    token = {0: tokens[-1], **tokens_of_nodes(shape, name)}
    drafted = step.drafted
    assert drafted is not None
    assert drafted.tree == Tree(shape.parent, tuple(token[node] for node in range(len(shape))))
    assert drafted.draft_ids == (0, *(names.index(token[node]) for node in range(1, len(shape))))
    assert drafted.logits is not None
    for path in paths_of(shape.parent):
        node = path[-1]
        row = drafted.logits[node]
        if node and node not in shape.parent:  # never asked for: a leaf
            assert np.isnan(row).all()
        else:
            expected_row = sequences.row((*tokens, *(token[node] for node in path[1:])))[list(names)]
            np.testing.assert_allclose(row, expected_row, rtol=0, atol=1e-10)
