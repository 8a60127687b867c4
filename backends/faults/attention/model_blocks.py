"""Faults of a model's own blocks: experts, and what comes before attention.

Each strikes in blocks whose rows are a tree, so that contexts and plain decoding stay right.
"""

import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from specverify.backends.engine.model.causal_lm import CausalLm
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import Plant, attended_fault

HookChange = Callable[[Any, Callable[[], bool]], None]
"""Changes a model in place; the second argument tells whether the rows of the forward under way are a tree."""

WIDE = 3
"""Rows of a tree from which on it is called wide."""


def in_network(change: HookChange) -> Plant:
    """A decorator that makes a function from seams to seams, whose target runs a copy of its model with this change."""

    def plant(seams: Seams) -> Seams:
        return replace(seams, network=changed_network(change))

    plant.__doc__ = change.__doc__
    return plant


def changed_network(change: HookChange) -> Callable[[CausalLm], CausalLm]:
    """From the target's model to its copy with this change, which is made once."""
    changed_models = dict[CausalLm, CausalLm]()

    def network(model: CausalLm) -> CausalLm:
        if model not in changed_models:
            model_copy = deepcopy(model.model)
            positions: list[Tensor] = []

            def note_positions(_: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                positions[:] = [kwargs["position_ids"]]

            model_copy.register_forward_pre_hook(note_positions, with_kwargs=True)
            change(model_copy, lambda: bool(positions) and not bool((positions[0].diff(dim=1) == 1).all()))
            changed_models[model] = CausalLm(model_copy, str(model.device))
        return changed_models[model]

    return network


@attended_fault(
    "expert-router-fed-sibling-row",
    "own: routers flatten the rows of a batch, and an index by arrival takes the row beside",
    "a tree on a model with experts",
)
@in_network
def router_of_sibling(model: Any, tree: Callable[[], bool]) -> None:
    """The router of a mixture of experts scores the row before in the block in place of the row itself."""
    for name, module in model.named_modules():
        if name.endswith((".mlp.gate", ".mlp.router", ".feed_forward.router")):
            module.register_forward_pre_hook(lambda _, args: (args[0].roll(1, -2), *args[1:]) if tree() else None)


@attended_fault(
    "shared-expert-skipped-when-wide",
    "own: a fused kernel of experts leaves the shared expert to a path for few rows",
    "a tree of some rows on a model with a shared expert",
)
@in_network
def shared_expert_skipped(model: Any, tree: Callable[[], bool]) -> None:
    """The shared expert adds nothing to the rows of a wide tree."""
    for name, module in model.named_modules():
        if name.endswith((".shared_expert", ".shared_experts")):
            module.register_forward_hook(
                lambda _, __, output: torch.zeros_like(output) if tree() and output.shape[-2] >= WIDE else None
            )


@attended_fault(
    "expert-full-drops-rows",
    "own: kernels with a capacity for each expert drop the rows beyond it, and a tree's rows choose alike",
    "a tree with two rows that choose one expert",
)
@in_network
def expert_full(model: Any, tree: Callable[[], bool]) -> None:
    """Each expert takes the first row of a tree that chooses it, and adds nothing to later rows."""

    def first_alone(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        hidden, expert_ids, weights = args
        if not tree():
            return None
        # [rows, k, rows]: whether the k-th expert of a row is one of another row, which must be an earlier one.
        same_expert = (expert_ids[:, :, None, None] == expert_ids[None, None]).any(-1)
        earlier = torch.ones(len(expert_ids), len(expert_ids), dtype=torch.bool).tril(-1)
        return hidden, expert_ids, weights.masked_fill((same_expert & earlier[:, None]).any(-1), 0)

    for name, module in model.named_modules():
        if name.endswith(".mlp.experts"):
            module.register_forward_pre_hook(first_alone)


@attended_fault(
    "expert-factor-on-output",
    "own: kernels of experts weigh what leaves an expert, and Llama 4 weighs what enters it",
    "a tree on a Llama 4 model with experts",
)
@in_network
def factor_on_output(model: Any, tree: Callable[[], bool]) -> None:
    """The router's factor of a tree's row multiplies the output of an expert in place of its input."""
    for layer in model.model.layers:
        block = getattr(layer, "feed_forward", None)
        if hasattr(block, "router"):
            _weigh_output(block, tree)


def _weigh_output(block: Any, tree: Callable[[], bool]) -> None:
    router_output: list[Tensor] = []

    def note_router(_: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        router_output[:] = [args[0], output[0].transpose(0, 1).reshape(-1, 1)]

    # The module of experts gets the rows of one expert after those of another, already weighed.
    block.router.register_forward_hook(note_router)
    block.experts.register_forward_pre_hook(
        lambda _, __: (router_output[0].repeat(len(router_output[1]) // len(router_output[0]), 1),) if tree() else None
    )
    block.experts.register_forward_hook(lambda _, __, output: output * router_output[1] if tree() else None)


@attended_fault(
    "rotary-table-of-other-layers",
    "own: models with a rotary table for each kind of layer run on engines that hold one",
    "a tree on a model whose kinds of layers have tables of their own",
)
@in_network
def one_rotary_table(model: Any, tree: Callable[[], bool]) -> None:
    """Every layer turns a tree's queries and keys by the rotary table of the first layer."""
    first: list[Any] = []

    def keep_first(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first[:] = [kwargs["position_embeddings"]]

    def replace_table(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Heads of another width need a table of theirs.
        fits = _width(first[0]) == _width(kwargs["position_embeddings"])
        return (args, {**kwargs, "position_embeddings": first[0]}) if tree() and fits else None

    layers = list(model.model.layers)
    layers[0].self_attn.register_forward_pre_hook(keep_first, with_kwargs=True)
    for layer in layers[1:]:
        layer.self_attn.register_forward_pre_hook(replace_table, with_kwargs=True)


def _width(tables: Any) -> int:
    """The width of a rotary table, of cosines and sines or of complex numbers."""
    return int((tables if isinstance(tables, Tensor) else tables[0]).shape[-1])


@attended_fault(
    "query-key-norm-after-rotary",
    "own: families differ in the order of the norm and the rotary embedding of queries and keys",
    "a tree on a model that norms queries and keys before rotary embedding",
)
@in_network
def norm_after_rotary(model: Any, tree: Callable[[], bool]) -> None:
    """Queries and keys of a tree are normed after their rotary embedding, where the model norms them before.

    Rotary embedding keeps the root mean square, so that the norm's weight alone falls on other dimensions.
    """
    for layer in model.model.layers:
        attention = layer.self_attn
        if hasattr(attention, "q_norm") and attention.q_norm.weight.shape[0] == attention.head_dim:
            _after_rotary(attention, tree)


def _after_rotary(attention: Any, tree: Callable[[], bool]) -> None:
    turn = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    tables: list[Any] = []
    # The norm's input is [B, T, heads, d], or in other families [B, heads, T, d].
    axis = 2 if type(attention).__name__.startswith(("Qwen3", "Glm4Moe")) else 1
    if turn is None or "k" not in signature(turn).parameters:  # Gemma 4 turns queries and keys one by one
        return

    def note_table(_: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tables[:] = [kwargs["position_embeddings"]]

    def turn_before_norm(norm: nn.Module, _: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if not tree():
            return None
        cos, sin = tables[0]
        # The hook of the norm must not run on its own weight: hence `forward`.
        gain: Tensor = norm.forward(torch.ones_like(output[..., :1, :]))
        turned_output = turn(output / gain, output, cos, sin, unsqueeze_dim=axis)[0] * gain
        # Turned back, so that the model's own rotary embedding leads to the wrong order.
        back: Tensor = turn(turned_output, turned_output, cos, -sin, unsqueeze_dim=axis)[0]
        return back.div(cos.square().add(sin.square()).mean())

    attention.register_forward_pre_hook(note_table, with_kwargs=True)
    for norm in (attention.q_norm, attention.k_norm):
        norm.register_forward_hook(turn_before_norm)


@attended_fault(
    "query-temperature-by-arrival",
    "own: transformers 5.23 scales the queries of Llama 4 by the index of the row in cache and forward",
    "a tree on a model whose queries have a temperature",
)
@in_network
def temperature_by_arrival(model: Any, tree: Callable[[], bool]) -> None:
    """The temperature of a query follows from the row's place in the block in place of its position."""
    for layer in model.model.layers:
        right = getattr(layer.self_attn, "temperature", None)
        if right is not None:
            layer.self_attn.temperature = _by_arrival(right)


def _by_arrival(right: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda query, positions: right(query, positions[:, :1] + torch.arange(positions.shape[1]))
