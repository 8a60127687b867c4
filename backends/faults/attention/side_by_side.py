"""Faults of blocks side by side: norms, rotary embedding and windows of some layers, and logits.

Each strikes in blocks whose rows are a tree, so that contexts and plain decoding stay right.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from specverify.backends.engine.lower_tree import TreeTensors
from specverify.backends.engine.model.float64_modules import ExactLayerNorm
from specverify.backends.engine.reach import Reach
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.attention.model_blocks import in_network
from specverify.backends.faults.fault import attended_fault, in_place_of, lowered_fault, scored_fault
from specverify.reference.tree import Tree


@attended_fault(
    "norm-keeps-mean",
    "antonellof/ferrox #240: a root mean square norm in place of LayerNorm runs Command R7B, and diverges",
    "a tree on a model whose norms subtract the mean",
)
@in_network
def norm_keeps_mean(model: Any, tree: Callable[[], bool]) -> None:
    """The norms of a tree's rows divide by the root mean square, where the model subtracts the mean first."""
    for module in model.modules():
        if isinstance(module, ExactLayerNorm):
            module.register_forward_hook(_root_mean_square(module.eps, tree))
        elif type(module).__name__ == "Cohere2LayerNorm":
            module.register_forward_hook(_root_mean_square(module.variance_epsilon, tree))


def _root_mean_square(eps: float, tree: Callable[[], bool]) -> Callable[[Any, Any, Tensor], Tensor | None]:
    def hook(norm: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if not tree():
            return None
        hidden = args[0].to(torch.promote_types(args[0].dtype, torch.float32))
        normed = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps)
        scaled: Tensor = norm.weight * normed
        return scaled.to(output.dtype)

    return hook


@attended_fault(
    "bare-layer-rotated",
    "airockchip/rknn-llm #501, antonellof/ferrox #240: layers without rotary embedding are rotated as the others are",
    "a tree on a model with layers without rotary embedding, and a row that sees another",
)
@in_network
def bare_layer_rotated(model: Any, tree: Callable[[], bool]) -> None:
    """Layers without rotary embedding turn the queries and keys of a tree as the others do."""
    for layer in model.model.layers:
        attention: Any = getattr(layer, "self_attn", None)
        is_bare = type(attention).__name__ == "Cohere2Attention" and attention.sliding_window is None
        if is_bare or getattr(attention, "use_rope", 1) == 0:
            _rotate_projections(attention, tree)


def _rotate_projections(attention: Any, tree: Callable[[], bool]) -> None:
    turn = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    tables: list[Any] = []

    def note_tables(_: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tables[:] = kwargs["position_embeddings"]

    def turn_rows(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if not tree():
            return None
        by_head = output.view(*output.shape[:-1], -1, attention.head_dim)
        turned: Tensor = turn(by_head, by_head, *tables, unsqueeze_dim=2)[0]
        return turned.view(output.shape)

    attention.register_forward_pre_hook(note_tables, with_kwargs=True)
    for projection in (attention.q_proj, attention.k_proj):
        projection.register_forward_hook(turn_rows)


@attended_fault(
    "blocks-one-after-another",
    "own: engines whose layers all add attention first give the feed-forward block what attention has added",
    "a tree on a model whose attention and feed-forward block stand side by side",
)
@in_network
def one_after_another(model: Any, tree: Callable[[], bool]) -> None:
    """The feed-forward block of a tree's rows reads the stream behind attention, where it reads the layer's input."""
    for layer in model.model.layers:
        if not hasattr(layer, "post_attention_layernorm"):
            _read_behind_attention(layer, tree)


def _read_behind_attention(layer: Any, tree: Callable[[], bool]) -> None:
    entering: list[Tensor] = []

    def note_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entering[:] = [args[0] if args else kwargs["hidden_states"]]

    def add_attention(_: nn.Module, __: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        entering[0] = entering[0] + output[0]

    layer.register_forward_pre_hook(note_input, with_kwargs=True)
    layer.self_attn.register_forward_hook(add_attention)
    # The hooks of the norm must not run again: hence `forward`.
    layer.mlp.register_forward_pre_hook(lambda _, __: (layer.input_layernorm.forward(entering[0]),) if tree() else None)


@lowered_fault(
    "window-in-every-layer",
    "ROCm/ATOM #1908: layers without a window fall back on the one of the model",
    "a model in which some layers alone have a window, and a context longer than it",
)
@in_place_of("lower_tree")
def window_everywhere(
    seams: Seams, tree: Tree, committed: int, position: int, reaches: list[Reach], padded_nodes: int
) -> TreeTensors:
    """Layers without a window have that of the other layers in a tree's masks."""
    window = max(reach.window for reach in reaches)
    widened = [replace(reach, window=window) if window and not reach.chunk else reach for reach in reaches]
    return seams.lower_tree(tree, committed, position, widened, padded_nodes)


@scored_fault(
    "logit-scale-dropped",
    "antonellof/ferrox #240: without the multiplier of logits Command R7B runs, and its law is another",
    "a tree on a model that multiplies or divides its logits",
)
@in_network
def logit_scale_dropped(model: Any, tree: Callable[[], bool]) -> None:
    """The logits of a tree's rows lack the number that the model multiplies them by."""
    scale = float(
        getattr(model.config, "logit_scale", None) or 1 / (getattr(model.config, "logits_scaling", None) or 1)
    )
    model.lm_head.register_forward_hook(lambda _, __, output: output / scale if tree() and scale != 1 else None)
