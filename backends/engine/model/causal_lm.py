"""A transformers causal model that runs rows with their own masks and positions.

The engine runs all forwards through `CausalLm`: verification, prefill and draft. The model reads and writes the KV
caches of the requests, and its attention is the function that the caller gives.
"""

import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specverify.backends.engine.attention.chosen_columns import ChosenMasks, tap_columns
from specverify.backends.engine.attention.interface import INTERFACE, pass_arguments
from specverify.backends.engine.attention.latent import OverLatentRows
from specverify.backends.engine.captured.lanes import LaneRows
from specverify.backends.engine.columns import Attend, AttentionInputs, RowWords
from specverify.backends.engine.kv.base import CacheSpec, KvCache
from specverify.backends.engine.kv.branch import Branches
from specverify.backends.engine.kv.choices import RowChoice, choices_beside
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.kv.padding import may_lack_numbers, spoiled_padding
from specverify.backends.engine.kv.recurrent import RecurrentStates, commit_states, put_states_beside, states_of
from specverify.backends.engine.kv.target_calls import calls_over, kind_of_forward
from specverify.backends.engine.model.axes import Axes, ImageRows, image_hook, positions_of, side_by_side
from specverify.backends.engine.model.graphs import HOOKED, Graphs, Inputs
from specverify.backends.engine.model.hidden import HiddenTap
from specverify.backends.engine.model.indexed import columns_of_rows
from specverify.backends.engine.model.low_rank import LowRank, adapter_hooks
from specverify.backends.engine.model.routed import Choices, ExpertTap, by_lane
from specverify.backends.engine.reach import HYBRID, MASKS, RECURRENT, Reach, reaches_of
from specverify.backends.engine.uploads import upload
from specverify.reference.draft.hidden import HiddenStates


@dataclass(frozen=True)
class Rows:
    """The rows of one request in a forward.

    Attributes:
        tokens: int64 [R].
        positions: int64 [R]; the position of each row for rotary embedding.
        axes: int64 [3, R] in place of these, for a prompt with images.
        images: The rows that have an image's embedding in place of their token's; None where none has.
        visible: bool [R, C] for each layer, C = committed columns + open rows, these R rows included.
        cache: The cache in which the forward opens and writes R rows.
        parents: For each row the open row above it, as `RecurrentStates.open` takes them; None for a chain below the
            committed tokens. Layers with attention see the tree by their masks, and branch caches by paths.
        words: For each layer the words of a tree that was lowered to words, in place of `visible`, which is empty then.
        adapter: The adapter that these rows run with; None for the weights alone.
        filled: How many of the first rows carry tokens, where those of padding have no finite number from their
            embedding on, as rows of a fixed-shape launch that nothing has filled; -1 where padding is finite too.
    """

    tokens: Tensor
    positions: Tensor
    visible: list[Tensor]
    cache: KvCache
    parents: list[int] | None = None
    words: list[RowWords] | None = None
    adapter: LowRank | None = None
    axes: Tensor | None = None
    filled: int = -1
    images: ImageRows | None = None


