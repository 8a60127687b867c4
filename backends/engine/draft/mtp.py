"""The MTP modules of the engine, each with a layer of one KV cache.

All modules have the same columns: column i stands for row i. Module m has no row for the first m tokens; what its layer
holds in a column without a row is hidden from its other rows.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.engine.captured.lanes import LaneRows
from specverify.backends.engine.columns import Attend
from specverify.backends.engine.draft.base import HeadRows, Opening, OwnRows, heads, opens
from specverify.backends.engine.draft.filling import Level
from specverify.backends.engine.draft.head import HeadDraft
from specverify.backends.engine.kv.base import CacheSpec, KvCache
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.kv.layouts import CACHES
from specverify.backends.engine.model.axes import axes_of
from specverify.backends.engine.model.causal_lm import CausalLm, causal
from specverify.backends.engine.model.head import HeadModel, SeenRows, StatesBeside
from specverify.backends.engine.model.target_layers import TargetLayers
from specverify.backends.engine.reach import Reach
from specverify.backends.engine.uploads import upload
from specverify.reference.case import Case
from specverify.reference.draft.mtp import EMBEDDING, HEAD, OUTER_NORMS, PLAIN_LAYER, Mtp, module_prefix
from specverify.reference.layout import PLAIN, KvLayout


class MtpHead(HeadModel):
    """MTP modules: `eh_proj` mixes embedding and state, both normed, and the head scores the output.

    Attributes:
        settings: The words of the draft.
        names: The prefix of each module's weights.
    """

    settings: Mtp
    names: tuple[str, ...]

    def prefix(self, module: int) -> str:
        """See `HeadModel`."""
        return self.names[module]

    def embed(self, tokens: Tensor, positions: Tensor, module: int = 0) -> Tensor:
        """See `HeadModel`."""
        rows = self.embedding_of(module)[upload(tokens, self.device)]
        return (
            rows * upload((positions != 0).to(rows.dtype), rows.device)[:, None] if self.settings.zero_first else rows
        )

    def see(self, embedded: Tensor, seen: SeenRows, positions: Tensor) -> Tensor:
        """See `HeadModel`; a first row of zeros stays one, whatever its token is."""
        rows = super().see(embedded, seen, positions)
        return rows.masked_fill((positions == 0)[:, None].to(rows.device), 0.0) if self.settings.zero_first else rows

    def embedding_of(self, module: int) -> Tensor:
        """The embedding that `module` reads, [vocabulary, hidden]."""
        own = self.settings.own_embedding
        return self.weights[f"{self.names[module]}.{EMBEDDING}.weight"] if own else self.embedding

    def head_of(self, module: int) -> Tensor:
        """The head that scores outputs of `module`, [vocabulary, hidden]."""
        return self.weights[f"{self.names[module]}.{HEAD}.weight"] if self.settings.own_head else self.target_head

    def of_target(self, hidden: Tensor) -> Tensor:
        """See `HeadModel`."""
        return hidden

    def mix(self, embedded: Tensor, state: Tensor, module: int) -> Tensor:
        """The residual stream [R, hidden] before the decoder layer, of embeddings and states [R, hidden]."""
        name = self.names[module]
        pair = [self.norm(embedded, f"{name}.enorm"), self.norm(state, f"{name}.hnorm")]
        return self.linear(torch.cat(pair[::-1] if self.settings.state_first else pair, -1), f"{name}.eh_proj")

    def fuse(self, embedded: Tensor, state: Tensor, module: int = 0) -> tuple[Tensor, Tensor]:
        """See `HeadModel`."""
        u = self.mix(embedded, state, module)
        return self.norm(u, f"{self.names[module]}.input_layernorm"), u

    def score(self, outputs: Tensor, module: int = 0) -> Tensor:
        """See `HeadModel`."""
        normed = self.norm(outputs, f"{self.names[module]}.shared_head.norm")
        return self.unembed(normed, self.head_of(module))

    def feed_back(self, outputs: Tensor, module: int = 0) -> Tensor:
        """See `HeadModel`."""
        return self.norm(outputs, f"{self.names[module]}.shared_head.norm") if self.settings.normed_back else outputs


class TargetLayerHead(MtpHead):
    """MTP modules whose decoder layers and norms are of the classes of the target's.

    Attributes:
        target: The target.
        target_layers: The layers of all modules, and the norms beside them.
    """

    def __init__(self, draft: Mtp, weights: Mapping[str, Tensor], target: CausalLm) -> None:
        # No formula of a plain layer is run.
        super().__init__(PLAIN_LAYER, draft.reads, weights, target, draft.count)
        self.settings = draft
        self.names = tuple(module_prefix(target.layers, module) for module in range(draft.count))
        self.target = target
        norms, layers = dict[str, Tensor](), list[dict[str, Tensor]]()
        for name in self.names:
            own = {full.removeprefix(f"{name}."): w for full, w in self.weights.items() if full.startswith(f"{name}.")}
            norms |= {f"{name}.{norm}": own.pop(f"{norm}.weight") for norm in OUTER_NORMS}
            for matrix in ("eh_proj", *draft.own_matrices):
                own.pop(f"{matrix}.weight")
            layers.append(own)
        self.target_layers = TargetLayers(target, layers, norms)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """See `HeadModel`."""
        return self.target_layers.norm(x, name)

    def fuse(self, embedded: Tensor, state: Tensor, module: int = 0) -> tuple[Tensor, Tensor]:
        """See `HeadModel`; the layer norms its input itself."""
        u = self.mix(embedded, state, module)
        return u, u

    def rotary_table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See `HeadModel`; the target's tables."""
        return self.target_layers.tables(self.embedding[:1], upload(positions, self.device))

    def run_layer(
        self,
        module: int,
        x: Tensor,
        residual: Tensor,
        tables: tuple[Tensor, Tensor],
        mask: Tensor,
        batch: BatchCache,
        attend: Attend,
    ) -> Tensor:
        """See `HeadModel`."""
        cos, sin = tables
        stream = residual.view(len(batch.caches), batch.width, -1)
        output = self.target_layers.run(module, stream, (cos[:, 0], sin[:, 0]), mask, batch, attend)
        return output.reshape(len(x), -1)

    def room(self, capacity: int, rows: int) -> CacheSpec:
        """See `HeadModel`."""
        room = CausalLm.room(self.target, capacity, rows)  # of a rank too the whole one
        return replace(room, reaches=tuple(self.reaches), recurrent=0)


