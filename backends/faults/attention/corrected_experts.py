"""Faults of experts with a correction bias, and of rotary embedding of neighbouring dimensions.

Each strikes in blocks whose rows are a tree, so that contexts and plain decoding stay right.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from specverify.backends.faults.attention.model_blocks import in_network
from specverify.backends.faults.fault import attended_fault, scored_fault

BIAS = "e_score_correction_bias"
"""The name of the correction bias in transformers' classes."""


@attended_fault(
    "correction-bias-weighs",
    "huggingface/transformers #39581: the correction bias of ERNIE 4.5 entered the weights of experts too",
    "a tree on a model whose experts are chosen with a correction bias",
)
@in_network
def bias_weighs(model: Any, tree: Callable[[], bool]) -> None:
    """The weights of a tree's experts are those of the scores with the correction bias, by which they are chosen."""
    for router, bias in _corrected_routers(model):
        router.register_forward_hook(_reweigh(bias, tree))


def _corrected_routers(model: Any) -> list[tuple[Any, Callable[[], Tensor]]]:
    """Each router of experts with a correction bias, and a function to that bias [experts]."""
    routers: list[tuple[Any, Callable[[], Tensor]]] = []
    for module in model.modules():
        gate = getattr(module, "gate", None)
        if not isinstance(gate, nn.Module) or not hasattr(gate, "top_k"):
            continue
        holders = (module, gate, getattr(gate, "moe_statics", None))
        places = [(holder, name) for holder in holders for name in (BIAS, "bias")]
        biased = [(holder, name) for holder, name in places if isinstance(getattr(holder, name, None), Tensor)]
        if biased:
            routers.append((gate, partial(_flat, *biased[0])))
    return routers


def _flat(holder: Any, name: str) -> Tensor:
    bias: Tensor = getattr(holder, name)
    return bias.flatten()


def _reweigh(bias: Callable[[], Tensor], tree: Callable[[], bool]) -> Callable[..., Any]:
    def hook(_: nn.Module, __: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        if not tree():
            return None
        products, weights, experts = output
        # The share of each chosen expert grows with its bias, and the sum of the weights stays.
        moved = weights * (1 + bias()[experts].to(weights.dtype))
        return products, moved * (weights.sum(-1, keepdim=True) / moved.sum(-1, keepdim=True)), experts

    return hook


@scored_fault(
    "correction-bias-left-out",
    "vllm-project/vllm #21586: ERNIE 4.5 with experts ran without its e_score_correction_bias",
    "a tree on a model whose experts are chosen with a correction bias",
)
@in_network
def bias_left_out(model: Any, tree: Callable[[], bool]) -> None:
    """The experts of a tree's rows are chosen by their scores alone, without the correction bias."""
    for router, bias in _corrected_routers(model):
        _choose_without(router, bias, tree)


def _choose_without(router: Any, bias: Callable[[], Tensor], tree: Callable[[], bool]) -> None:
    kept: list[Tensor] = []

    def clear(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        kept[:] = [bias().clone()] if tree() else []
        bias().mul_(0 if kept else 1)
        return (args[0], *(argument * 0 for argument in args[1:])) if kept else None

    def restore(_: nn.Module, __: Any, ___: Any) -> None:
        if kept:
            bias().copy_(kept.pop())

    router.register_forward_pre_hook(clear)
    router.register_forward_hook(restore, always_call=True)


@attended_fault(
    "neighbours-rotated-as-halves",
    "huggingface/transformers #39228, nntrainer/nntrainer #3598: ERNIE 4.5 turns neighbouring dimensions, as GLM does",
    "a tree on a model whose rotary embedding turns neighbouring dimensions together, and a row that sees another",
)
@in_network
def rotated_as_halves(model: Any, tree: Callable[[], bool]) -> None:
    """Rotary embedding turns dimension i of a tree's rows with i + d / 2, where the model turns neighbours."""
    for layer in model.model.layers:
        attention = layer.self_attn
        kind = type(attention).__name__
        is_turned = kind.startswith("Ernie4_5") or getattr(attention, "sliding_window", None) is not None
        if kind in ("Ernie4_5Attention", "Ernie4_5_MoeAttention", "Cohere2Attention") and is_turned:
            _turn_halves(attention, tree)


def _turn_halves(attention: Any, tree: Callable[[], bool]) -> None:
    turn = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    # Ernie's tables repeat all pairs side by side, Cohere's each pair twice.
    by_pair = slice(None, None, 2) if type(attention).__name__ == "Cohere2Attention" else slice(attention.head_dim // 2)
    tables: list[Tensor] = []

    def note_tables(_: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tables[:] = kwargs["position_embeddings"]

    def turn_rows(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if not tree():
            return None
        rows = output.view(*output.shape[:-1], -1, attention.head_dim)
        cos, sin = (table[..., None, by_pair] for table in tables)
        first, second = rows.chunk(2, dim=-1)
        halves = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(rows.dtype)
        # Turned back, so that the model's own rotary embedding leads to the wrong one.
        turned: Tensor = turn(halves, halves, tables[0], -tables[1], unsqueeze_dim=2)[0]
        return turned.reshape(output.shape)

    attention.register_forward_pre_hook(note_tables, with_kwargs=True)
    for projection in (attention.q_proj, attention.k_proj):
        projection.register_forward_hook(turn_rows)