class CausalLm:
    """A causal model, with a clock and counters of its forwards.

    Attributes:
        reaches: The reach of each layer.
        recurrent: The layers that have a recurrent state.
        unattended: The layers that have it in place of attention.
        attending: The number of the other layers, each of which calls attention once in a forward.
        sources: For each layer the one whose keys and values it reads.
        columnless: The layers that read another layer's, and write none.
        forward_s: Seconds spent in forwards since the model was loaded, device synchronised.
        calls: Number of forwards since the model was loaded.
        attention_calls: Calls of attention since the model was loaded; of a recorded model, those of watched forwards,
            and in other forwards those that took a slower path.
        graphs: The recordings of verify forwards; None for a backend that records none.
        experts: The tap of the choices of experts, which are put beside the caches, as those of columns are.
        indexed: Whether an indexer chooses the columns that each row attends to.
        three_axes: Whether rows have positions on three axes.
        fallbacks: How many layers of forwards took a slower attention path since the model was loaded, by reason.
    """

    def __init__(self, model: Any, device: str) -> None:
        self.model = model
        self.device = torch.device(device)
        self.dtype: torch.dtype = next(model.parameters()).dtype
        model.set_attn_implementation(INTERFACE)
        config = model.config
        self._kinds: list[str] = list(getattr(config, "layer_types", None) or [])
        self._cap: float = getattr(config, "score_cap", 0.0)
        self.reaches = reaches_of(config)
        self.recurrent = [layer for layer, kind in enumerate(self._kinds) if kind in (*RECURRENT, *HYBRID)]
        self.unattended = [layer for layer in self.recurrent if self._kinds[layer] in RECURRENT]
        self.attending = len(self.reaches) - len(self.unattended)
        self.sources = list(getattr(model, "kv_sources", range(len(self.reaches))))
        self.columnless = [layer for layer, source in enumerate(self.sources) if source != layer]
        self.forward_s = 0.0
        self.calls = 0
        self.attention_calls = 0
        self.graphs: Graphs | None = None
        self.experts = ExpertTap(model)
        self.indexed = any(getattr(model, "index_widths", ()))
        self.three_axes = "mrope_section" in (getattr(config, "rope_parameters", None) or {})
        self.fallbacks: Counter[str] = Counter()

    @property
    def unsharded(self) -> Any:
        """The transformers model with its whole embeddings, which a draft's head may share."""
        return self.model

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self.reaches)

    def room(self, capacity: int, rows: int) -> CacheSpec:
        """The sizes of a KV cache of this model, for `capacity` columns and blocks of at most `rows` rows."""
        config, by_layer = self.model.config, getattr(self.model, "heads_by_layer", ())
        if by_layer:
            # A layer that reads another layer's columns writes none.
            own = tuple(
                (sizes[0] if source == layer else 0, *sizes[1:])
                for layer, (sizes, source) in enumerate(zip(by_layer, self.sources, strict=True))
            )
            heads, width, value_width = (max(sizes) for sizes in zip(*by_layer, strict=True))
            spec = CacheSpec(tuple(self.reaches), heads, width, capacity, rows, self.device, self.dtype, value_width)
            return replace(spec, heads_by_layer=own, sources=tuple(self.sources))
        heads = config.num_attention_heads
        # Some configs lack these two fields; their values then follow from the number of heads.
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        spec = CacheSpec(tuple(self.reaches), kv_heads, head_dim, capacity, rows, self.device, self.dtype)
        spec = replace(spec, recurrent=len(self.recurrent))
        if not getattr(config, "qk_head_dim", None):
            return spec
        # Of latent attention; its `head_dim` is the rotated part alone.
        rows_of = (config.kv_lora_rank, config.qk_rope_head_dim)
        index_widths = tuple(getattr(self.model, "index_widths", ()))
        spec = replace(spec, head_dim=config.qk_head_dim, value_dim=config.v_head_dim, index_widths=index_widths)
        return replace(spec, latent_widths=rows_of)

    @torch.no_grad()
    def forward(
        self,
        batch: list[Rows],
        attend: Attend,
        score: int = -1,
        filler: float = 0.0,
        lanes: type[BatchCache] = BatchCache,
        watch: list[Tensor] | None = None,
        tap: HiddenTap | None = None,
    ) -> list[Tensor]:
        """Run the rows of every request in one forward, each over its own cache.

        Args:
            batch: The rows of each request, in the order of the batch.
            attend: The attention to run.
            score: The rows for which the head computes logits: -1 for all rows, 0 for none, 1 for the last row of a
                batch of one.
            filler: The number in padding columns.
            lanes: The class that makes one cache of the requests' caches.
            watch: A list to which the output of attention is added, [B, H, T, D] for each layer.
            tap: Receives the hidden states for which it was made.

        Returns:
            For each request, logits [rows scored, vocabulary] in the working dtype.

        Raises:
            OutOfPages: before the forward, if a cache has no room; caches that had room keep their rows open.
        """
        attend = OverLatentRows(attend)
        widths = [len(rows_of_request.tokens) for rows_of_request in batch]
        for rows_of_request, width in zip(batch, widths, strict=True):
            rows_of_request.cache.open(width)
            if rows_of_request.parents is not None and isinstance(rows_of_request.cache, Branches):
                rows_of_request.cache.divide(rows_of_request.parents)
            if self.recurrent:
                # A cache that no arena made, as in an examination, has no states yet.
                states = states_of(rows_of_request.cache) or put_states_beside(rows_of_request.cache, RecurrentStates())
                if rows_of_request.parents is None:
                    states.open_run(width)
                else:
                    states.open(rows_of_request.parents)
        caches = [rows_of_request.cache for rows_of_request in batch]
        cache = lanes(caches, widths, filler)
        # A recorded forward runs no hooks; experts compute together the rows that choose them, padding among them.
        if (
            self.graphs is None
            and not self.experts.present
            and may_lack_numbers(self.dtype, self.device)
            and any(rows_of_request.filled >= 0 for rows_of_request in batch)
        ):
            cache.filled = [
                width if rows_of_request.filled < 0 else rows_of_request.filled
                for rows_of_request, width in zip(batch, widths, strict=True)
            ]
        self._write_zeros(cache)
        # transformers looks masks up by the kind of layer, and layers of one kind have the same reach.
        kinds = self._kinds or [""]
        masks = {kind: self._mask(cache, batch, kinds.index(kind)) for kind in set(kinds)}
        named_masks = {name: mask for kind, mask in masks.items() for name in MASKS.get(kind, (kind,))}
        inputs: Inputs = {
            "input_ids": upload(side_by_side([rows_of_request.tokens for rows_of_request in batch]), self.device),
            "position_ids": upload(
                positions_of(
                    [rows_of_request.positions for rows_of_request in batch],
                    [rows_of_request.axes for rows_of_request in batch],
                ),
                self.device,
            ),
            "attention_mask": named_masks if self._kinds else masks[""],
        }
        began = time.perf_counter()
        logits = None
        choices = Choices()
        chosen_masks = ChosenMasks()
        adapters = [rows_of_request.adapter for rows_of_request in batch]
        images = [rows_of_request.images for rows_of_request in batch]
        # Verify forwards and levels of drafts are watched; prefills, of any length, are not recorded.
        if self.graphs is not None and watch is not None:
            hooked = tap is not None or any(adapters) or any(images)
            outcome = HOOKED if hooked else self.graphs.run(self._network, inputs, cache, attend)
            if isinstance(outcome, str):  # the reason why nothing was recorded: a fallback in every layer
                cache.fallbacks += [outcome] * self.attending
            else:
                logits, heads = outcome
                watch += heads
        if logits is None:
            hooks = tap.on(self.model.base_model) if tap is not None else nullcontext()
            tap_experts = self.experts.on()
            spoiled = spoiled_padding(self.model, cache.filled) if cache.filled is not None else nullcontext()
            with (
                hooks,
                spoiled,
                adapter_hooks(self.model, adapters),
                image_hook(self.model, images),
                tap_experts as choices,
                tap_columns() as chosen_masks,
            ):
                logits = self._network(inputs, cache, _watched(attend, watch), score)
        for layer in self.unattended if watch else ():  # such a layer calls no attention
            assert watch is not None
            watch.insert(layer, torch.zeros_like(watch[0]))
        if self.device.type != "cpu":  # a device runs asynchronously: wait, or the clock would measure the launch
            torch.accelerator.synchronize()
        self.forward_s += time.perf_counter() - began
        if self.experts.present or self.indexed or self.three_axes:
            self._note_choices(cache, choices, chosen_masks, batch)
        self.calls += 1
        for cache_of_request, width in zip(caches, widths, strict=True):
            calls_over(cache_of_request)[kind_of_forward(width, watch is not None)] += 1
        counted = self.graphs is None or watch is not None
        self.attention_calls += self.attending if counted else cache.slower_layers()
        self.fallbacks.update(cache.fallbacks)
        return [logits[lane, :width] if score else torch.empty(0) for lane, width in enumerate(widths)]

    def _note_choices(self, lanes: BatchCache, choices: Choices, chosen_masks: ChosenMasks, batch: list[Rows]) -> None:
        """Put what the rows of a forward took beside each cache; a forward without choices leaves none."""
        experts = by_lane(choices, self.layers, len(lanes.caches))
        columns = columns_of_rows(lanes, chosen_masks, self.layers)
        for lane, (cache, width) in enumerate(zip(lanes.caches, lanes.rows, strict=True)):
            axes = batch[lane].axes if self.three_axes else None
            if axes is None and self.three_axes:
                axes = batch[lane].positions.expand(3, -1)
            rows = [
                RowChoice(
                    None if experts is None else experts[lane][:, row],
                    None if columns is None else columns[lane][row],
                    None if axes is None else axes[:, row].cpu(),
                )
                for row in range(width)
            ]
            choices_beside(cache).write(cache.length + cache.rows - width, rows)

    def run_lanes(self, lanes: list[LaneRows], attend: Attend, batch: type[BatchCache]) -> list[Tensor]:
        """See `LaneModel`; the outputs are logits."""
        rows = [Rows(lane.tokens, lane.positions, lane.visible, lane.cache, lane.parents) for lane in lanes]
        return self.forward(rows, attend, lanes=batch)

    def _network(self, inputs: Inputs, lanes: BatchCache, attend: Attend, score: int = -1) -> Tensor:
        """The logits [B, rows scored, vocabulary] of transformers' model; see `forward` for `score`."""
        # Without scores the body runs alone: the head's product over the vocabulary is saved.
        with pass_arguments(attend, lanes, self.reaches):
            output = (self.model if score else self.model.base_model)(
                **inputs,
                past_key_values=lanes,
                use_cache=True,
                attend=attend,
                lanes=lanes,
                reaches=self.reaches,
                **({"softcap": self._cap} if self._cap else {}),
                **({"logits_to_keep": score} if score > 0 else {}),
            )
        logits: Tensor = output.logits if score else output[0]  # hidden states of the body, which no caller reads
        return logits

    def _write_zeros(self, lanes: BatchCache) -> None:
        """Write rows of zeros in layers without attention, so that every layer of a cache holds the same columns.

        Layers that read another layer's columns get rows of no heads.
        """
        layers = [*self.unattended, *self.columnless]
        room = self.room(0, 0) if layers else None
        for layer in layers:
            assert room is not None
            heads, widths = room.sizes(layer)
            keys, values = (
                torch.zeros(len(lanes.caches), heads, lanes.width, width, dtype=self.dtype, device=self.device)
                for width in widths
            )
            lanes.update(keys, values, layer)

    def _mask(self, lanes: BatchCache, batch: list[Rows], layer: int) -> Tensor:
        words = [rows_of_request.words[layer] for rows_of_request in batch if rows_of_request.words is not None]
        # A layer with a recurrent state reads no columns, and its mask is a tensor of its own in transformers.
        if len(words) == len(batch) and layer not in self.recurrent:
            return upload(lanes.word_masks(layer, words), self.device)
        dense = [
            rows_of_request.visible[layer] if rows_of_request.words is None else rows_of_request.words[layer].dense()
            for rows_of_request in batch
        ]
        return upload(lanes.masks(layer, dense), self.device)

    def prefill(
        self,
        tokens: tuple[int, ...],
        cache: KvCache,
        attend: Attend,
        chunk: int,
        lanes: type[BatchCache] = BatchCache,
        reads: HiddenStates | None = None,
        tapping: type[HiddenTap] = HiddenTap,
        adapter: LowRank | None = None,
        scores: list[Tensor] | None = None,
        axes: Axes | None = None,
    ) -> list[Tensor]:
        """Append the KV of `tokens` to `cache` as one causal run, `chunk` tokens per forward (0: all that fit).

        The logits of each forward, [its tokens, vocabulary], are added to `scores`, if it is given.

        Returns:
            The hidden states `reads` of the tokens, one tensor [tokens, width] per forward; empty if `reads` is None.
        """
        hidden = []
        width = min(chunk or len(tokens), cache.most_rows or len(tokens)) or 1
        for begin in range(0, len(tokens), width):
            tap = None if reads is None else tapping(reads)
            score = 0 if scores is None else -1
            logits = self.append(tokens[begin : begin + width], cache, attend, score, lanes, tap, adapter, axes)
            if scores is not None:
                scores.append(logits)
            hidden += [tap.states[reads][0]] if tap is not None and reads is not None else []
        return hidden

    def append(
        self,
        tokens: tuple[int, ...],
        cache: KvCache,
        attend: Attend,
        score: int,
        lanes: type[BatchCache] = BatchCache,
        tap: HiddenTap | None = None,
        adapter: LowRank | None = None,
        axes: Axes | None = None,
    ) -> Tensor:
        """Run `tokens` after the committed columns of `cache` and commit them; see `forward` for `score` and `tap`."""
        (logits,) = self.forward([self.causal_rows(tokens, cache, adapter, axes)], attend, score, lanes=lanes, tap=tap)
        commit_all(cache, len(tokens))
        return logits

    def causal_rows(
        self, tokens: tuple[int, ...], cache: KvCache, adapter: LowRank | None = None, axes: Axes | None = None
    ) -> Rows:
        """The rows of `tokens`, a causal run behind the committed columns of `cache`."""
        positions = torch.arange(cache.length, cache.length + len(tokens))
        axes_of_rows = None if axes is None else axes.of_prompt(positions)
        images = None if axes is None else axes.images_at(positions)
        visible = causal(positions, self.reaches)
        return Rows(torch.tensor(tokens), positions, visible, cache, adapter=adapter, axes=axes_of_rows, images=images)


def commit_all(cache: KvCache, rows: int) -> None:
    """Commit the open `rows` of `cache`, a causal run."""
    cache.commit(list(range(rows)))
    commit_states(cache, list(range(rows)))


def _watched(attend: Attend, watch: list[Tensor] | None) -> Attend:
    """`attend`, wrapped so that its output is also added to `watch`."""
    if watch is None:
        return attend

    def watched(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        watch.append(attend(query, columns, scaling))
        return watch[-1]

    return watched


def causal(rows: Tensor, reaches: list[Reach]) -> list[Tensor]:
    """For each layer, the mask bool [R, C]: a row at position p sees columns 0..p inside the layer's reach."""
    columns = torch.arange(int(rows[-1]) + 1)
    masks = {reach: reach.within(columns[None] <= rows[:, None], rows, columns) for reach in set(reaches)}
    return [masks[reach] for reach in reaches]
