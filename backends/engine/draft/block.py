"""The drafts of blocks of the engine, which run one forward for all slots of a block.

Column i of the cache holds the keys and values that `fc` and the projections make of the target's states at position i.
A step appends the columns of newly committed tokens, then opens the rows of the block, whose keys and values are rolled
back when the step is settled: they were made from mask tokens.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.engine.columns import Attend
from specverify.backends.engine.draft.base import HeadRows, Opening, Proposal, heads, opens
from specverify.backends.engine.draft.filling import TreeFilling, run_levels
from specverify.backends.engine.kv.base import KvCache
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.model.causal_lm import CausalLm
from specverify.backends.engine.model.head import HeadModel, SeenRows
from specverify.backends.engine.reach import Reach
from specverify.backends.engine.sampling.step import StepSampling
from specverify.backends.engine.step_seams import StepSeams
from specverify.backends.engine.uploads import upload
from specverify.reference.case import Case
from specverify.reference.draft.block import (
    BIAS,
    CONFIDENCE_HEAD,
    CONVOLUTIONS,
    MARKOV_PREFIX,
    PREDECESSOR,
    PREVIOUS,
    SELECTOR,
    SIDES,
    SUCCESSOR,
    Block,
    layer_prefix,
)
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.tree import Tree


class BlockHead(HeadModel):
    """The decoder layers of a draft of blocks, whose rows are slots; committed columns are made of states alone.

    Attributes:
        settings: The words of the draft.
    """

    settings: Block

    def prefix(self, module: int) -> str:
        """See `HeadModel`."""
        return layer_prefix(module)

    def of_target(self, hidden: Tensor) -> Tensor:
        """See `HeadModel`: the context of each state, of which every layer makes keys and values."""
        return self.norm(self.linear(hidden, "fc"), "hidden_norm")

    def fuse(self, embedded: Tensor, states: Tensor, module: int = 0) -> tuple[Tensor, Tensor]:
        """See `HeadModel`; the first layer reads the embeddings of slots, a later one the layer before."""
        stream = states if module else embedded
        return self.norm(stream, f"{layer_prefix(module)}.input_layernorm"), stream

    def project_heads(self, x: Tensor, name: str, lanes: int) -> Tensor:
        """See `HeadModel`; queries and keys are normed by head."""
        projected = super().project_heads(x, name, lanes)
        norm = f"{name.removesuffix('_proj')}_norm"
        return self.norm(projected, norm) if f"{norm}.weight" in self.weights else projected

    def attention(
        self,
        module: int,
        x: Tensor,
        tables: tuple[Tensor, Tensor],
        mask: Tensor,
        batch: BatchCache,
        attend: Attend,
    ) -> Tensor:
        """See `HeadModel`; the slots are convolved before and after it."""
        before, after = self.kernels(x, f"{self.prefix(module)}.{CONVOLUTIONS[0]}")
        output = super().attention(module, self.convolve(x, before), tables, mask, batch, attend)
        return self.convolve(output, after)

    def feed_forward(self, x: Tensor, module: int) -> Tensor:
        """See `HeadModel`; the slots are convolved before and after it."""
        before, after = self.kernels(x, f"{self.prefix(module)}.{CONVOLUTIONS[1]}")
        return self.convolve(super().feed_forward(self.convolve(x, before), module), after)

    def kernels(self, x: Tensor, name: str) -> tuple[Tensor | None, Tensor | None]:
        """The kernels [slots, taps, hidden] of the convolutions `name` before and after a part; None without any.

        `x` [slots, hidden] is the normed input of the part.
        """
        words = self.settings
        if not words.conv_taps:
            return None, None
        deltas = self.linear(x, f"{name}.kernel_projection").view(len(x), SIDES, words.conv_taps, -1)
        kernels = self.weights[f"{name}.base_kernel"] + deltas.repeat_interleave(words.conv_group, -1)
        return kernels[:, 0], kernels[:, 1]

    def convolve(self, x: Tensor, kernel: Tensor | None) -> Tensor:
        """The slots `x` [slots, hidden] of one block through a causal convolution; as they are without a `kernel`."""
        if kernel is None:
            return x
        output = kernel[:, 0] * x
        for tap in range(1, kernel.shape[1]):
            output = output + kernel[:, tap] * self.shift(x, tap)
        return output

    def shift(self, x: Tensor, tap: int) -> Tensor:
        """The slot `tap` places before each slot of `x` [slots, hidden]; zeros before the block."""
        return torch.cat([torch.zeros_like(x[:tap]), x[:-tap]])[: len(x)]

    def append(
        self,
        tokens: list[int],
        states: Tensor,
        cache: KvCache,
        attend: Attend,
        lanes: type[BatchCache] = BatchCache,
        seen: SeenRows | None = None,
    ) -> Tensor:
        """Commit a column for each of `states` [R, hidden], contexts of `of_target`; no token takes part."""
        self.append_context(states, cache, lanes)
        return states

    @torch.no_grad()
    def append_context(self, context: Tensor, cache: KvCache, lanes: type[BatchCache]) -> None:
        """Commit the columns of `context` [R, hidden], the contexts of the tokens behind those of `cache`."""
        count = len(context)
        positions = torch.arange(cache.length, cache.length + count)
        cos, sin = (table.view(1, 1, count, -1) for table in self.rotary_table(positions))
        cache.open(count)
        batch = lanes([cache], [count])
        for module in range(self.layers):
            name = f"{self.prefix(module)}.self_attn"
            keys, values = (self.project_heads(context, f"{name}.{part}_proj", 1) for part in "kv")
            self.keep_rows(batch, self.rotary(keys, cos, sin, module), values, module)
        cache.commit(list(range(count)))
        self.calls += 1

    def score(self, outputs: Tensor, module: int = 0) -> Tensor:
        """See `HeadModel`; the last layer's outputs alone are scored."""
        return self.score_normed(self.norm(outputs, "norm"))

    def score_normed(self, normed: Tensor) -> Tensor:
        """The scores [R, draft vocabulary] of normed outputs [R, hidden], without a Markov head's bias."""
        if "lm_head.weight" in self.weights:
            return self.linear(normed, "lm_head")
        return torch.nn.functional.linear(normed, self.target_head)

    def feed_back(self, outputs: Tensor, module: int = 0) -> Tensor:
        """See `HeadModel`; no row reads an output of another row."""
        return outputs

    @torch.no_grad()
    def markov_bias(self, tokens: list[int], normed: Tensor) -> Tensor:
        """The bias [draft vocabulary] behind `tokens`, a path from the root on.

        Args:
            tokens: The root's token and those below it.
            normed: The normed outputs [R, hidden] of the slots that score the children of these tokens.
        """
        embedded = self.weights[PREVIOUS][upload(torch.tensor(tokens), self.device)]
        kind = self.settings.markov
        latent = embedded[-1]
        if kind == "gated":
            gate = self.linear(torch.cat([normed[-1], latent])[None], f"{MARKOV_PREFIX}.gate_proj")[0]
            latent = latent * gate.sigmoid()
        elif kind == "rnn":
            memory = torch.zeros_like(latent)
            for previous, output in zip(embedded, normed, strict=True):
                joined = self.linear(torch.cat([memory, previous, output])[None], f"{MARKOV_PREFIX}.joint_proj")[0]
                gate, candidate, latent = joined.chunk(3)
                memory = gate.sigmoid() * memory + (1 - gate.sigmoid()) * candidate.tanh()
            latent = latent.tanh()
        return torch.nn.functional.linear(latent, self.weights[BIAS])

    @torch.no_grad()
    def select(self, scores: Tensor, normed: Tensor, previous: int) -> Tensor:
        """The scores [draft vocabulary] of the selector behind the token `previous`.

        Args:
            scores: The scores of the slot, [draft vocabulary].
            normed: The normed output of the slot, [hidden].
            previous: The token before.
        """
        candidates = self.candidates(scores)
        selected = torch.full_like(scores, -torch.inf)
        selected[candidates] = scores[candidates] + self.transitions(previous, normed, candidates)
        return selected

    @torch.no_grad()
    def confidence(self, previous: int, normed: Tensor) -> float:
        """The log-probability that the token of a slot is accepted, by its `normed` output [hidden].

        `previous` is the token before.
        """
        read = normed if self.settings.confidence == "state" else torch.cat([normed, self.weights[PREVIOUS][previous]])
        (logit,) = self.linear(read[None], CONFIDENCE_HEAD)[0].double()
        return float(torch.nn.functional.logsigmoid(logit))

    def candidates(self, scores: Tensor) -> Tensor:
        """The draft ids between which the selector chooses, by the scores of their slot."""
        return scores.sort(descending=True, stable=True).indices[: self.settings.selector_top_k]

    def transitions(self, previous: int, normed: Tensor, candidates: Tensor) -> Tensor:
        """The scores [candidates] of the steps from the token `previous` to the `candidates`."""
        hidden = self.linear(normed[None], f"{SELECTOR}.hidden_projection")[0]
        return self.weights[SUCCESSOR][candidates] @ (self.weights[PREDECESSOR][previous] * hidden)


