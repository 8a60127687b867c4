"""Faults of layers that differ in size, share keys and values, or have inputs of their own (Gemma 4)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from specverify.backends.faults.attention.model_blocks import in_network
from specverify.backends.faults.fault import attended_fault, scored_fault

Kwargs = dict[str, Any]
Changed = tuple[tuple[Any, ...], Kwargs] | None
"""The arguments of a module in place of its own; None leaves them."""


def _attentions(model: Any) -> list[Any]:
    """The attention modules of a model whose layers may share keys and values; none of another model."""
    attentions = [layer.self_attn for layer in model.model.layers if hasattr(layer, "self_attn")]
    return [attention for attention in attentions if hasattr(attention, "is_kv_shared_layer")]


class _RecordingCache:
    """The cache argument of one layer's attention, which keeps the columns that the layer reads."""

    def __init__(self, cache: Any, columns: dict[int, tuple[Tensor, Tensor]]) -> None:
        self.cache, self.columns = cache, columns

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write this forward's rows, and return the columns of the cache."""
        columns: tuple[Tensor, Tensor] = self.cache.update(keys, values, layer)
        self.columns[layer] = columns
        return columns


@attended_fault(
    "shared-layer-reads-first-layer",
    "Alberto-Codes/turboquant-vllm issue #79: layers that share are taken for layers of another index than their donor",
    "a tree on a model whose last layers read an earlier layer, behind another layer of its kind",
)
@in_network
def reads_first_layer(model: Any, tree: Callable[[], bool]) -> None:
    """Layers that share keys and values read those of the first layer of their kind, in place of the last one's."""
    columns: dict[int, tuple[Tensor, Tensor]] = {}

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> Changed:
        return args, {**kwargs, "past_key_values": _RecordingCache(kwargs["past_key_values"], columns)}

    def read_first(module: Any, args: tuple[Any, ...], kwargs: Kwargs) -> Changed:
        first = next(other.layer_idx for other in attentions if other.layer_type == module.layer_type)
        return (args, {**kwargs, "shared_kv_states": {module.layer_type: columns[first]}}) if tree() else None

    attentions = _attentions(model)
    for attention in attentions:
        hook = read_first if attention.is_kv_shared_layer else record
        attention.register_forward_pre_hook(hook, with_kwargs=True)


def _tables(model: Any, positions: Tensor, kind: str) -> Any:
    return model.model.rotary_emb(model.lm_head.weight, positions, kind)


@attended_fault(
    "shared-layer-queries-behind-update",
    "ml-explore/mlx-lm issue #1805: a layer that shares reads an offset that its donor's update has moved on already",
    "a tree on a model whose last layers read an earlier layer",
)
@in_network
def queries_behind_update(model: Any, tree: Callable[[], bool]) -> None:
    """Layers that share keys and values turn a tree's queries by positions behind the whole block."""

    def late(module: Any, args: tuple[Any, ...], kwargs: Kwargs) -> Changed:
        if not tree():
            return None
        positions = kwargs["position_ids"]
        tables = _tables(model, positions + positions.shape[1], module.layer_type)
        dtype = kwargs["position_embeddings"][0].dtype
        return args, {**kwargs, "position_embeddings": tuple(table.to(dtype) for table in tables)}

    for attention in _attentions(model):
        if attention.is_kv_shared_layer:
            attention.register_forward_pre_hook(late, with_kwargs=True)


