"""The interface of a draft: propose a tree for the tokens so far, then learn which of its rows were kept."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from backends.engine.kv.base import KvCache
from backends.engine.model.causal_lm import CausalLm
from backends.engine.sampling.step import StepSampling
from backends.engine.step_seams import StepSeams
from reference.case import Case
from reference.hidden import HiddenStates
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
        reads: Which hidden states of the target its weights were made for; None for a draft that reads none.
    """

    calls: int
    reads: HiddenStates | None

    @property
    def cache(self) -> KvCache | None:
        """The draft's own committed KV, or None for a draft without a model."""
        ...

    def propose(self, tokens: list[int], chance: StepSampling | None = None, hidden: Tensor | None = None) -> Proposal:
        """Propose a tree under the pending root.

        Args:
            tokens: Prompt and output so far; the last one is the root.
            chance: There where the request samples: it draws tokens, or says what the verifier is to be told of them.
            hidden: The target's hidden states that the draft reads, [len(tokens) - 1, width], in the working dtype,
                one row for each committed token; None for a draft that reads none.
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


@dataclass(frozen=True)
class Opening:
    """The arguments with which a draft is opened.

    Attributes:
        case: The request, as the case that it would be alone.
        model: The draft's model; None where the case's draft has none.
        cache: The cache of that model.
        seams: The functions that the engine is composed of.
    """

    case: Case
    model: CausalLm | None
    cache: KvCache | None
    seams: StepSeams


OPENERS: dict[str, Callable[[Opening], Draft]] = {}
"""For each tag, the function that opens a draft of that kind."""


def opens(tag: str) -> Callable[[Callable[[Opening], Draft]], Callable[[Opening], Draft]]:
    """Enter the decorated function as the one that opens drafts with this tag."""

    def enter(function: Callable[[Opening], Draft]) -> Callable[[Opening], Draft]:
        OPENERS[tag] = function
        return function

    return enter
