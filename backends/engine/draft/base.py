"""The interface of a draft: propose a tree for the tokens so far, then learn which of its rows were kept."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from backends.engine.kv.base import KvCache
from backends.engine.sampling.step import StepSampling
from reference.tree import Tree


@dataclass(frozen=True)
class Proposal:
    """A proposed tree.

    Attributes:
        tree: Node 0 is the pending root.
        logits: [nodes, draft vocabulary]; NaN for nodes whose children were never ranked. None without scores.
        draft_ids: Each node's id in the draft's own vocabulary (0 for the root). None without a vocabulary of its own.
        proposal: [nodes, target vocabulary]; what the verifier is told of each node's token. None where every token is
            deterministic, hence one-hot.
    """

    tree: Tree
    logits: Tensor | None = None
    draft_ids: tuple[int, ...] | None = None
    proposal: Tensor | None = None


class Draft(Protocol):
    """Something that proposes trees for one request.

    Attributes:
        calls: Forwards of the draft's model so far.
    """

    calls: int

    @property
    def cache(self) -> KvCache | None:
        """The draft's own committed KV, or None for a draft without a model."""
        ...

    def propose(self, tokens: list[int], chance: StepSampling | None = None) -> Proposal:
        """Propose a tree whose root is `tokens[-1]`; `tokens` holds prompt and output so far.

        `chance` is there where the request samples: it draws tokens, or says what the verifier is to be told of them.
        """
        ...

    def settle(self, kept: list[int]) -> None:
        """The step is over: tree rows `kept` (root first) stay, everything else speculated is rolled back."""
        ...

    def resume(self, cache: KvCache | None) -> None:
        """The draft's cache was lost; go on with this one."""
        ...

    def abandon(self) -> None:
        """The proposal is thrown away before it was verified; the next `propose` begins where this one did."""
        ...
