"""Faults of models with the gated delta rule: their recurrent layers, and the gate of their attention.

Each strikes in blocks whose rows are a tree, so that contexts and plain decoding stay right.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from specverify.backends.engine.model.family.hybrid_delta_rule import TreeRows
from specverify.backends.engine.model.float64_modules import ExactRmsNorm
from specverify.backends.faults.attention.model_blocks import in_network
from specverify.backends.faults.fault import attended_fault, scored_fault

MODELS = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe")
"""The beginnings of the names of transformers' classes of these models."""

SHIFTED = tuple(f"{model}RMSNorm" for model in MODELS)
"""The classes of their norms that multiply by 1 plus their weight."""


@attended_fault(
    "delta-key-heads-tiled",
    "sgl-project/sglang #36722: value heads take the key heads in turn, as llama.cpp has them and safetensors have not",
    "a tree on a model with the gated delta rule, whose key heads are several and shared by value heads",
)
@in_network
def key_heads_tiled(model: Any, tree: Callable[[], bool]) -> None:
    """Value heads of a tree's rows take the key heads in turn, where neighbouring value heads share one."""
    for module in model.modules():
        if isinstance(module, TreeRows):
            module.share = _in_turn(module, tree)  # type: ignore[method-assign,assignment]


def _in_turn(module: Any, tree: Callable[[], bool]) -> Callable[[Tensor], Tensor]:
    right = module.share
    return lambda rows: rows.repeat(module.num_v_heads // module.num_k_heads, 1) if tree() else right(rows)


@attended_fault(
    "delta-error-before-decay",
    "cumulus, Day-0 Support for the Qwen3.5 Family: an early version retrieved before decaying, and its text looked "
    "plausible",
    "a tree on a model with the gated delta rule, behind a token",
)
@in_network
def error_before_decay(model: Any, tree: Callable[[], bool]) -> None:
    """The error that a tree's row corrects is that of the memory before its decay."""
    for module in model.modules():
        if isinstance(module, TreeRows):
            module.correct = _undecayed(module.correct, tree)  # type: ignore[method-assign]


def _undecayed(right: Callable[..., Tensor], tree: Callable[[], bool]) -> Callable[..., Tensor]:
    def correct(memory: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
        if not tree():
            return right(memory, key, value, decay, rate)
        error = value - (memory * key[:, :, None]).sum(1)
        return memory * decay[:, None, None] + key[:, :, None] * (rate[:, None] * error)[:, None]

    return correct


@attended_fault(
    "norm-shifted-twice",
    "ml-explore/mlx-lm #990 and #1456: 1 was added to the weights of norms that had it already",
    "a tree on a model whose norms multiply by 1 plus their weight",
)
@in_network
def shifted_twice(model: Any, tree: Callable[[], bool]) -> None:
    """The norms of a tree's rows multiply by 2 plus their weight, where the model multiplies by 1 plus it."""
    for module in model.modules():
        if type(module).__name__ in SHIFTED:
            module.register_forward_hook(
                lambda norm, _, output: output + output / (1 + norm.weight) if tree() else None
            )
        elif isinstance(module, ExactRmsNorm) and type(model).__name__.startswith(MODELS):
            # The float64 form has the sum as its weight.
            module.register_forward_hook(lambda norm, _, output: output + output / norm.weight if tree() else None)


def _shift_again(shift: float, tree: Callable[[], bool]) -> Callable[[Any, Any, Tensor], Tensor | None]:
    return lambda norm, _, output: output + output / (shift + norm.weight) if tree() else None


@scored_fault(
    "attention-gate-left-out",
    "gittensor-ai-lab/sparkinfer #393: a path of few rows ran the ungated kernel, and positions below it were right",
    "a tree on a model whose attention has a gate on its output",
)
@in_network
def gate_left_out(model: Any, tree: Callable[[], bool]) -> None:
    """The output of attention enters its projection without its gate in a tree's rows."""
    for layer in model.model.layers:
        attention: Any = getattr(layer, "self_attn", None)
        projection = getattr(attention, "q_proj", None)
        if projection is not None and projection.out_features == 2 * attention.o_proj.in_features:
            projection.register_forward_hook(_open_gate(attention.head_dim, tree))


def _open_gate(width: int, tree: Callable[[], bool]) -> Callable[[nn.Module, Any, Tensor], Tensor | None]:
    """A hook that opens the gate, whose sigmoid is 1 at infinity, behind the query of each head."""

    def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor | None:
        if not tree():
            return None
        by_head = output.reshape(*output.shape[:-1], -1, 2 * width).clone()
        by_head[..., width:] = torch.inf
        return by_head.view(output.shape)

    return hook