class MtpDraft(HeadDraft):
    """Fills a tree with MTP modules; outputs have one entry for each module, [R, modules, hidden].

    Attributes:
        modules: The number of modules.
        last_outputs: The outputs of the last committed row, [modules, hidden]; None before a row was run.
    """

    head: MtpHead
    last_outputs: Tensor | None = None

    @property
    def modules(self) -> int:
        """The number of modules."""
        return self.head.settings.count

    def catch_up(self, tokens: list[int], hidden: Tensor) -> Tensor:
        """See `HeadDraft`; a cache that another draft object filled lacks the outputs of its last row."""
        if self.cache.length and self.last_outputs is None and self.modules > 1:
            self.last_outputs = self.recalled_outputs(tokens, hidden)
        return super().catch_up(tokens, hidden)

    def recalled_outputs(self, tokens: list[int], hidden: Tensor) -> Tensor:
        """The outputs of the last committed row, [modules, hidden], of which the cache holds keys and values alone.

        Module m needs the output of module m - 1 in the row before, so the last rows are run again, one for each
        module, behind copies of the rows above them: in the first of these rows a module lacks what it would hold.
        """
        end = self.cache.length
        first = max(end - self.modules, 0)
        outputs = torch.zeros_like(hidden[:1, : self.head.hidden_size]).expand(self.modules, -1)
        for row in range(first, end):
            above = self.copied_rows(row)
            rows = HeadRows(row, self.row_tokens(tokens, row, row + 1), self.row_states(hidden, row, row + 1))
            position = torch.tensor([row])
            sees_all = torch.ones(1, row + 1, dtype=torch.bool)
            visible = [
                self.module_mask(sees_all, position, torch.arange(row + 1) >= module) for module in range(self.modules)
            ]
            states_beside = self.states_behind(rows, outputs)
            attend = self.seams.draft_attend
            run = self.head.through(
                torch.tensor(rows.tokens),
                states_beside,
                position,
                visible,
                above,
                attend,
                self.seams.kv.single,
                self.seen_rows(rows),
            )
            self.calls += 1
            outputs = torch.cat(run)
        return outputs

    def copied_rows(self, count: int) -> KvCache:
        """A cache of its own with the first `count` rows of the draft's cache, and room for one more."""
        room = self.head.room(count + 1, max(count, 1))
        copy = CACHES[PLAIN](self.seams.kv, room.as_latent() if self.cache.latent else room, KvLayout())
        if count:
            copy.open(count)
            for layer in range(self.cache.layers):
                _, keys, values = self.cache.committed_columns(layer)
                copy.write(layer, keys[:, :count], values[:, :count])
            copy.commit(list(range(count)))
        return copy

    def states_behind(self, rows: HeadRows, outputs_before: Tensor) -> StatesBeside:
        """The states beside `rows`, behind a row with `outputs_before` [modules, hidden]."""

        def states_beside(module: int, outputs_above: list[Tensor]) -> Tensor:
            if module == 0:
                return rows.hidden
            outputs = torch.cat([outputs_before[module - 1][None], outputs_above[-1][:-1]])
            return self.head.feed_back(outputs, module - 1)

        return states_beside

    def append(self, rows: HeadRows) -> Tensor:
        """See `HeadDraft`; a row of a later module holds the output of the module before in the row before."""
        count = len(rows.tokens)
        positions = torch.arange(rows.first, rows.first + len(rows.tokens))
        # The first row of all has no row before; its later modules are no rows, and are hidden.
        outputs_before = (
            torch.zeros_like(rows.hidden[:1]).expand(self.modules, -1)
            if self.last_outputs is None
            else self.last_outputs
        )
        states_beside = self.states_behind(rows, outputs_before)
        (causal_mask,) = causal(positions, [Reach()])
        visible = [
            self.module_mask(causal_mask, positions, torch.arange(causal_mask.shape[1]) >= module)
            for module in range(self.modules)
        ]
        seen = self.seen_rows(rows)
        outputs = torch.stack(self.through(torch.tensor(rows.tokens), states_beside, positions, visible, seen), 1)
        self.cache.commit(list(range(count)))
        self.last_outputs = outputs[-1]
        return outputs

    def module_mask(self, mask: Tensor, own_columns: Tensor, has_row: Tensor) -> Tensor:
        """The mask bool [R, C] of a module: the columns of `mask` with a row of the module, `has_row` bool [C].

        A column shows itself: row r has the column `own_columns[r]`. Attention over nothing would give NaN.
        """
        return mask & (has_row | (torch.arange(mask.shape[1]) == own_columns[:, None]))

    def through(
        self,
        tokens: Tensor,
        states_beside: StatesBeside,
        positions: Tensor,
        visible: list[Tensor],
        seen: SeenRows | None = None,
    ) -> list[Tensor]:
        """The outputs of each module, [R, hidden]; see `HeadModel.through`."""
        attend = self.seams.draft_attend
        lanes = self.seams.kv.single
        return self.head.through(tokens, states_beside, positions, visible, self.cache, attend, lanes, seen)

    def node_states(self, level: list[int]) -> Tensor:
        """See `HeadDraft`: [R, modules, hidden]; module 0 continues the last module of the parent's row."""
        outputs = torch.stack([self.outputs[self.shape.parent[node]] for node in level])
        fed_back = [self.head.feed_back(outputs[:, module], module) for module in range(self.modules)]
        return torch.stack([fed_back[module - 1] for module in range(self.modules)], 1)

    def lane(self, level: Level) -> LaneRows:
        """See `CachedTreeFilling`."""
        nodes = level.nodes
        root = level.root
        positions, (branch_mask,) = self.branch(nodes, root, [Reach()])
        own_columns = torch.tensor([self.slots[node] for node in nodes])
        visible = [
            self.module_mask(branch_mask, own_columns, self.has_row(module, branch_mask.shape[1], root))
            for module in range(self.modules)
        ]
        self.calls += 1
        inputs = torch.tensor([level.token[node] for node in nodes])
        node_positions = self.node_positions(positions)
        return LaneRows(inputs, node_positions, visible, self.cache, hidden_states=self.node_states(nodes))

    def level_scores(self, level: Level, outputs: Tensor) -> Tensor:
        """See `CachedTreeFilling`; a row keeps the outputs of all modules."""
        self.outputs |= dict(zip(level.nodes, outputs, strict=True))
        return self.child_scores(outputs, self.shape.depth[level.nodes[0]])

    def has_row(self, module: int, columns: int, root: int) -> Tensor:
        """Whether `module` has a row in each column, bool [columns]; the root's row is that of column `root`.

        A node at depth d continues the root's row in module (module - d) mod n, which may have none.
        """
        place = torch.arange(columns)
        rows = place >= module
        for node, slot in self.slots.items():
            rows[slot] = root >= (module - self.shape.depth[node]) % self.modules
        return rows

    def child_scores(self, outputs: Tensor, depth: int) -> Tensor:
        """See `HeadDraft`; the modules take turns."""
        module = depth % self.modules
        return self.head.score(outputs[:, module], module)

    def follow(self, predecessor: OwnRows) -> None:
        """See `OwnRows`; a cache alone does not hold the outputs of its last row."""
        super().follow(predecessor)
        assert isinstance(predecessor, MtpDraft)
        if self.cache.length == predecessor.cache.length:
            self.last_outputs = predecessor.last_outputs

    def resume(self, cache: KvCache | None) -> None:
        """See `HeadDraft`."""
        super().resume(cache)
        self.last_outputs = None


@heads(Mtp.TAG)
def make_head(case: Case, target: CausalLm, weights: Mapping[str, Tensor]) -> MtpHead:
    """The modules of the case on their target."""
    draft = case.draft
    assert isinstance(draft, Mtp)
    if draft.layer is None:
        return TargetLayerHead(draft, weights, target)
    head = MtpHead(draft.layer, draft.reads, weights, target, draft.count)
    head.settings = draft
    head.names = tuple(module_prefix(target.layers, module) for module in range(draft.count))
    return head


@opens(Mtp.TAG)
def open_draft(opening: Opening) -> MtpDraft:
    """Open the modules on the cache that the request has leased for them."""
    draft = opening.case.draft
    assert isinstance(draft, Mtp)
    assert isinstance(opening.model, MtpHead)
    assert opening.cache is not None
    modules = MtpDraft(opening.model, draft, opening.seams, opening.cache, opening.case.layout.prefill_chunk)
    modules.images = axes_of(opening.case.model) if draft.sees_images else None
    return modules
