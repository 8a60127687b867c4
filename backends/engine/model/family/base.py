"""ModelFamily: how the engine opens the transformers model of a family, built in or from a checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from backends.base import Unsupported
from reference.architecture import Architecture

Exact = Callable[[nn.Module, Any], nn.Module]
"""From a module of a model and the model's config to the module of the same formula in float64."""


@dataclass(frozen=True)
class ModelFamily:
    """A family as the engine knows it.

    Attributes:
        name: As in `reference.family.FAMILIES`.
        config: transformers' class of its config.
        model: transformers' class of its causal model.
        fields: The fields of that config beyond those that all families share; raises Unsupported for an architecture
            that transformers' model cannot be.
        caps_scores: Whether transformers' model caps the scores of attention itself, by `fields`; the engine hands
            `Architecture.score_cap` to attention for the others.
        renamed: From the name of a weight in `reference.weights` to transformers' name.
        completed: Gives a built-in model, in place, the buffers that no state dict holds.
        prepared: Changes an open model, in place, where transformers' own code is wrong for a tree of rows.
        exact: Float64 forms of modules that transformers computes in float32, by the name of their class.
        checkpoint: From a config.json whose `model_type` transformers does not know to a config, by that type.
    """

    name: str
    config: Any
    model: Any
    fields: Callable[[Architecture], dict[str, Any]]
    caps_scores: bool = False
    renamed: Callable[[str], str] = lambda name: name
    completed: Callable[[Any], None] = lambda network: None
    prepared: Callable[[Any], None] = lambda network: None
    exact: Mapping[str, Exact] = field(default_factory=dict)
    checkpoint: Mapping[str, Callable[[dict[str, Any]], Any]] = field(default_factory=dict)


def same(arch: Architecture, what: str, *values: Any) -> None:
    """Raise Unsupported where `values` differ, which transformers' model has one setting for."""
    if len(set(values)) > 1:
        raise Unsupported(f"{arch.family} needs equal {what}, as transformers' model has one setting for them")


def no_window(arch: Architecture) -> None:
    """Raise Unsupported for a window, which transformers' model does not have."""
    if any(arch.windows):
        raise Unsupported(f"{arch.family} with a sliding window: transformers' model has none")


def no_irope(arch: Architecture) -> None:
    """Raise Unsupported for what only Llama 4 has."""
    if any(arch.chunks) or arch.unrotated:
        raise Unsupported(f"{arch.family} with chunks or layers without rotary embedding: only llama4 has them")


def layer_types(arch: Architecture) -> list[str]:
    """The words of transformers for layers with a window and without."""
    return ["sliding_attention" if window else "full_attention" for window in arch.windows]
