"""Faults of drafts that look tokens up: whose text, which n-gram leaves, joining."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from specverify.backends.engine.draft.automaton import AutomatonDraft
from specverify.backends.engine.draft.base import Draft, Proposal
from specverify.backends.engine.draft.merged import MergedDraft
from specverify.backends.engine.draft.ngram_trie import NgramTrie, Node
from specverify.backends.engine.draft.trie import TrieDraft
from specverify.backends.engine.kv.arena import Arena
from specverify.backends.engine.kv.seams import KvSeams
from specverify.backends.engine.request import Request
from specverify.backends.engine.sampling.step import StepSampling
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import drafted_fault
from specverify.reference.layout import KvLayout


def with_changed_drafts(seams: Seams, change: Callable[[Draft], None]) -> Seams:
    """The seams with requests that change each of their drafts, joined ones too, before every proposal."""

    class ChangingRequest(Request):
        def propose(self) -> None:
            for draft in (self.draft, *(self.draft.drafts if isinstance(self.draft, MergedDraft) else ())):
                change(draft)
            super().propose()

    return replace(seams, request=ChangingRequest)


@drafted_fault(
    "trie-shared-unasked",
    "family of catalogue BZ-081: a pool of n-grams outlives the request whose text it holds",
    "two requests with tries, whose texts go on differently after the same tokens",
)
def shared_unasked(seams: Seams) -> Seams:
    """Requests share one trie although the case does not ask for it, and are drafted from one another's texts."""
    tries: dict[tuple[int, int], NgramTrie] = {}

    class Decoder(Arena):
        def __init__(
            self, layout: KvLayout, pages: int = 0, seams: KvSeams | None = None, draft_pages: int = 0
        ) -> None:
            super().__init__(layout, pages, seams, draft_pages)
            # A new arena is a new decoder: no run sees the tries of another run.
            tries.clear()

    def change(draft: Draft) -> None:
        if isinstance(draft, TrieDraft):
            draft.trie = tries.setdefault((draft.trie.order, draft.trie.capacity), draft.trie)

    return replace(with_changed_drafts(seams, change), arena=Decoder)


@drafted_fault(
    "trie-evicts-oldest",
    "family of sgl-project/sglang's n-gram cache: nodes are evicted from the end of a list of recent use",
    "a trie that must forget, and an n-gram that is met again before",
)
def evicts_oldest(seams: Seams) -> Seams:
    """A full trie forgets the n-gram that was inserted first, however recently it was used, and all below it."""

    class Queue(NgramTrie):
        def use(self, node: Node) -> None:
            place = list(self.recency)
            super().use(node)
            self.recency = OrderedDict.fromkeys(place)

    return with_changed_drafts(seams, _with_trie(Queue))


@drafted_fault(
    "trie-evicts-inner-node",
    "family of sgl-project/sglang's n-gram cache: an evicted node is freed while longer n-grams hang below it",
    "a trie that must forget, with an n-gram that begins a longer one",
)
def evicts_inner_node(seams: Seams) -> Seams:
    """A full trie forgets the beginning of the n-gram that was used least recently, and with it all below.

    The node before the leaf is taken from the tree; the nodes below it stay in the list of recent use.
    """

    class Hasty(NgramTrie):
        def prune(self) -> None:
            while len(self.recency) > self.capacity:
                leaf = next(iter(self.recency))
                above = leaf.parent
                if above is not None and above.parent is not None:
                    above.parent.children.pop(above.token, None)
                self.remove_first()

    return with_changed_drafts(seams, _with_trie(Hasty))


def _with_trie(kind: type[NgramTrie]) -> Callable[[Draft], None]:
    def change(draft: Draft) -> None:
        if isinstance(draft, TrieDraft) and type(draft.trie) is NgramTrie:
            # Only the class changes: the nodes stay.
            draft.trie.__class__ = kind

    return change


@drafted_fault(
    "automaton-keeps-rejected",
    "arXiv 2411.10666, section 3: the automaton grows by accepted tokens alone, after the verification",
    "a suffix automaton whose tokens are rejected, and a later step",
)
def keeps_rejected(seams: Seams) -> Seams:
    """A suffix automaton takes in the tokens that it proposes, and keeps those that are rejected."""

    class Hopeful(AutomatonDraft):
        num_taken = 0

        def grow(self, tokens: list[int]) -> None:
            for token in tokens[self.num_taken :]:
                self.automaton.extend(token)
            self.num_taken = len(tokens)

        def propose(
            self, tokens: list[int], chance: StepSampling | None = None, hidden: Tensor | None = None
        ) -> Proposal:
            proposal = super().propose(tokens, chance, hidden)
            for token in proposal.tree.token[1:]:
                self.automaton.extend(token)
            return proposal

    def change(draft: Draft) -> None:
        if type(draft) is AutomatonDraft:
            draft.__class__ = Hopeful

    return with_changed_drafts(seams, change)


@drafted_fault(
    "merged-candidates-twice",
    "family of catalogue BZ-003: a node that several paths share is verified once per path",
    "two joined drafts that propose one token",
)
def candidates_twice(seams: Seams) -> Seams:
    """A candidate that two joined drafts propose stands twice in the tree."""

    class Twice(MergedDraft):
        def find_child(self, below: dict[tuple[int, int], int], parent: int, token: int) -> int | None:
            return None

    def change(draft: Draft) -> None:
        if type(draft) is MergedDraft:
            draft.__class__ = Twice

    return with_changed_drafts(seams, change)
