"""Rounds: an engine's speculative steps as it ran them, and their trace.

An engine that verifies the trees of a case may want its rows by depth. A round keeps both orders, so that the trace is
in the order of the case.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specverify.backends.adapt.blackbox import finish_of
from specverify.backends.adapt.drafting import Proposal
from specverify.reference.case import Case
from specverify.reference.trace import Accepted, Array, Committed, Drafted, Emitted, Kv, Scored, Step, Trace, frozen
from specverify.reference.tree import Tree


def by_depth(tree: Tree) -> tuple[int, ...]:
    """An order of the nodes in which parents come before children and siblings stay in their order."""
    return tuple(sorted(range(len(tree)), key=lambda node: tree.depth[node]))


@dataclass
class Round:
    """A round of the engine: the tree that was proposed, and what the engine made of it.

    Attributes:
        proposed: The tree in the order of the case.
        before: The cache before the forward, a column for each token of the context; None for no column.
        order: The node of the case in each row of the engine.
        logits: The target's logits as the engine's verifier was given them, [rows, vocabulary].
        law: The law that the engine made of them, [rows, vocabulary]; None for greedy decoding.
        hidden: The states that the draft reads, [rows, width]; None where it reads none.
        path: The accepted rows of the engine, without the root.
        bonus: The token after them.
        verified: The cache after the forward and before the commit, with the columns of `before`.
        after: The cache after the commit.
    """

    proposal: Proposal
    before: Kv | None = None
    order: tuple[int, ...] = field(init=False)
    logits: Tensor | None = None
    law: Tensor | None = None
    hidden: Tensor | None = None
    path: Sequence[int] = ()
    bonus: int = -1
    verified: Kv | None = None
    after: Kv | None = None

    def __post_init__(self) -> None:
        self.order = by_depth(self.proposal.tree)

    @property
    def tree(self) -> Tree:
        """The proposed tree in the order of the engine, by depth."""
        return self.proposal.tree.renumber(self.order)

    def nodes(self, rows: Tensor | None) -> Array | None:
        """`rows` [rows, ...] of the engine in the order of the case's nodes."""
        if rows is None:
            return None
        row_of = sorted(range(len(self.order)), key=self.order.__getitem__)
        return array(rows[torch.tensor(row_of)])


def array(tensor: Tensor) -> Array:
    """A read-only NumPy copy; bfloat16, which NumPy lacks, is widened to float32."""
    host = tensor.detach().cpu()
    return frozen((host.float() if host.dtype == torch.bfloat16 else host).numpy())


def kv_of(keys: Sequence[Tensor], values: Sequence[Tensor], length: int) -> Kv | None:
    """The first `length` columns of a cache, given by layer as [kv_heads, columns, head_dim]; None for no column."""
    if not keys or not length:
        return None
    return Kv(
        array(torch.stack([layer[:, :length] for layer in keys])),
        array(torch.stack([layer[:, :length] for layer in values])),
    )


def needs_round(case: Case, rounds: Sequence[Round], output: Sequence[int]) -> bool:
    """Whether the text `output` of the request `case` has no end yet, and the case asks for more rounds."""
    if case.steps and len(rounds) >= case.steps:
        return False
    return finish_of(case, tuple(output)) is None


def trace_of_rounds(case: Case, rounds: Sequence[Round], output: tuple[int, ...]) -> Trace:
    """The trace of the rounds of one request; each emitted as many tokens of `output` as it accepted, and one more.

    An output that ends inside a block leaves the KV of the tokens behind its end unclaimed. An engine that cannot be
    ended after `case.steps` rounds ran on: what it did behind them is left out.
    """
    steps = []
    context = case.prefix
    if case.steps and len(rounds) > case.steps:
        rounds = rounds[: case.steps]
        output = output[: sum(len(turn.path) + 1 for turn in rounds)]
    remaining = output
    for turn in rounds:
        proposal = turn.proposal
        tokens = remaining[: len(turn.path) + 1]
        remaining = remaining[len(turn.path) + 1 :]
        length = len(context) + len(tokens)
        after = (
            turn.after if turn.after is None else Kv(turn.after.keys[:, :, :length], turn.after.values[:, :, :length])
        )
        logits = turn.nodes(turn.logits)
        steps.append(
            Step(
                context,
                drafted=Drafted(
                    proposal.tree,
                    None if proposal.logits is None else array(proposal.logits),
                    proposal.draft_ids,
                    None if proposal.proposal is None else array(proposal.proposal),
                    proposal.given,
                ),
                scored=None if logits is None else Scored(logits, turn.nodes(turn.law), turn.nodes(turn.hidden)),
                accepted=Accepted((0, *(turn.order[row] for row in turn.path)), turn.bonus),
                emitted=Emitted(tokens, finish_of(case, output) if not remaining else None),
                committed=Committed(length, turn.before, turn.verified, after),
            )
        )
        context = (*context, proposal.tree.token[0], *tokens[:-1])
    return Trace(tuple(steps), output, finish_of(case, output))
