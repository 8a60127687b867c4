"""OracleFamily: what the oracle knows of a model family: its formulas, and how its config.json is read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from reference.files.fields import Fields
from reference.oracle.formulas.layer import LLAMA, Formulas

KINDS_OF_LAYER = {"full_attention": False, "sliding_attention": True}
"""What `layer_types` may say of a layer, and whether it slides."""


def layers_named(fields: Fields, layers: int) -> list[bool] | None:
    """Whether each layer slides by the field `layer_types`; None where the file has no such field.

    Raises:
        UnreadableCheckpoint: a list of another length, or with a kind that is not known here.
    """
    types = fields.get("layer_types")
    if types is None:
        return None
    if (
        not isinstance(types, list)
        or len(types) != layers
        or not all(isinstance(kind, str) and kind in KINDS_OF_LAYER for kind in types)
    ):
        raise fields.refuse(
            f"layer_types must say full_attention or sliding_attention for each of {layers} layers; "
            "compare --against a backend"
        )
    return [KINDS_OF_LAYER[kind] for kind in types]


def all_or_none(fields: Fields, layers: int, slides: bool, family: str) -> list[bool]:
    """`slides` for every layer, which `layer_types` may repeat and not contradict."""
    named = layers_named(fields, layers)
    if named is not None and named != [slides] * layers:
        raise fields.refuse(
            f"layer_types contradicts sliding_window, which {family} gives to all layers or none; correct it"
        )
    return [slides] * layers


def no_window(fields: Fields, layers: int, family: str) -> list[bool]:
    """The layers of a family whose transformers class has no window."""
    if fields.get("sliding_window") is not None:
        raise fields.refuse(f"{family} has no sliding_window; remove the field, or compare --against a backend")
    return all_or_none(fields, layers, False, family)


@dataclass(frozen=True)
class OracleFamily:
    """A family as the oracle knows it.

    Attributes:
        name: As in `reference.family.FAMILIES`.
        formulas: What it computes, Llama's where nothing else is said.
        model_types: What `model_type` its config.json says; empty where checkpoints of it are not read.
        defaults: Its default of a field that config.json leaves out, where it matters to the numbers.
        activation: The field that names the activation, and the value that the formulas compute.
        slides: From the fields, the number of layers and the family's name to whether each layer has the window.
        window: The default of `sliding_window` where a layer slides.
        fields: The fields of `Architecture` that are no size: biases, norms of queries and keys, caps, settings.
    """

    name: str
    formulas: Formulas = LLAMA
    model_types: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    activation: tuple[str, str] = ("hidden_act", "silu")
    slides: Callable[[Fields, int, str], list[bool]] = no_window
    fields: Callable[[Fields], dict[str, Any]] = lambda fields: {}
