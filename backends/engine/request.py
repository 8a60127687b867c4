"""One request inside the engine, and the phases of its speculative step.

A request holds its tokens, caches and draft. The server calls `prefill` once, then for every step `propose` (draft and
lower a tree), its own batched verify forward over `rows`, and `settle` (accept, emit, commit). Each phase sets `stage`,
so that an exception can be assigned to a stage.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.engine import stops
from specverify.backends.engine.collectives import Group
from specverify.backends.engine.draft.base import Draft, OwnRows, Proposal, inside_chunk, truncate_proposal
from specverify.backends.engine.guided.guide import advance, open_guide
from specverify.backends.engine.kv.arena import CacheLease
from specverify.backends.engine.kv.branch import Branch
from specverify.backends.engine.kv.choices import UNKNOWN, choices_beside
from specverify.backends.engine.lower_tree import TreeTensors, broken_rules, refuse_broken
from specverify.backends.engine.model.axes import axes_of
from specverify.backends.engine.model.causal_lm import CausalLm, Rows
from specverify.backends.engine.model.low_rank import low_rank_of
from specverify.backends.engine.overlap import LaunchedRow
from specverify.backends.engine.sampling.step import StepSampling
from specverify.backends.engine.step.prefilling import Prefilling
from specverify.backends.engine.step.state import Block, Counters, Emission, Verification
from specverify.backends.engine.step_seams import StepSeams
from specverify.backends.engine.tracing import Revealer
from specverify.backends.engine.uploads import upload
from specverify.reference.case import Case
from specverify.reference.trace import Accepted, Accounting, Committed, Emitted, Stage, Step, TargetCalls, Trace
from specverify.reference.tree import Tree


class Request(Prefilling):
    """A request from its prompt to its stop, root pending: the committed cache lacks the last token alone.

    Attributes:
        case: What is asked of the engine.
        target: The model that verifies.
        seams: The functions of a step; a request may replace them between two phases.
        tokens: Prompt and output so far; a placeholder stands for the tokens of each step whose results are on the way.
        lease: The caches of the request.
        draft: The draft that proposes its trees.
        block: The state between `propose` and `settle`; None outside.
        position: The rotary position of the pending root.
        steps: What each step so far reveals.
        finish: The reason why the request ended, or None.
        stage: The current stage, to which a StageFailure assigns an exception.
        guide: The position in its grammar; None without one. It stays when the caches are given away.
        adapter: The adapter of its forwards of the target; None without one. The draft runs without it.
        axes: Its positions on three axes, in forwards of the target alone; None for a prompt without images.
        verify_states: Hidden states of its rows in the verify forward, [R, width]; None if its draft reads none.
        fill: From tokens with placeholders to the tokens that the device has in their places.
        group: This rank's door to the others; None where the draft is not shared out among ranks.
    """

    group: Group | None = None

    def __init__(self, case: Case, target: CausalLm, lease: CacheLease, draft: Draft, seams: StepSeams) -> None:
        self.case = case
        self.tokens = list(case.prompt)
        self.lease = lease
        self.draft = draft
        self.finish: str | None = None
        self.earlier_calls = Counter[str]()
        self.stage = Stage.DRAFTED
        self.verify_states: Tensor | None = None
        self.fill: Callable[[list[int]], list[int]] = list
        self.target = target
        self.seams = seams
        self._reveal = Revealer()
        self.position = len(case.prefix)
        self._limits = stops.limits(case)
        self._written = stops.OutputTail()
        self.counters = Counters()
        self.steps = list[Step]()
        self._hidden: list[Tensor] = []  # of every committed token, where the draft reads them
        self.block: Block | None = None
        grammar = case.sampling.grammar
        self.guide = None if grammar is None else open_guide(grammar, case.stops.eos)
        self.adapter = low_rank_of(case.model, target.dtype, target.device)
        self.axes = axes_of(case.model)

    def propose(self) -> None:
        """Draft a tree, cut it to the chunk of its root where the layout demands it, and lower it."""
        chance, arguments = self.begin_drafting()
        self.lower(self.ask_draft(*arguments), chance)

    def ask_draft(
        self, tokens: list[int], chance: StepSampling | None = None, hidden: Tensor | None = None
    ) -> Proposal:
        """The proposal of the draft; see `Draft.propose`."""
        return self.draft.propose(tokens, chance, hidden)

    def settle_draft(self, rows: list[int]) -> None:
        """Let the draft keep `rows` of its tree; see `Draft.settle`."""
        self.draft.settle(rows)

    def begin_drafting(self) -> tuple[StepSampling | None, tuple[list[int], StepSampling | None, Tensor | None]]:
        """The sampling of a step that begins, and the arguments with which its draft proposes."""
        chance = self._chance()
        self.stage = Stage.DRAFTED
        # A greedy request with penalties has a `chance` for its scores, but draws no token of its draft.
        sampled = chance if chance is not None and chance.samples else None
        return chance, (self.device_tokens, sampled, self._states())

    def propose_root(self) -> None:
        """Lower the root alone; the draft is not asked, so that a first token need not wait for the draft's prefill."""
        self.stage = Stage.DRAFTED
        self.lower(Proposal(Tree((0,), (self.device_tokens[-1],))), self._chance(), bare=True)

    def lower(self, proposal: Proposal, chance: StepSampling | None, bare: bool = False) -> None:
        """Take `proposal` as the tree of the step, cut to the chunk of its root where the layout demands it."""
        layout = self.case.layout
        reaches = self.target.reaches
        nodes = list(range(len(proposal.tree)))
        if layout.stay_in_chunk:
            nodes = self.inside_chunk(proposal.tree)
            proposal = truncate_proposal(proposal, nodes)
        cache = self.lease.target
        kv_before = self._reveal.kv(self.lease.target)
        self.stage = Stage.LOWERED
        tensors = self.seams.lower_tree(proposal.tree, cache.length, self.position, reaches, layout.padded_nodes)
        broken = broken_rules(tensors, cache.length, self.case.max_positions)
        if tensors.words is None:
            refuse_broken(broken)
        self.block = Block(
            proposal, nodes, chance, tensors, kv_before, self._reveal.recurrent(cache), bare, broken=broken
        )
        self.stage = Stage.ATTENDED

    def inside_chunk(self, tree: Tree) -> list[int]:
        """The rows of a drafted tree in the chunk of its root."""
        return inside_chunk(tree, self.position, self.target.reaches)

    def abandon(self) -> None:
        """Discard the drafted tree before it is verified."""
        self.draft.abandon()
        self.block = None

    @property
    def rows(self) -> Rows:
        """The rows of the request in the verify forward."""
        assert self.block is not None
        tensors = self.block.tensors
        cache = self.lease.target
        # A device would have to send the parents to the host: only those who go by paths are told them.
        by_path = bool(self.target.recurrent or self.case.layout.branches)
        parents = [-1, *tensors.parent[1:].tolist()] if by_path else None
        positions_by_axis = None if self.axes is None else self.axes.of_text(tensors.position)
        return Rows(
            tensors.token,
            tensors.position,
            tensors.visible,
            cache,
            parents,
            tensors.words,
            self.adapter,
            positions_by_axis,
            len(self.block.proposal.tree) if self.case.layout.poison == "nan" else -1,
        )

    def settle(self, flat: Tensor, heads: list[Tensor]) -> None:
        """Accept a path of the tree, emit its tokens and commit its rows.

        `flat` holds the logits of the rows of all requests in the verify forward, [rows, vocabulary], `heads` the
        attention outputs of the request's own rows by layer, [heads, R, head_dim].
        """
        verdict = self.accept(flat, heads)
        emission = self.emit(verdict)
        # As many rows as emitted tokens: the root and the accepted rows, but not the last emitted token, whose KV is
        # not written yet. It is the next root.
        self.record(verdict, emission, self.commit(verdict, verdict.path[: len(emission.tokens)]))

    def accept(self, flat: Tensor, heads: list[Tensor]) -> Verification:
        """Accept a path of the tree; `flat` and `heads` as in `settle`."""
        assert self.block is not None
        block = self.block
        self.block = None
        case = self.case
        reveal = self._reveal
        tree = block.proposal.tree
        tensors = block.tensors
        chance = block.chance
        context = tuple(self.device_tokens[:-1])
        if tensors.words is not None:  # of a tree lowered on a device: read only now, after the forward
            self.stage = Stage.LOWERED
            refuse_broken(block.broken)
        attended = reveal.attended(heads, tensors)
        self.stage = Stage.SCORED
        logits = self.seams.score(flat, block.index)
        # The committed columns once more: a verify forward must leave them as they are.
        verified = reveal.kv(self.lease.target)
        recurrent = reveal.recurrent_root(self.lease.target)

        self.stage = Stage.ACCEPTED
        law = proposal_law = None
        if chance is None or case.sampling.greedy:
            # Penalties and processors change the arg-max of greedy decoding too.
            scores = logits if chance is None else chance.scores(tree, logits)
            path, bonus = self.seams.walk(tensors, scores)
        else:
            path, bonus, law, proposal_law = chance.accept(tree, logits, block.proposal.proposal)
        self.stage = Stage.EMITTED
        step = Step(
            context,
            reveal.drafted(block.proposal, proposal_law, self.case.draft.reads),
            reveal.lowered(tensors, self._axes_of_columns(len(context), tensors)),
            attended,
            reveal.scored(
                logits,
                law,
                self._scored_states(tensors),
                None if chance is None else chance.masks,
                *self._choices(len(context), tensors, tree),
                self._stored(len(context), tensors),
            ),
            Accepted(tuple(path), bonus, None if law is None or chance is None else chance.spent),
        )
        accepted = [*(tree.token[row] for row in path[1:]), bonus]
        return Verification(block, step, path, accepted, logits, verified, recurrent)

    def emit(self, verdict: Verification) -> Emission:
        """Cut the accepted tokens where the output ends; the grammar reads those that are left."""
        path = verdict.path
        emitted, self.finish = self.seams.clip(verdict.accepted, self._written, self._limits)
        emitted, self.finish = self.read_grammar(emitted, self.finish)
        self._written = stops.follow(self._written, emitted, self._limits)
        # The i-th emitted token was chosen at the i-th row of the path, from its unprocessed logits.
        device = verdict.logits.device
        rows = upload(torch.tensor(path[: len(emitted)], dtype=torch.long), device)
        tokens = upload(torch.tensor(emitted[: len(path)], dtype=torch.long), device)
        logprobs = self.seams.logprobs(verdict.logits)[rows, tokens].tolist()
        return Emission(emitted, self.finish, tuple(logprobs))

    def read_grammar(self, emitted: list[int], finish: str | None) -> tuple[list[int], str | None]:
        """The emitted tokens that a grammar leaves, if there is one, and the reason to end; see `advance`."""
        return (emitted, finish) if self.guide is None else advance(self.guide, emitted, finish)

    def emit_launched(self, part: LaunchedRow) -> Emission:
        """The emitted tokens of `part`; stop rules and grammar read the accepted tokens once, whoever asks first."""
        if part.emission is None:
            part.emission = self.emit(part.verdict)
        return part.emission

    def commit(self, verdict: Verification, rows: list[int]) -> Committed:
        """Keep `rows` of the verified tree in the target's cache, and in the draft's those that it was fed."""
        self.stage = Stage.COMMITTED
        block = verdict.block
        length = self.lease.target.length
        fallback = self.seams.commit(self.lease.target, rows)
        choices_beside(self.lease.target).commit(length, rows)
        self.move_root(len(rows))
        # The draft knows its tree as it drafted it, before rows beyond the chunk were cut.
        if not block.bare:
            self.settle_draft([block.nodes[row] for row in rows])
        if self.verify_states is not None:
            states = self.accepted_states(self.verify_states, block.proposal.tree, rows)
            self._hidden.append(states)
            self.keep_states(length, states)
        return self._committed(verdict, fallback)

    def move_root(self, num_rows: int) -> None:
        """Move the root as many positions on as rows were kept: each of them is one token."""
        self.position += num_rows

    def record(self, verdict: Verification, emission: Emission, committed: Committed) -> None:
        """Add the emitted tokens to the text, and the step to what the request reveals."""
        self.tokens += emission.tokens
        self.counters.proposed += len(verdict.block.proposal.tree) - 1
        self.counters.lengths.append(len(verdict.path) - 1)  # the whole path, even if a stop cuts the emitted tokens
        emitted = Emitted(tuple(emission.tokens), emission.finish, emission.logprobs)
        shown_commit = replace(committed, matched=None if self.guide is None else self.guide.read)
        self.bare += verdict.block.bare
        self.steps.append(replace(verdict.step, emitted=emitted, committed=shown_commit))

    def accepted_states(self, verified: Tensor, tree: Tree, rows: list[int]) -> Tensor:
        """The hidden states [rows, width] of the root and the emitted nodes, among those of all rows [R, width]."""
        return verified[upload(torch.tensor(rows), verified.device)]

    def _states(self) -> Tensor | None:
        """Hidden states of the committed tokens, [len(tokens) - 1, width]; None if the draft reads none."""
        reads = self.case.draft.reads
        if reads is None:
            return None
        if not self._hidden:  # a prompt of one token: nothing is committed yet
            width = reads.parts * int(self.target.model.config.hidden_size)
            return torch.empty(0, width, dtype=self.target.dtype, device=self.target.device)
        return torch.cat(self._hidden)

    def _scored_states(self, tensors: TreeTensors) -> Tensor | None:
        """Hidden states of the verify forward, one row per node; None if the draft reads none."""
        return (
            None
            if self.verify_states is None
            else self.verify_states[upload(tensors.retrieve_index, self.verify_states.device)]
        )

    def _axes_of_columns(self, context: int, tensors: TreeTensors) -> Tensor | None:
        """The positions on three axes of `context` columns and of the rows, [3, C]; None for a target of one axis."""
        if not self.target.three_axes:
            return None
        cache = self.lease.target
        rows = range(cache.length, cache.length + len(tensors.parent))
        return choices_beside(cache).axes_of([*range(context), *rows])

    def _choices(self, context: int, tensors: TreeTensors, tree: Tree) -> tuple[Tensor | None, Tensor | None]:
        """The experts of the rows of `context` columns and of each node, and their columns by position.

        [layers, rows, taken] each; None if none is known. Those of a committed column are the ones of the forward that
        wrote it.
        """
        cache = self.lease.target
        choices = choices_beside(cache)
        if not choices.rows:  # nothing is known, and the host need not read the nodes' rows
            return None, None
        nodes = [cache.length + row for row in tensors.retrieve_index.tolist()]
        experts = choices.experts_of([*range(context), *nodes])
        if not self.target.indexed or len(nodes) != len(tree):
            return experts, None
        paths = [[nodes[above] for above in tree.path(node)] for node in range(len(tree))]
        return experts, choices.columns_of(context, paths)

    def _stored(self, context: int, tensors: TreeTensors) -> Tensor | None:
        """The codes of the rows of `context` columns and of each node, [layers, rows, widest row].

        They are read from the cache as they stand there. None where it stores keys and values as they are.
        """
        cache = self.lease.target
        if cache.codec is None:
            return None
        nodes = [cache.length + row for row in tensors.retrieve_index.tolist()]
        index = upload(torch.tensor([*range(context), *nodes], dtype=torch.long), self.target.device)
        codes = []
        for layer in range(cache.layers):
            keys, values = (cells.index_select(-2, index) for cells in cache.read(layer))
            codes.append(cache.codec.shown_codes(layer, (keys, values)))
        widest = max(rows.shape[1] for rows in codes)
        return torch.stack(
            [torch.nn.functional.pad(rows, (0, widest - rows.shape[1]), value=UNKNOWN) for rows in codes]
        )

    def _chance(self) -> StepSampling | None:
        """The coins and the history of this step; None for plain greedy decoding."""
        sampling = self.case.sampling
        if sampling.greedy and not sampling.processes:
            return None
        return StepSampling(
            self.case, self.device_output, self.coined_steps, self.target.device, self.seams.sampling, self.guide
        )

    @property
    def device_tokens(self) -> list[int]:
        """Prompt and output so far as the device knows them, which is up to a step further than the host."""
        return self.fill(self.tokens)

    @property
    def resolved_tokens(self) -> list[int]:
        """Prompt and output so far as the host knows them."""
        return [token for token in self.tokens if token >= 0]

    @property
    def keepable_tokens(self) -> tuple[int, ...]:
        """The tokens whose columns may serve other requests: those above the first row of a head's own.

        A page is known by its tokens, and such a row follows from what was drafted. Of a prompt that is not filled yet
        only the tokens that have columns count.
        """
        own_rows = self.draft.own_rows if isinstance(self.draft, OwnRows) else []
        tokens = self.resolved_tokens[: self.lease.target.length] if self.filling else self.resolved_tokens
        return tuple(tokens[: own_rows[0]] if own_rows else tokens)

    @property
    def device_output(self) -> tuple[int, ...]:
        """The output so far, which penalties and custom processors read."""
        return tuple(self.device_tokens[len(self.case.prompt) :])

    @property
    def coined_steps(self) -> int:
        """The number of steps whose coins are used up: every step owns coins, even if it draws none."""
        return len(self.counters.lengths) + len(self.tokens) - len(self.resolved_tokens)

    def rewind(self) -> None:
        """Go back to what the host knows: results on the way are forgotten, and the caches are to be prefilled."""
        self.tokens = self.resolved_tokens
        self.position = len(self.tokens) - 1
        output = list(self.device_output)
        self._written = stops.follow(stops.OutputTail(), output, self._limits)
        grammar = self.case.sampling.grammar
        if grammar is not None:
            self.guide = open_guide(grammar, self.case.stops.eos)
            self.read_grammar(output, None)

    def _committed(self, verdict: Verification, fallback: str | None) -> Committed:
        reveal, block, verified = self._reveal, verdict.block, verdict.verified
        cache = self.lease.target
        way = cache.way if isinstance(cache, Branch) else None  # other layouts have one way to commit
        kv_after = reveal.kv(cache)
        draft = reveal.kv(self.draft.cache)
        recurrent = block.recurrent, reveal.recurrent(cache), verdict.recurrent
        return Committed(cache.length, block.before, verified, kv_after, draft, fallback, way, None, *recurrent)

    @property
    def trace(self) -> Trace:
        """The trace of the request so far."""
        counters = self.counters
        num_accepted = sum(self.counters.lengths)
        accounting = Accounting(
            verify_calls=len(self.steps),
            draft_calls=self.draft.calls,
            proposed=counters.proposed,
            accepted=num_accepted,
            rejected=counters.proposed - num_accepted,
            accept_lengths=tuple(counters.lengths),
            target_calls=TargetCalls(**{kind: self.target_calls[kind] for kind in ("prefill", "decode", "verify")}),
        )
        output = tuple(self.resolved_tokens[len(self.case.prompt) :])
        return Trace(tuple(self.steps), output, self.finish, accounting, prompt_logprobs=self.prompt_logprobs)
