"""A target of which one rank holds a part: heads, inner width and vocabulary.

The modules of transformers stay; projections, embedding and head are replaced by forms over views of the whole weights.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from specverify.backends.base import Unsupported
from specverify.backends.engine.collectives import Group, RankSeams
from specverify.backends.engine.kv.base import CacheSpec
from specverify.backends.engine.model.causal_lm import CausalLm
from specverify.reference.parallel import kv_part, rank_part

CLASSES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
)
"""transformers' classes with a sharded form; their projections, embedding and head are plain ones."""

_HERE: ContextVar[tuple[Group, RankSeams]] = ContextVar("_HERE")
"""The rank whose forward runs; a context belongs to one thread."""


@contextmanager
def _as_rank(group: Group, seams: RankSeams) -> Iterator[None]:
    token = _HERE.set((group, seams))
    try:
        yield
    finally:
        _HERE.reset(token)


class ShardedEmbedding(nn.Module):
    """An embedding of which this rank holds the ids from `first` on."""

    def __init__(self, weight: Tensor, first: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._first = first

    def forward(self, tokens: Tensor) -> Tensor:
        """The embeddings of `tokens` [B, T]."""
        group, seams = _HERE.get()
        return seams.embed_tokens(group, tokens, self.weight, self._first)


class ShardedOutput(nn.Module):
    """A projection of which this rank holds the outputs; if `gathered_size` is not 0, they are gathered to so many."""

    def __init__(self, weight: Tensor, bias: Tensor | None, gathered_size: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._gathered_size = gathered_size

    def forward(self, rows: Tensor) -> Tensor:
        """The outputs for `rows` [B, T, inputs]."""
        outputs = nn.functional.linear(rows, self.weight, self.bias)
        if not self._gathered_size:
            return outputs
        group, seams = _HERE.get()
        return seams.gather_logits(group, outputs, self._gathered_size)


class ShardedInput(nn.Module):
    """A projection of which this rank holds the inputs."""

    def __init__(self, weight: Tensor, bias: Tensor | None, name: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._name = name

    def forward(self, rows: Tensor) -> Tensor:
        """The outputs [B, T, outputs] for this rank's part of the inputs."""
        group, seams = _HERE.get()
        return seams.partial(group, rows, self.weight, self.bias, self._name)


_parts: WeakKeyDictionary[CausalLm, dict[tuple[int, int], Any]] = WeakKeyDictionary()
"""transformers' models of each rank; their weights are views of the whole model's."""


class ShardedLm(CausalLm):
    """The part of rank `group.rank` of a causal model; its logits are whole."""

    def __init__(self, full_model: CausalLm, group: Group, seams: RankSeams) -> None:
        # Everything but the weights is the whole model's; counters begin anew.
        self.__dict__.update(full_model.__dict__)
        self.forward_s = 0.0
        self.calls = 0
        self.attention_calls = 0
        self.fallbacks = type(full_model.fallbacks)()
        shards = _parts.setdefault(full_model, {})
        rank_of_size = (group.rank, group.size)
        if rank_of_size not in shards:
            shards[rank_of_size] = _sharded(full_model.model, *rank_of_size)
        self.model = shards[rank_of_size]
        self._group = group
        self._seams = seams
        self._full_model = full_model.model

    @property
    def unsharded(self) -> Any:
        """See `CausalLm.unsharded`: drafts run whole on every rank."""
        return self._full_model

    def forward(self, *arguments: Any, **named_arguments: Any) -> list[Tensor]:
        """As `CausalLm.forward`; all ranks call it together."""
        with _as_rank(self._group, self._seams):
            return super().forward(*arguments, **named_arguments)

    def room(self, capacity: int, rows: int) -> CacheSpec:
        """As `CausalLm.room`, with the KV heads of this rank."""
        spec = super().room(capacity, rows)
        first, end = kv_part(spec.kv_heads, self._group.rank, self._group.size)
        return replace(spec, kv_heads=end - first)

    @property
    def whole_kv_heads(self) -> int:
        """The number of KV heads of the whole model."""
        return super().room(1, 1).kv_heads


def _sharded(full_model: Any, rank: int, ranks: int) -> Any:
    """The model `full_model` of transformers with the part of `rank` alone.

    Raises:
        Unsupported: The model's class has no sharded form, or its heads cannot be shared out.
    """
    config = full_model.config
    if type(full_model).__name__ not in CLASSES:  # whose layers all have the same heads
        raise Unsupported(f"{type(full_model).__name__} on {ranks} ranks: known are {', '.join(CLASSES)}")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise Unsupported(f"{heads} heads and {kv_heads} KV heads on {ranks} ranks: they cannot be shared out evenly")
    # Every tensor is put into the memo as its own copy: views below share the storage of the whole model.
    shared = {id(tensor): tensor for tensor in (*full_model.parameters(), *full_model.buffers())}
    model = copy.deepcopy(full_model, shared)
    width = config.vocab_size
    ids = slice(*rank_part(width, rank, ranks))
    model.model.embed_tokens = ShardedEmbedding(full_model.model.embed_tokens.weight[ids], ids.start)
    model.lm_head = ShardedOutput(full_model.lm_head.weight[ids], None, width)
    for number, layer in enumerate(model.model.layers):
        attention, block = layer.self_attn, layer.mlp
        dim = attention.head_dim
        queries = _times(dim, rank_part(heads, rank, ranks))
        keys = _times(dim, kv_part(kv_heads, rank, ranks))
        inner = slice(*rank_part(block.down_proj.in_features, rank, ranks))
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            setattr(attention, name, _outputs(getattr(attention, name), rows))
        for name in ("gate_proj", "up_proj"):
            setattr(block, name, _outputs(getattr(block, name), inner))
        layer_name = number if number < len(model.model.layers) - 1 else "last"
        attention.o_proj = _inputs(attention.o_proj, queries, f"layers.{layer_name}.o_proj")
        block.down_proj = _inputs(block.down_proj, inner, f"layers.{layer_name}.down_proj")
    return model


def _times(dim: int, heads: tuple[int, int]) -> slice:
    return slice(heads[0] * dim, heads[1] * dim)


def _outputs(projection: nn.Linear, rows: slice) -> ShardedOutput:
    bias: Tensor | None = projection.bias
    return ShardedOutput(projection.weight[rows].detach(), None if bias is None else bias[rows].detach())


def _inputs(projection: nn.Linear, columns: slice, name: str) -> ShardedInput:
    bias: Tensor | None = projection.bias
    return ShardedInput(projection.weight[:, columns].detach(), None if bias is None else bias.detach(), name)