class BlockDraft(TreeFilling):
    """Fills a tree with the best tokens of the slot of each depth, or with tokens drawn from the slot's law.

    Attributes:
        head: The head.
        words: The words of the draft.
        cache: The head's cache; between steps it holds one column for each token whose state was known.
        reads: The hidden states of the target that the weights expect.
        rows: The columns of committed tokens that were appended since the last step was settled.
        adopted: The number of columns that the cache held when this draft was opened on it.
        normed: The normed outputs of the block's slots for this tree, [slots, hidden].
        scores: The scores of the slots without a Markov head's bias, [slots, draft vocabulary].
    """

    def __init__(self, head: BlockHead, words: Block, seams: StepSeams, cache: KvCache, chunk: int = 0) -> None:
        named_ids = torch.arange(head.vocab_size) if head.d2t is None else torch.arange(len(head.d2t)) + head.d2t.cpu()
        super().__init__(words.shape, named_ids, head.vocab_size, seams)
        self.head = head
        self.words = words
        self.cache: KvCache = cache
        self.reads: HiddenStates | None = head.reads
        self.rows: list[HeadRows] = []
        self.adopted = cache.length
        self.normed = torch.empty(0, 0)
        self.scores = torch.empty(0, 0)
        self._chunk = chunk

    def propose(self, tokens: list[int], chance: StepSampling | None = None, hidden: Tensor | None = None) -> Proposal:
        """Propose the tree under `tokens[-1]`; the bare root where no token before it has a state."""
        assert hidden is not None
        if len(tokens) == 1:
            return Proposal(Tree((0,), (tokens[-1],)))
        self.catch_up(tokens, hidden)
        self.normed = self.run_block(tokens[-1])
        self.scores = self.head.score_normed(self.normed)
        root = len(tokens) - 1
        root_scores = self.scores_behind([tokens[-1]])[None]
        proposal = run_levels(self.filling(tokens, root_scores, root, chance, self.words.fixed), self.feed)
        rows = self._head_rows(hidden)
        return replace(proposal, head_rows=rows)

    def catch_up(self, tokens: list[int], hidden: Tensor) -> None:
        """Append the columns that the cache lacks, in chunks of the layout's prefill."""
        start, end = self.cache.length, len(tokens) - 1
        width = min(self._chunk or end, self.cache.most_rows or end)
        for first in range(start, end, width):
            last = min(first + width, end)
            states = self.row_states(hidden, first, last)
            self.rows.append(HeadRows(first, tokens[first:last], states))
            self.append(states)
            self.calls += 1

    def append(self, states: Tensor) -> None:
        """Commit the columns of the target's `states` [R, width], those of the tokens behind the last column."""
        self.head.append_context(self.head.of_target(states), self.cache, self.seams.kv.single)

    def row_states(self, hidden: Tensor, first: int, last: int) -> Tensor:
        """The target's states of the columns `first` to `last` (exclusive), of `hidden`, those of all tokens."""
        return hidden[first:last]

    def run_block(self, root: int) -> Tensor:
        """Open the rows of the block under the token `root` and run them: their normed outputs, [slots, hidden]."""
        tokens = self.block_tokens(root)
        first = self.cache.length
        visible = [self.visible_columns(layer, first, len(tokens)) for layer in range(self.words.layers)]
        head = self.head

        def states_beside(module: int, outputs_above: list[Tensor]) -> Tensor:
            return outputs_above[-1] if module else head.embedding[:0]

        attend = self.seams.draft_attend
        inputs = torch.tensor(tokens)
        positions = self.slot_positions(first, len(tokens))
        outputs = head.through(inputs, states_beside, positions, visible, self.cache, attend, self.seams.kv.single)
        self.calls += 1
        return head.norm(outputs[-1], "norm")

    def block_tokens(self, root: int) -> list[int]:
        """The token of each slot: the root, then mask tokens."""
        return [root] + [self.words.mask_token] * (self.words.slots - 1)

    def slot_positions(self, first: int, count: int) -> Tensor:
        """The rotary positions int64 [slots] of `count` slots, the first of which has the column `first`."""
        return torch.arange(first, first + count)

    def visible_columns(self, layer: int, first: int, count: int) -> Tensor:
        """The columns that `count` slots see in `layer`, bool [slots, C]; the first slot has the column `first`."""
        columns = torch.arange(first + count)[None, :]
        rows = columns[0, first:, None]
        window = self.window(layer)
        visible = columns <= rows if self.is_causal(layer) else (columns == columns).expand(count, -1)
        return visible & (columns > rows - window) & (columns < rows + window) if window else visible

    def is_causal(self, layer: int) -> bool:
        """Whether slots of `layer` see no later slot."""
        return self.words.is_causal(layer)

    def window(self, layer: int) -> int:
        """The window of `layer`; 0 for none."""
        return self.words.window(layer)

    def slot_of(self, depth: int) -> int:
        """The slot that scores the children of nodes at `depth`."""
        return self.words.slot_of(depth)

    def scores_behind(self, path: list[int]) -> Tensor:
        """The scores [draft vocabulary] of the tokens behind `path`, the root's token and those below it."""
        depth = len(path) - 1
        scores = self.scores[self.slot_of(depth)]
        if self.words.selects:
            return self.head.select(scores, self.normed[self.slot_of(depth)], self.previous(path))
        if not self.words.markov_rank:
            return scores
        normed = torch.stack([self.normed[self.slot_of(level)] for level in range(depth + 1)])
        return scores + self.head.markov_bias(self.markov_path(path), normed)

    def confidence_at(self, node: int, token: list[int]) -> float | None:
        """See `TreeFilling`."""
        if not self.words.confidence:
            return None
        return self.head.confidence(token[node], self.normed[self.confidence_slot(self.shape.depth[node])])

    def confidence_slot(self, depth: int) -> int:
        """The slot whose output says how surely children of nodes at `depth` are accepted."""
        return self.slot_of(depth)

    def previous(self, path: list[int]) -> int:
        """The token before that the selector reads behind `path`."""
        return path[-1]

    def markov_path(self, path: list[int]) -> list[int]:
        """The tokens that the Markov head reads behind `path`."""
        return path

    def feed(self, level: list[int], token: list[int], root: int) -> Tensor:
        """See `TreeFilling`; nodes of one depth share a slot, and differ by the token before alone."""
        paths = [[token[ancestor] for ancestor in self.shape.path(node)] for node in level]
        return torch.stack([self.scores_behind(path) for path in paths])

    def settle(self, rows: list[int]) -> None:
        """Drop the rows of the block; the next `propose` appends the columns of the accepted tokens."""
        self.seams.roll_back(self.cache, [])
        self.rows = []

    def resume(self, cache: KvCache | None) -> None:
        """Continue with `cache`; the next `propose` appends all columns that it lacks."""
        assert cache is not None
        self.cache = cache
        self.adopted = cache.length
        self.rows = []

    def abandon(self) -> None:
        """Close the rows of the block; columns of committed tokens stay."""
        self.cache.commit([])

    def _head_rows(self, hidden: Tensor) -> HeadRows:
        """The columns that were appended since the last step was settled, as one."""
        first = self.rows[0].first if self.rows else self.cache.length
        tokens = [token for rows in self.rows for token in rows.tokens]
        states = torch.cat([hidden[:0], *(rows.hidden for rows in self.rows)])
        return HeadRows(first, tokens, states, self.adopted)


@heads(Block.TAG)
def make_head(case: Case, target: CausalLm, weights: Mapping[str, Tensor]) -> BlockHead:
    """The head of the case on its target."""
    draft = case.draft
    assert isinstance(draft, Block)
    head = BlockHead(draft.layer, draft.reads, weights, target, draft.layers)
    head.settings = draft
    head.reaches = [Reach(draft.window(layer)) for layer in range(draft.layers)]
    return head


@opens(Block.TAG)
def open_draft(opening: Opening) -> BlockDraft:
    """Open the head on the cache that the request has leased for it."""
    draft = opening.case.draft
    assert isinstance(draft, Block)
    assert isinstance(opening.model, BlockHead)
    assert opening.cache is not None
    return BlockDraft(opening.model, draft, opening.seams, opening.cache, opening.case.layout.prefill_chunk)