@attended_fault(
    "proportional-rotary-of-turned-part",
    "aws-neuron/neuronx-distributed-inference PR #106: frequencies over the turned dimensions in place of the head's",
    "a tree on a model with proportional rotary embedding",
)
@in_network
def rotary_of_turned_part(model: Any, tree: Callable[[], bool]) -> None:
    """Proportional rotary embedding takes a tree's frequencies from the number of turned pairs, and not of all pairs.

    With one turned pair both are the same.
    """

    def wrong_table(module: Any, args: tuple[Any, ...], kwargs: Kwargs) -> Changed:
        if not tree():
            return None
        rope = model.config.rope_parameters[module.layer_type]
        cos, _ = kwargs["position_embeddings"]
        pairs = cos.shape[-1] // 2
        turned = int(rope.get("partial_rotary_factor", 1.0) * pairs)
        inverse = torch.zeros(pairs, dtype=torch.float64)
        inverse[:turned] = float(rope["rope_theta"]) ** -(torch.arange(turned, dtype=torch.float64) / max(1, turned))
        angle = kwargs["position_ids"][..., None].double() * (inverse / rope.get("factor", 1.0))
        angle = torch.cat((angle, angle), -1)
        return args, {**kwargs, "position_embeddings": (angle.cos().to(cos.dtype), angle.sin().to(cos.dtype))}

    for attention in _attentions(model):
        rope = model.config.rope_parameters[attention.layer_type]
        if rope["rope_type"] == "proportional":
            attention.register_forward_pre_hook(wrong_table, with_kwargs=True)


class _AliasingCache:
    """The cache argument of one layer's attention, which takes the rows of keys for those of values."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> Any:
        """Write the keys in both places."""
        return self.cache.update(keys, keys, layer)


@attended_fault(
    "values-are-turned-keys",
    "pegainfer-project/pegainfer issue #758: keys that serve as values are not the normed and turned ones",
    "a tree on a model whose keys serve as values",
)
@in_network
def values_are_turned_keys(model: Any, tree: Callable[[], bool]) -> None:
    """Where the projection of keys is that of values, the values of a tree are the keys behind norm and rotation."""

    def alias(_: nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> Changed:
        return (args, {**kwargs, "past_key_values": _AliasingCache(kwargs["past_key_values"])}) if tree() else None

    for attention in _attentions(model):
        if not attention.is_kv_shared_layer and attention.v_proj is None:
            attention.register_forward_pre_hook(alias, with_kwargs=True)


@attended_fault(
    "window-in-layers-of-other-kind",
    "own: the pattern of layers with a window differs between sizes of one model, and a count from 1 shifts it",
    "a tree behind a context longer than the window, on a model that names the kinds of its layers",
)
@in_network
def window_in_other_layers(model: Any, tree: Callable[[], bool]) -> None:
    """The layers with a window see all columns of a tree's path, and those without one see the window."""
    masks: list[dict[str, Tensor]] = []

    def note_masks(_: nn.Module, __: tuple[Any, ...], kwargs: Kwargs) -> None:
        masks[:] = [kwargs["attention_mask"]]

    def swap_mask(module: Any, args: tuple[Any, ...], kwargs: Kwargs) -> Changed:
        other = "full_attention" if module.layer_type == "sliding_attention" else "sliding_attention"
        mask = masks[0].get(other)
        # A ring buffer holds other columns in layers with a window.
        fits = mask is not None and mask.shape == kwargs["attention_mask"].shape
        return (args, {**kwargs, "attention_mask": mask}) if tree() and fits else None

    attentions = _attentions(model)
    if attentions:
        model.register_forward_pre_hook(note_masks, with_kwargs=True)
    for attention in attentions:
        attention.register_forward_pre_hook(swap_mask, with_kwargs=True)


@attended_fault(
    "layer-input-of-row-before",
    "chrishayuk/larql issue #98: inputs of layers are not extended with the rows of a cached decode",
    "a tree on a model with inputs of layers",
)
@in_network
def layer_input_of_row_before(model: Any, tree: Callable[[], bool]) -> None:
    """The input at the end of each layer belongs to the token of the row before in the block."""
    embedding = getattr(model.model, "embed_tokens_per_layer", None)
    if embedding is not None:
        embedding.register_forward_hook(lambda _, __, output: output.roll(1, 1) if tree() else None)


@scored_fault(
    "layer-inputs-left-out-of-verification",
    "chrishayuk/larql PR #125: a cached decode runs attention and blocks, and leaves out what ends each layer",
    "a tree on a model with inputs of layers",
)
@in_network
def layer_inputs_left_out(model: Any, tree: Callable[[], bool]) -> None:
    """The last layer of a tree adds nothing of its own input."""
    projection = getattr(model.model.layers[-1], "per_layer_projection", None)
    if projection is not None:
        projection.register_forward_hook(lambda _, __, output: torch.zeros_like(output) if tree() else None)
