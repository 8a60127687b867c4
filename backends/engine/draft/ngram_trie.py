"""N-gram tries of bounded size, and the tree of the tokens that may follow a text.

A trie is one request's or shared; its nodes stand in the order of their last use.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from specverify.reference.draft import Draft
from specverify.reference.draft.trie import Trie
from specverify.reference.tree import RankTree, Tree


@dataclass(eq=False)
class Node:
    """An n-gram: the token `token` after that of `parent`.

    Attributes:
        token: The last token of the n-gram.
        parent: The n-gram without its last token; None for the root, the empty n-gram.
        children: The n-grams that are one token longer, by that token.
        count: How often the n-gram ended a window since its node was made.
        used: The number of the last use, among all uses of the trie.
    """

    token: int
    parent: "Node | None"
    children: "dict[int, Node]" = field(default_factory=dict)
    count: int = 1
    used: int = 0


class NgramTrie:
    """N-grams of at most `order` tokens, `capacity` of them at most; `specverify.reference.draft.trie` has the rules.

    Attributes:
        order: The most tokens of an n-gram.
        capacity: The most nodes beside the root.
        root: The empty n-gram.
        recency: Every node beside the root, the least recently used first.
    """

    def __init__(self, order: int, capacity: int) -> None:
        self.order = order
        self.capacity = capacity
        self.root = Node(-1, None)
        self.recency: OrderedDict[Node, None] = OrderedDict()
        self._uses = 0

    def learn(self, tokens: list[int], i: int) -> None:
        """Take in the token number `i` of a text: all windows that end with it, the longest first."""
        for start in range(max(0, i + 1 - self.order), i + 1):
            self.insert(tokens[start : i + 1])
        self.prune()

    def insert(self, window: list[int]) -> None:
        """Count `window` once, and use its n-gram and those that begin it, the longest first."""
        node = self.root
        is_known = True
        for token in window:
            is_known = token in node.children
            node = node.children[token] if is_known else self.add_node(node, token)
        if is_known:
            node.count += 1
        ancestor: Node | None = node
        while ancestor is not None and ancestor is not self.root:
            self.use(ancestor)
            ancestor = ancestor.parent

    def add_node(self, parent: Node, token: int) -> Node:
        """A new node below `parent`."""
        node = parent.children[token] = Node(token, parent)
        self.recency[node] = None
        return node

    def use(self, node: Node) -> None:
        """Note that `node` is used: it becomes the most recently used."""
        self._uses += 1
        node.used = self._uses
        self.recency.move_to_end(node)

    def prune(self) -> None:
        """Remove the least recently used nodes, which are leaves, until `capacity` are left."""
        while len(self.recency) > self.capacity:
            self.remove_first()

    def remove_first(self) -> None:
        """Remove the least recently used node, and with it what hangs below it."""
        node, _ = self.recency.popitem(last=False)
        if node.parent is not None:
            node.parent.children.pop(node.token, None)

    def followers(self, tokens: list[int]) -> list[int]:
        """The tokens after the longest suffix of `tokens` that has any: the most frequent first, then the latest."""
        for width in range(min(self.order - 1, len(tokens)), 0, -1):
            node: Node | None = self.root
            for token in tokens[-width:]:
                node = None if node is None else node.children.get(token)
            if node is not None and node.children:
                ranked = sorted(node.children.values(), key=lambda child: (child.count, child.used), reverse=True)
                return [child.token for child in ranked]
        return []


class SharedTries:
    """A trie for each draft that asks for a shared one; it learns the tokens of a request as they come."""

    def __init__(self) -> None:
        self._tries: dict[Draft, NgramTrie] = {}
        self._num_learned: dict[int, int] = {}

    def trie_of(self, draft: Draft) -> NgramTrie | None:
        """The trie of all requests whose draft equals `draft`; None for one that learns from its request alone."""
        if not draft.shared:
            return None
        if draft not in self._tries:
            assert isinstance(draft, Trie)
            self._tries[draft] = NgramTrie(draft.order, draft.capacity)
        return self._tries[draft]

    def learn(self, number: int, draft: Draft, tokens: list[int]) -> None:
        """Let the trie of `draft` learn the tokens of request `number` that are new; do nothing if it shares none."""
        trie = self.trie_of(draft)
        if trie is None:
            return
        for i in range(self._num_learned.get(number, 0), len(tokens)):
            trie.learn(tokens, i)
        self._num_learned[number] = len(tokens)


def fill_shape(shape: RankTree, tokens: list[int], followers: Callable[[list[int]], list[int]]) -> Tree:
    """The tree `shape` below `tokens[-1]`; a node whose rank does not exist is left out, with all nodes below it.

    `followers` gives the tokens that may follow a sequence, the best first.
    """
    token = {0: tokens[-1]}
    # By depth, since a parent may come after its children in row order.
    for node in sorted(range(1, len(shape)), key=lambda node: shape.depth[node]):
        path = shape.path(node)[:-1]
        if all(ancestor in token for ancestor in path):
            ranked = followers([*tokens[:-1], *[token[ancestor] for ancestor in path]])
            if shape.rank[node] < len(ranked):
                token[node] = ranked[shape.rank[node]]
    nodes = sorted(token)
    row_of = {node: i for i, node in enumerate(nodes)}
    return Tree(tuple(row_of[shape.parent[node]] for node in nodes), tuple(token[node] for node in nodes))
