"""One request inside the engine: its tokens, caches and draft, and the phases of one speculative step of it."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from backends.engine import stops
from backends.engine.draft.base import Draft, Proposal
from backends.engine.draft.truncation import truncated
from backends.engine.kv.arena import CacheLease
from backends.engine.kv.branch import Branch
from backends.engine.lower_tree import TreeTensors, check_structure
from backends.engine.model.causal_lm import CausalLm, Rows
from backends.engine.sampling.step import StepSampling
from backends.engine.step_seams import StepSeams
from backends.engine.tracing import Revealer
from reference.case import Case
from reference.trace import Accepted, Accounting, Committed, Emitted, Kv, Stage, Step, Trace


@dataclass
class Block:
    """The step under way, between drafting its tree and settling it; `nodes` says which drafted rows the tree kept."""

    proposal: Proposal
    nodes: list[int]
    chance: StepSampling | None
    tensors: TreeTensors
    before: Kv | None


@dataclass
class Counters:
    """The counters of a request; `lengths` holds the number of accepted drafted tokens of each step."""

    proposed: int = 0
    lengths: list[int] = field(default_factory=list)


class Request:
    """From prompt to stop, root pending: the committed cache lacks the last token and nothing else.

    Attributes:
        tokens: Prompt and output so far.
        lease: Its caches.
        draft: What proposes its trees.
        finish: Why it is over, or None.
        at: The stage that it is in, for whoever must say where a run broke.
        verified: Hidden states of its rows in the verify forward, [R, width], where its draft reads some.
    """

    def __init__(self, case: Case, target: CausalLm, lease: CacheLease, draft: Draft, seams: StepSeams) -> None:
        self.case = case
        self.tokens = list(case.prompt)
        self.lease = lease
        self.draft = draft
        self.finish: str | None = None
        self.at = Stage.DRAFTED
        self.verified: Tensor | None = None
        self._target = target
        self._seams = seams
        self._reveal = Revealer()
        self._position = len(case.prefix)
        self._limits, self._written = stops.limits(case), stops.Written()
        self._counters = Counters()
        self._steps: list[Step] = []
        self._hidden: list[Tensor] = []  # of every committed token, where the draft reads them
        self._block: Block | None = None

    def prefill(self) -> None:
        """Commit every token but the pending root; what the cache holds already is not run again."""
        self.at = Stage.ATTENDED
        cache = self.lease.target
        missing = tuple(self.tokens[cache.length : -1])
        attend, lanes = self._seams.prefill_attend or self._seams.attend, self._seams.kv.single
        chunk, reads = self.case.layout.prefill_chunk, self.case.draft.reads
        if reads is not None and cache.length:
            raise ValueError("a draft that reads hidden states needs those of tokens whose KV was there already")
        self._hidden = self._target.prefill(missing, cache, attend, chunk, lanes, reads)

    def propose(self) -> None:
        """Draft a tree."""
        self.at = Stage.DRAFTED
        chance = self._chance()
        sampled = chance if chance is not None and chance.samples else None
        proposal = self.draft.propose(self.tokens, sampled, self._states())
        layout, reaches = self.case.layout, self._target.reaches
        nodes = list(range(len(proposal.tree)))
        if layout.stay_in_chunk:
            nodes = self._seams.inside_chunk(proposal.tree, self._position, reaches)
            proposal = truncated(proposal, nodes)
        cache, before = self.lease.target, self._reveal.kv(self.lease.target)
        self.at = Stage.LOWERED
        tensors = self._seams.tensorise(proposal.tree, cache.length, self._position, reaches, layout.padded_nodes)
        check_structure(tensors, cache.length, self.case.max_positions)
        self._block = Block(proposal, nodes, chance, tensors, before)
        self.at = Stage.ATTENDED

    def abandon(self) -> None:
        """Throw the drafted tree back before it is verified."""
        self.draft.abandon()
        self._block = None

    @property
    def rows(self) -> Rows:
        """The rows that the request brings to the verify forward."""
        assert self._block is not None
        tensors = self._block.tensors
        return Rows(tensors.token, tensors.position, tensors.visible, self.lease.target)

    def settle(self, flat: Tensor, heads: list[Tensor]) -> None:
        """Accept, emit and commit.

        Args:
            flat: Logits of its rows in the verify forward, [R, vocabulary].
            heads: Attention outputs of its rows by layer, [heads, R, head_dim].
        """
        assert self._block is not None
        block, self._block, case, reveal = self._block, None, self.case, self._reveal
        tree, tensors, chance = block.proposal.tree, block.tensors, block.chance
        context = tuple(self.tokens[:-1])
        attended = reveal.attended(heads, tensors)
        self.at = Stage.SCORED
        logits = self._seams.score(flat, tensors.retrieve_index)
        verified = reveal.kv(self.lease.target)

        self.at = Stage.ACCEPTED
        law = told = None
        if chance is None or case.sampling.greedy:
            scores = logits if chance is None else chance.scores(tree, logits)
            path, bonus = self._seams.walk(tensors, scores)
        else:
            path, bonus, law, told = chance.accept(tree, logits, block.proposal.proposal)
        self.at = Stage.EMITTED
        accepted = [*(tree.token[row] for row in path[1:]), bonus]
        emitted, self.finish = self._seams.clip(accepted, self._written, self._limits)
        self._written = stops.follow(self._written, emitted, self._limits)
        logprobs = self._seams.logprobs(logits)[path[: len(emitted)], emitted[: len(path)]].tolist()
        # Emitted tokens but the last have their KV in the tree: the root's, then that of each accepted row.
        kept = path[: len(emitted)]
        self.at = Stage.COMMITTED
        fallback = self._seams.commit(self.lease.target, kept)
        self._position += self._seams.advance(len(kept))
        self.draft.settle([block.nodes[row] for row in kept])
        self.tokens += emitted
        if self.verified is not None:
            self._hidden.append(self.verified[kept])
        self._counters.proposed += len(tree) - 1
        self._counters.lengths.append(len(path) - 1)
        self._steps.append(
            Step(
                context,
                reveal.drafted(block.proposal, told),
                reveal.lowered(tensors),
                attended,
                reveal.scored(logits, law, self._scored_states(tensors)),
                Accepted(tuple(path), bonus, None if law is None or chance is None else chance.spent),
                Emitted(tuple(emitted), self.finish, tuple(logprobs)),
                self._committed(block.before, verified, fallback),
            )
        )

    def _states(self) -> Tensor | None:
        """Hidden states of the committed tokens, [len(tokens) - 1, width]; None where the draft reads none."""
        reads = self.case.draft.reads
        if reads is None:
            return None
        if not self._hidden:  # a prompt of one token: nothing is committed yet
            width = reads.parts * int(self._target.model.config.hidden_size)
            return torch.empty(0, width, dtype=self._target.dtype, device=self._target.device)
        return torch.cat(self._hidden)

    def _scored_states(self, tensors: TreeTensors) -> Tensor | None:
        """Hidden states of the verify forward, a row for each node."""
        return None if self.verified is None else self.verified[tensors.retrieve_index.to(self.verified.device)]

    def _chance(self) -> StepSampling | None:
        """The coins and the history that decide in this step; None for plain greedy decoding."""
        sampling = self.case.sampling
        if sampling.greedy and not sampling.processes:
            return None
        return StepSampling(self.case, self._told, self._coined, self._target.device, self._seams.sampling)

    @property
    def _told(self) -> tuple[int, ...]:
        """The output so far, which penalties and custom processors look back at."""
        return tuple(self.tokens[len(self.case.prompt) :])

    @property
    def _coined(self) -> int:
        """How many steps have taken their coins: every step has coins of its own, even if it draws none."""
        return len(self._counters.lengths)

    def _committed(self, before: Kv | None, verified: Kv | None, fallback: str | None) -> Committed:
        reveal, cache = self._reveal, self.lease.target
        way = cache.way if isinstance(cache, Branch) else None
        return Committed(cache.length, before, verified, reveal.kv(cache), reveal.kv(self.draft.cache), fallback, way)

    @property
    def trace(self) -> Trace:
        """The trace of the request so far."""
        counters, taken = self._counters, sum(self._counters.lengths)
        accounting = Accounting(
            verify_calls=len(self._steps),
            draft_calls=self.draft.calls,
            proposed=counters.proposed,
            accepted=taken,
            rejected=counters.proposed - taken,
            accept_lengths=tuple(counters.lengths),
        )
        return Trace(tuple(self._steps), tuple(self.tokens[len(self.case.prompt) :]), self.finish, accounting)


def gather(batch: list[Request]) -> list[Rows]:
    """The rows of each request of `batch`, all of which have a tree, for one verify forward, in the batch's order."""
    return [request.rows for request in batch]
