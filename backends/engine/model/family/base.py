"""The description of a model family, and the checks that families share.

A `ModelFamily` says how the engine opens the family's transformers model, built in or from a checkpoint.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from backends.base import Unsupported
from reference.architecture import Architecture

Exact = Callable[[nn.Module, Any], nn.Module]
"""From a module of a model and the model's config to a module that computes the same formula in float64."""


@dataclass(frozen=True)
class ModelFamily:
    """A model family, as the engine opens it.

    Attributes:
        name: The name in `reference.family.FAMILIES`.
        config: transformers' class of its config.
        model: transformers' class of its causal model.
        fields: From an architecture to the fields of the config that not all families share. Raises Unsupported for an
            architecture that transformers' model cannot have.
        caps_scores: Whether transformers' model applies a soft cap to the scores of attention itself, set by `fields`.
            For other families the engine passes `Architecture.score_cap` to attention.
        renamed: From the name of a weight in `reference.weights` to transformers' name.
        completed: Gives a built-in model, in place, the buffers that no state dict holds.
        prepared: Changes an open model, in place, where transformers' own code is wrong for a tree of rows.
        exact: Float64 forms of modules that transformers computes in float32, by the name of their class.
        checkpoint: For each `model_type` that transformers does not know, a function from the content of config.json
            to a config.
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
    """Raise Unsupported if `values` differ, because transformers' model has one setting for all of them."""
    if len(set(values)) > 1:
        raise Unsupported(f"{arch.family} needs equal {what}, as transformers' model has one setting for them")


def no_window(arch: Architecture) -> None:
    """Raise Unsupported for an architecture with a sliding window, which transformers' model does not have."""
    if any(arch.windows):
        raise Unsupported(f"{arch.family} with a sliding window: transformers' model has none")


def no_irope(arch: Architecture) -> None:
    """Raise Unsupported for chunks or layers without rotary embedding, which only Llama 4 has."""
    if any(arch.chunks) or arch.unrotated:
        raise Unsupported(f"{arch.family} with chunks or layers without rotary embedding: only llama4 has them")


def layer_types(arch: Architecture) -> list[str]:
    """The kind of each layer, with a window or without, under transformers' names."""
    return ["sliding_attention" if window else "full_attention" for window in arch.windows]
