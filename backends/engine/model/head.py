"""A draft head: decoder layers over rows of tokens beside hidden states.

The kinds of head differ in how they fuse a row and score an output; `backends/engine/draft` has a class for each.
"""

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from specverify.backends.engine.captured.lanes import LaneRows
from specverify.backends.engine.columns import Attend
from specverify.backends.engine.kv.base import CacheSpec, KvCache
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.model.axes import ImageRows
from specverify.backends.engine.model.causal_lm import CausalLm, causal
from specverify.backends.engine.model.float64_modules import inverse_frequencies
from specverify.backends.engine.reach import Reach
from specverify.backends.engine.uploads import upload
from specverify.reference.case import Case
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer

StatesBeside: TypeAlias = Callable[[int, list[Tensor]], Tensor]
"""From a module's number and the outputs of the modules before it to the states [R, hidden] that its rows hold."""


@dataclass(frozen=True)
class SeenRows:
    """The images of a prompt as rows of a head see them.

    Attributes:
        axes: int64 [3, R], the positions of the rows; None for a head whose rows have one, that of their number.
        images: The rows whose tokens have an image's embedding; None where none has.
    """

    axes: Tensor | None
    images: ImageRows | None


class HeadModel(ABC):
    """A head on a target, with the clock and the counters that a causal model has.

    Attributes:
        layer_prefix: The prefix of the names of the decoder layer.
        reads: The hidden states of the target that the weights expect.
        weights: Tensors by their names in published checkpoints, in the working dtype.
        d2t: int64 [draft vocabulary]: target id less draft id; None for a head that names every target id.
        embedding: The head's own embedding or else the target's, [vocabulary, hidden].
        target_head: The target's head, [vocabulary, hidden].
        reaches: The reach of the layer of each module, which has no window.
        forward_s: Seconds spent in forwards since the head was made.
        calls: Number of forwards.
        attention_calls: Number of layers that ran; beside a target with recordings those that took a slower path,
            since no head is recorded.
        fallbacks: How many layers took a slower attention path, by reason.
    """

    layer_prefix: str

    def __init__(
        self, layer: HeadLayer, reads: HiddenStates, weights: Mapping[str, Tensor], target: CausalLm, modules: int = 1
    ) -> None:
        self.layer = layer
        self.reads = reads
        self.device = target.device
        self.dtype = target.dtype
        self._counts = target.graphs is None
        self.d2t = weights["d2t"].to(self.device) if "d2t" in weights else None
        vocabulary_maps = ("d2t", "t2d")
        self.weights = {
            key: tensor.to(self.device, self.dtype) for key, tensor in weights.items() if key not in vocabulary_maps
        }
        shared: Tensor = target.unsharded.get_input_embeddings().weight
        # A head with an embedding of its own brings it along.
        self.embedding = self.weights.get("embed_tokens.weight", shared)
        self.target_head: Tensor = target.unsharded.get_output_embeddings().weight
        self.reaches = [Reach()] * modules
        self.forward_s = 0.0
        self.calls = 0
        self.attention_calls = 0
        self.fallbacks: Counter[str] = Counter()

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the target."""
        return len(self.target_head)

    @property
    def hidden_size(self) -> int:
        """Length of a state."""
        return int(self.embedding.shape[1])

    @abstractmethod
    def of_target(self, hidden: Tensor) -> Tensor:
        """The target's hidden states [R, width] as the head holds them, [R, hidden]."""

    @property
    def layers(self) -> int:
        """Number of modules, each with a layer of the cache."""
        return len(self.reaches)

    @property
    def attending(self) -> int:
        """Number of modules, each of which calls attention."""
        return len(self.reaches)

    def prefix(self, module: int) -> str:
        """The prefix of the names of the decoder layer of `module`."""
        return self.layer_prefix

    def rotates(self, module: int) -> bool:
        """Whether `module` has rotary embedding."""
        return True

    def rotary(self, heads: Tensor, cos: Tensor, sin: Tensor, module: int) -> Tensor:
        """Queries or keys [lanes, heads, R, head_dim] of `module` after its rotary embedding, if it has one."""
        return _rotate(heads, cos, sin) if self.rotates(module) else heads

    def keep_rows(self, batch: BatchCache, keys: Tensor, values: Tensor, module: int) -> tuple[Tensor, Tensor]:
        """Write keys and values of open rows into the cache layer of `module`; return all that its rows may see."""
        return batch.update(keys, values, module)

    def embed(self, tokens: Tensor, positions: Tensor, module: int = 0) -> Tensor:
        """The embeddings [R, hidden] that rows of `module` hold of tokens int64 [R] at positions int64 [R]."""
        return self.embedding[upload(tokens, self.device)]

    def see(self, embedded: Tensor, seen: SeenRows, positions: Tensor) -> Tensor:
        """The embeddings [R, hidden] of rows with the numbers `positions` int64 [R], with those of images."""
        return embedded if seen.images is None else seen.images.put_into(embedded)

    @abstractmethod
    def fuse(self, embedded: Tensor, states: Tensor, module: int = 0) -> tuple[Tensor, Tensor]:
        """The input of attention [R, ...] and the residual [R, hidden] for embeddings and states [R, hidden]."""

    def feed_forward(self, x: Tensor, module: int) -> Tensor:
        """The feed-forward block of `module` of its normed input [R, hidden]."""
        gate, up = (self.linear(x, f"{self.prefix(module)}.mlp.{part}_proj") for part in ("gate", "up"))
        return self.linear(functional.silu(gate) * up, f"{self.prefix(module)}.mlp.down_proj")

    @abstractmethod
    def score(self, outputs: Tensor, module: int = 0) -> Tensor:
        """Scores [R, draft vocabulary] of outputs [R, hidden]."""

    def unembed(self, normed: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product [R, draft vocabulary] of outputs [R, hidden] and the head `weight` [draft vocabulary, hidden]."""
        return functional.linear(normed, weight, bias)

    @abstractmethod
    def feed_back(self, outputs: Tensor, module: int = 0) -> Tensor:
        """The states [R, hidden] that rows below rows with these outputs hold."""

    def room(self, capacity: int, rows: int) -> CacheSpec:
        """The sizes of a KV cache of the head; see `CausalLm.room`."""
        layer = self.layer
        return CacheSpec(tuple(self.reaches), layer.kv_heads, layer.head_dim, capacity, rows, self.device, self.dtype)

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        states: Tensor,
        positions: Tensor,
        visible: Tensor,
        cache: KvCache,
        attend: Attend,
        lanes: type[BatchCache] = BatchCache,
        seen: SeenRows | None = None,
    ) -> Tensor:
        """Open R rows in `cache` and run them.

        Args:
            tokens: int64 [R].
            states: The state beside each token, [R, hidden].
            positions: int64 [R], for rotary embedding.
            visible: bool [R, C]; C = committed columns + open rows, these R rows included.
            cache: The head's cache of the request.
            attend: The attention to run.
            lanes: The class that makes one cache of the request's cache.
            seen: What the rows see of images; None for rows of text.

        Returns:
            The outputs of the last layer, [R, hidden], before any norm.

        Raises:
            OutOfPages: before the forward, if the cache has no room.
        """
        visible_by_module = [visible] * len(self.reaches)

        def below(module: int, outputs_above: list[Tensor]) -> Tensor:
            return outputs_above[-1] if module else states

        return self.through(tokens, below, positions, visible_by_module, cache, attend, lanes, seen)[-1]

    @torch.no_grad()
    def through(
        self,
        tokens: Tensor,
        states_beside: StatesBeside,
        positions: Tensor,
        visible: list[Tensor],
        cache: KvCache,
        attend: Attend,
        lanes: type[BatchCache] = BatchCache,
        seen: SeenRows | None = None,
    ) -> list[Tensor]:
        """The outputs [R, hidden] of each module on R rows, opened in `cache`; see `forward`.

        Args:
            tokens: int64 [R].
            states_beside: The states beside the tokens.
            positions: int64 [R].
            visible: For each module, bool [R, C].
            cache: The head's cache of the request.
            attend: The attention to run.
            lanes: The class that makes one cache of the request's cache.
            seen: As in `forward`.

        Raises:
            OutOfPages: before the forward, if the cache has no room.
        """
        cache.open(len(tokens))
        batch = lanes([cache], [len(tokens)])
        masks = [batch.masks(module, [visible_columns]) for module, visible_columns in enumerate(visible)]
        return self._run(tokens, states_beside, positions, masks, batch, attend, seen)

    @torch.no_grad()
    def run_lanes(self, lanes: list[LaneRows], attend: Attend, batch: type[BatchCache]) -> list[Tensor]:
        """See `LaneModel`; the outputs of all modules, [R, modules, hidden]. Rows that pad a lane repeat its last."""
        for lane in lanes:
            lane.cache.open(len(lane.tokens))
        caches = batch([lane.cache for lane in lanes], [len(lane.tokens) for lane in lanes])
        width = caches.width
        rows = [torch.arange(width).clamp(max=len(lane.tokens) - 1) for lane in lanes]
        states = torch.cat(
            [
                lane.hidden_states[upload(lane_rows, lane.hidden_states.device)]
                for lane, lane_rows in zip(lanes, rows, strict=True)
                if lane.hidden_states is not None
            ]
        )
        tokens, positions = (
            torch.cat([lane_numbers[lane_rows] for lane_numbers, lane_rows in zip(numbers, rows, strict=True)])
            for numbers in ([lane.tokens for lane in lanes], [lane.positions for lane in lanes])
        )
        masks = [caches.masks(module, [lane.visible[module] for lane in lanes]) for module in range(self.layers)]

        def states_beside(module: int, outputs_above: list[Tensor]) -> Tensor:
            return states[:, module] if module < states.shape[1] else outputs_above[-1]

        outputs = torch.stack(self._run(tokens, states_beside, positions, masks, caches, attend), 1)
        return [outputs[lane_number * width :][: len(lane.tokens)] for lane_number, lane in enumerate(lanes)]

    def _run(
        self,
        tokens: Tensor,
        states_beside: StatesBeside,
        positions: Tensor,
        masks: list[Tensor],
        batch: BatchCache,
        attend: Attend,
        seen: SeenRows | None = None,
    ) -> list[Tensor]:
        """The outputs of each module for the rows of all lanes of `batch`, lane by lane, each as wide as the widest."""
        count = len(batch.caches)
        began = time.perf_counter()
        axes = positions if seen is None or seen.axes is None else seen.axes
        cos, sin = (table.view(count, 1, batch.width, -1) for table in self.rotary_table(axes))
        outputs = list[Tensor]()
        for module, mask in enumerate(masks):
            embedded = self.embed(tokens, positions, module)
            embedded = embedded if seen is None else self.see(embedded, seen, positions)
            x, residual = self.fuse(embedded, states_beside(module, outputs), module)
            outputs.append(self.run_layer(module, x, residual, (cos, sin), upload(mask, self.device), batch, attend))
        if self.device.type != "cpu":  # a device runs asynchronously: wait, or the clock would measure the launch
            torch.accelerator.synchronize()
        self.forward_s += time.perf_counter() - began
        self.calls += 1
        self.attention_calls += len(masks) if self._counts else batch.slower_layers()
        self.fallbacks.update(batch.fallbacks)
        return outputs

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
        """The decoder layer of `module` on the rows of all lanes, [R, hidden].

        Args:
            module: The module.
            x: The input of attention, [R, ...].
            residual: The residual stream beside it, [R, hidden].
            tables: Cosine and sine, [lanes, 1, width, head_dim].
            mask: bool [lanes, 1, width, C].
            batch: The caches of the lanes.
            attend: The attention to run.
        """
        stream = residual + self.attention(module, x, tables, mask, batch, attend)
        normed = self.norm(stream, f"{self.prefix(module)}.post_attention_layernorm")
        return stream + self.feed_forward(normed, module)

    def attention(
        self,
        module: int,
        x: Tensor,
        tables: tuple[Tensor, Tensor],
        mask: Tensor,
        batch: BatchCache,
        attend: Attend,
    ) -> Tensor:
        """The attention of `module` on its input `x` [R, ...], after its output projection: [R, hidden].

        The arguments are those of `run_layer`.
        """
        prefix, count = self.prefix(module), len(batch.caches)
        queries, keys, values = (self.project_heads(x, f"{prefix}.self_attn.{part}_proj", count) for part in "qkv")
        queries, keys = (self.rotary(heads, *tables, module) for heads in (queries, keys))
        keys, values = self.keep_rows(batch, keys, values, module)
        columns = batch.columns(module, keys, values, mask)
        output = attend(queries, columns, self.layer.head_dim**-0.5)
        return self.linear(output.transpose(1, 2).reshape(len(x), -1), f"{prefix}.self_attn.o_proj")

    def append(
        self,
        tokens: list[int],
        states: Tensor,
        cache: KvCache,
        attend: Attend,
        lanes: type[BatchCache] = BatchCache,
        seen: SeenRows | None = None,
    ) -> Tensor:
        """Run rows after the committed columns of `cache`, each below the one before, and commit them."""
        rows = torch.arange(cache.length, cache.length + len(tokens))
        visible = causal(rows, self.reaches)[0]
        outputs = self.forward(torch.tensor(tokens), states, rows, visible, cache, attend, lanes, seen)
        cache.commit(list(range(len(tokens))))
        return outputs

    def linear(self, x: Tensor, name: str) -> Tensor:
        """`x` [R, in] through the projection `name`, with its bias if it has one: [R, out]."""
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        """`x` [R, hidden] through the root mean square norm `name`; 16-bit rows are normed in float32."""
        wide_rows = x if x.dtype in (torch.float32, torch.float64) else x.float()
        scale = torch.rsqrt(wide_rows.square().mean(-1, keepdim=True) + self.layer.norm_eps)
        return (wide_rows * scale).to(x.dtype) * self.weights[f"{name}.weight"]

    def project_heads(self, x: Tensor, name: str, lanes: int) -> Tensor:
        """Queries, keys or values of rows `x` through the projection `name`: [lanes, heads, R, head_dim]."""
        projected = self.linear(x, name)
        return projected.view(lanes, len(x) // lanes, -1, self.layer.head_dim).transpose(1, 2)

    def rotary_table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [R, head_dim] of the rotary angles at `positions` [R], or [3, R] on three axes."""
        turns, magnitude = head_frequencies(self.layer)
        by_pair = positions.double()[..., None] * turns
        if positions.dim() == 2:
            parts = torch.split(by_pair, list(self.layer.sections), -1)
            by_pair = torch.cat([part[axis] for axis, part in enumerate(parts)], -1)
        angles = by_pair.repeat(1, 2)
        cos, sin = (magnitude * turned for turned in (angles.cos(), angles.sin()))
        # The host rounds them: a device may have no float64.
        return upload(cos.to(self.dtype), self.device), upload(sin.to(self.dtype), self.device)


def head_frequencies(layer: HeadLayer) -> tuple[Tensor, float]:
    """The rotary angle of each pair of dimensions by position, float64 [head_dim / 2], and the factor on its table."""
    rope = layer.rope
    width = layer.head_dim
    if rope is None:
        turns: Tensor = layer.theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        return turns, 1.0
    fields = {"rope_type": rope.kind, "rope_theta": rope.theta, "factor": rope.factor}
    fields |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    fields |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
    fields |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
    fields |= {"attention_factor": rope.attention_factor or None}
    fields |= {"original_max_position_embeddings": rope.original}
    return inverse_frequencies(fields, width, 0)


MakeHead: TypeAlias = Callable[[Case, CausalLm, Mapping[str, Tensor]], HeadModel]
"""From a case, its target and the weights of the head in the target's dtype to the head."""


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [lanes, heads, R, head_dim] turned by half split: dimension i turns with i + head_dim / 2."""
    first_half, second_half = x.chunk(2, -1)
    return x * cos + torch.cat([-second_half, first_half], -1) * sin
