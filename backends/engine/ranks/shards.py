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

from backends.base import Unsupported
from backends.engine.collectives.group import Group
from backends.engine.collectives.seams import RankSeams
from backends.engine.kv.base import CacheSpec
from backends.engine.model.causal_lm import CausalLm
from reference.parallel.ranks import kv_part, rank_part

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
    before = _HERE.set((group, seams))
    try:
        yield
    finally:
        _HERE.reset(before)


class ShardedEmbedding(nn.Module):
    """An embedding of which this rank holds the ids from `first` on."""

    def __init__(self, weight: Tensor, first: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._first = first

    def forward(self, tokens: Tensor) -> Tensor:
        """The embeddings of `tokens` [B, T]."""
        group, seams = _HERE.get()
        return seams.embedded(group, tokens, self.weight, self._first)


class ShardedOutput(nn.Module):
    """A projection of which this rank holds the outputs; where `whole` is a size, they are gathered to so many."""

    def __init__(self, weight: Tensor, bias: Tensor | None, whole: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._whole = whole

    def forward(self, rows: Tensor) -> Tensor:
        """The outputs for `rows` [B, T, inputs]."""
        mine = nn.functional.linear(rows, self.weight, self.bias)
        if not self._whole:
            return mine
        group, seams = _HERE.get()
        return seams.gathered(group, mine, self._whole)


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

    def __init__(self, whole: CausalLm, group: Group, seams: RankSeams) -> None:
        # Everything but the weights is the whole model's; counters begin anew.
        self.__dict__.update(whole.__dict__)
        self.forward_s, self.calls, self.attention_calls = 0.0, 0, 0
        self.fallbacks = type(whole.fallbacks)()
        known = _parts.setdefault(whole, {})
        at = (group.rank, group.size)
        if at not in known:
            known[at] = _sharded(whole.model, *at)
        self.model = known[at]
        self._group, self._seams, self._whole = group, seams, whole.model

    @property
    def whole(self) -> Any:
        """See `CausalLm.whole`: drafts run whole on every rank."""
        return self._whole

    def forward(self, *given: Any, **named: Any) -> list[Tensor]:
        """As `CausalLm.forward`; all ranks call it together."""
        with _as_rank(self._group, self._seams):
            return super().forward(*given, **named)

    def room(self, capacity: int, rows: int) -> CacheSpec:
        """As `CausalLm.room`, with the KV heads of this rank."""
        spec = super().room(capacity, rows)
        first, end = kv_part(spec.kv_heads, self._group.rank, self._group.size)
        return replace(spec, kv_heads=end - first)

    @property
    def whole_kv_heads(self) -> int:
        """The number of KV heads of the whole model."""
        return super().room(1, 1).kv_heads


def _sharded(whole: Any, rank: int, ranks: int) -> Any:
    """The model `whole` of transformers with the part of `rank` alone.

    Raises:
        Unsupported: The model's class has no sharded form, or its heads cannot be shared out.
    """
    config = whole.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if type(whole).__name__ not in CLASSES:
        raise Unsupported(f"{type(whole).__name__} on {ranks} ranks: known are {', '.join(CLASSES)}")
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise Unsupported(f"{heads} heads and {kv_heads} KV heads on {ranks} ranks: they cannot be shared out evenly")
    # Every tensor is put into the memo as its own copy: views below share the storage of the whole model.
    shared = {id(one): one for one in (*whole.parameters(), *whole.buffers())}
    model = copy.deepcopy(whole, shared)
    width = config.vocab_size
    ids = slice(*rank_part(width, rank, ranks))
    model.model.embed_tokens = ShardedEmbedding(whole.model.embed_tokens.weight[ids], ids.start)
    model.lm_head = ShardedOutput(whole.lm_head.weight[ids], None, width)
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
        where = number if number < len(model.model.layers) - 1 else "last"
        attention.o_proj = _inputs(attention.o_proj, queries, f"layers.{where}.o_proj")
        block.down_proj = _inputs(block.down_proj, inner, f"layers.{where}.down_proj")
    return model


def _times(dim: int, heads: tuple[int, int]) -> slice:
    return slice(heads[0] * dim, heads[1] * dim)


def _outputs(whole: nn.Linear, rows: slice) -> ShardedOutput:
    bias: Tensor | None = whole.bias
    return ShardedOutput(whole.weight[rows].detach(), None if bias is None else bias[rows].detach())


def _inputs(whole: nn.Linear, columns: slice, name: str) -> ShardedInput:
    bias: Tensor | None = whole.bias
    return ShardedInput(whole.weight[:, columns].detach(), None if bias is None else bias.detach(), name)
