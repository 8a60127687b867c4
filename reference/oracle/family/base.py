"""OracleFamily: a model family's formulas, and how its config.json is read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from reference.files.fields import Fields
from reference.oracle.formulas.layer import LLAMA, Formulas

KINDS_OF_LAYER = {"full_attention": False, "sliding_attention": True}
"""The values that `layer_types` may hold for a layer, and whether such a layer has the sliding window."""


def layers_named(fields: Fields, layers: int) -> list[bool] | None:
    """Whether the field `layer_types` gives each layer the sliding window; None where the file has no such field.

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
    """`slides` for every layer; a field `layer_types` may repeat this and must not contradict it."""
    # A file may state `layer_types` all the same: entries that agree are harmless.
    named = layers_named(fields, layers)
    if named is not None and named != [slides] * layers:
        raise fields.refuse(
            f"layer_types contradicts sliding_window, which {family} gives to all layers or none; correct it"
        )
    return [slides] * layers


def no_window(fields: Fields, layers: int, family: str) -> list[bool]:
    """False for every layer: the rule of families whose transformers class has no window."""
    if fields.get("sliding_window") is not None:
        raise fields.refuse(f"{family} has no sliding_window; remove the field, or compare --against a backend")
    return all_or_none(fields, layers, False, family)


@dataclass(frozen=True)
class OracleFamily:
    """A model family in the oracle.

    Attributes:
        name: As in `reference.family.FAMILIES`.
        formulas: The family's formulas; Llama's by default.
        model_types: The values of `model_type` in its config.json; empty where its checkpoints are not read.
        defaults: The family's defaults of fields that config.json may leave out, where they matter to the numbers.
        activation: The field that names the activation, and the value that the formulas compute.
        slides: Function from the fields, the number of layers and the family's name to whether each layer has the
            window.
        fields: Function from the fields to those of `Architecture` that are no size: biases, norms of queries and keys,
            caps, settings.
    """

    name: str
    formulas: Formulas = LLAMA
    model_types: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    activation: tuple[str, str] = ("hidden_act", "silu")
    slides: Callable[[Fields, int, str], list[bool]] = no_window
    fields: Callable[[Fields], dict[str, Any]] = lambda fields: {}
