"""OracleFamily: a model family's formulas, and how its config.json is read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specverify.reference.architecture import Architecture
from specverify.reference.files.fields import Fields, quote_value
from specverify.reference.oracle.formulas.layer import LLAMA, Formulas
from specverify.reference.trace import Array

KINDS_OF_LAYER = {"full_attention": False, "sliding_attention": True}
"""The values that `layer_types` may hold for a layer, and whether such a layer has the sliding window."""


def sliding_layers(fields: Fields, layers: int) -> list[bool] | None:
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
    stated_slides = sliding_layers(fields, layers)
    if stated_slides is not None and stated_slides != [slides] * layers:
        raise fields.refuse(
            f"layer_types contradicts sliding_window, which {family} gives to all layers or none; correct it"
        )
    return [slides] * layers


def no_slides(fields: Fields, layers: int, family: str) -> list[bool]:
    """False for every layer, whatever the file says of windows."""
    return [False] * layers


def window_for_all(fields: Fields, layers: int, family: str) -> list[bool]:
    """True for every layer where the file has a `sliding_window`, else False."""
    return all_or_none(fields, layers, fields.get("sliding_window") is not None, family)


def every_second(fields: Fields, layers: int, family: str) -> list[bool]:
    """The layers that `layer_types` names; without that field every second layer, the first included."""
    stated_slides = sliding_layers(fields, layers)
    return [layer % 2 == 0 for layer in range(layers)] if stated_slides is None else stated_slides


def no_window(fields: Fields, layers: int, family: str) -> list[bool]:
    """False for every layer: the rule of families whose transformers class has no window."""
    if fields.get("sliding_window") is not None:
        raise fields.refuse(f"{family} has no sliding_window; remove the field, or compare --against a backend")
    return all_or_none(fields, layers, False, family)


ROPE_NULLABLE = frozenset(
    {"type", "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "alpha"}
)
"""Fields of a rope dictionary in which null means what the absence of the field means."""

ROPE_NULLS = {"truncate": False}
"""Fields of a rope dictionary in which null has a meaning of its own: transformers asks whether the value is true."""


def rope_dictionary(fields: Fields) -> Any:
    """The dictionary `rope_scaling` (transformers 4) or `rope_parameters` (5), where the former wins; {} for none."""
    content = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    return rope_without_nulls(fields, content) if isinstance(content, dict) else content


def rope_without_nulls(fields: Fields, content: dict[str, Any]) -> dict[str, Any]:
    """A rope dictionary with the value that null stands for.

    Raises:
        UnreadableCheckpoint: A field is null with which transformers computes nothing.
    """
    for name, value in content.items():
        if value is None and name not in ROPE_NULLABLE and name not in ROPE_NULLS:
            raise fields.refuse(f"rope field {quote_value(name)} is null; state its value")
    stated = {name: ROPE_NULLS.get(name) if value is None else value for name, value in content.items()}
    # Only these two say something by being there: an older kind, and a factor that follows from the lengths.
    return {name: value for name, value in stated.items() if value is not None or name in ("type", "factor")}


def layered_rope(fields: Fields, theta: float, local: float, local_name: str) -> tuple[dict[str, Any], float]:
    """The rope dictionary of the layers that see all columns, and the base of the layers with a window.

    transformers 5 writes a dictionary for each kind of layer. Older files have `rope_theta`, the field `local_name` for
    the layers with a window, and `rope_scaling` for the others.

    Args:
        fields: The fields of the file.
        theta: The base of the layers that see all columns, where the file has none.
        local: That of the others.
        local_name: The older name of the base of the others; `rope_theta` for families where it is not read.

    Raises:
        UnreadableCheckpoint: Layers with a window have a variant, or the ramp of yarn is not truncated.
    """
    stated_ropes = fields.get("rope_parameters")
    content = stated_ropes or {}
    if not isinstance(content, dict):
        raise fields.refuse(f"the rope dictionary is {quote_value(content)}, not an object; correct it")
    layer_ropes: list[Any] = [content.get(kind) or {} for kind in KINDS_OF_LAYER]
    is_flat = bool(content) and not set(content) & set(KINDS_OF_LAYER)
    if is_flat or not all(isinstance(layer_rope, dict) for layer_rope in layer_ropes):
        raise fields.refuse("rope_parameters is no object of full_attention and sliding_attention; correct it")
    scaling = fields.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise fields.refuse("rope_scaling is not an object; correct it")
    if scaling and stated_ropes is not None and "full_attention" not in content:
        raise fields.refuse("rope_scaling beside rope_parameters without full_attention; remove one of them")
    if "type" in scaling and "rope_type" not in scaling and "rope_type" not in layer_ropes[0]:
        raise fields.refuse("rope_scaling has a type and no rope_type, by which transformers goes; add it")
    full, sliding, scaling = (rope_without_nulls(fields, rope) for rope in (*layer_ropes, scaling))
    if sliding.get("rope_type", "default") != "default":
        raise fields.refuse("rope_parameters gives layers with a window a variant of rotary embedding")
    older_theta = local if local_name == "rope_theta" else fields.number(local_name, local)
    if not full.get("truncate", True) or not scaling.get("truncate", True):
        raise fields.refuse("truncate is false, which transformers reads for no kind of layer: the numbers differ")
    base = Fields(fields.where, sliding, {}).number("rope_theta", older_theta)
    if not base > 0:
        raise fields.refuse(f"the base of rotary embedding in layers with a window is {base}; correct it")
    return {"rope_theta": fields.number("rope_theta", theta), **full, **scaling}, float(base)


def partial_rotary(fields: Fields, default: float = 1.0) -> int:
    """The number of leading dimensions of a head that `partial_rotary_factor` leaves to turn; 0 for all of them.

    The factor of the rope dictionary wins over that of the file; `default` where neither has one.
    """
    heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", fields.integer("hidden_size") // max(1, heads))
    content = rope_dictionary(fields)
    rope_fields = Fields(fields.where, content if isinstance(content, dict) else {}, {})
    factor = rope_fields.number("partial_rotary_factor", fields.number("partial_rotary_factor", default))
    # As transformers rounds it (`modeling_rope_utils.py`).
    width = int(head_dim * factor)
    if not 2 <= width <= head_dim:
        raise fields.refuse(
            f"partial_rotary_factor is {factor}: it leaves {width} of {head_dim} dimensions; correct it"
        )
    return 0 if width == head_dim else width


def check_head_split(fields: Fields) -> None:
    """Refuse a hidden size that is no multiple of the heads, as some classes of transformers do.

    They do so even where `head_dim` is stated, and nothing is split.
    """
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if heads > 0 and hidden % heads:
        raise fields.refuse(f"hidden_size is {hidden}, no multiple of {heads} attention heads; correct it")


def biases(fields: Fields, default: bool = False) -> dict[str, Any]:
    """Whether q, k, v and o have biases, of which `attention_bias` says the same."""
    biased = fields.flag("attention_bias", default)
    return {"qkv_bias": biased, "output_bias": biased}


def biases_and_norms(fields: Fields) -> dict[str, Any]:
    """The same for a family that always norms queries and keys."""
    return {**biases(fields), "qk_norm": True}


def same_place(arch: Architecture, name: str, shape: tuple[int, ...]) -> "Place":
    """The place of a tensor that checkpoints store with name and shape of `specverify.reference.weights.shapes`."""
    return Place(name, shape)


def as_stored(values: Array) -> Array:
    """The stored values themselves."""
    return values


@dataclass(frozen=True)
class Place:
    """Where a checkpoint stores a tensor of `specverify.reference.weights.shapes`.

    Attributes:
        name: The name in the checkpoint.
        shape: The shape of what is stored under that name, which may hold other tensors too.
        take: From the stored values to those of the tensor.
    """

    name: str
    shape: tuple[int, ...]
    take: Callable[[Array], Array] = as_stored


NULLABLE = frozenset(
    {"rope_parameters", "rope_scaling", "layer_types", "sliding_window", "num_key_value_heads",
     "quantization_config", "partial_rotary_factor", "moe_layers", "no_rope_layers", "mlp_only_layers",
     "full_attn_idxs", "use_bidirectional_attention", "attn_logit_softcapping", "final_logit_softcapping"}
)  # fmt: skip
"""Fields that config.json may set to null in most families: null asks for no window, no list, the usual heads."""

STATED_HEADS = NULLABLE - {"num_key_value_heads"}
"""The same of a family whose class takes no null for the number of heads of keys and values."""

WHOLE_ROTARY = {"partial_rotary_factor": 1.0}
"""What null means where the absence of the factor means another one: transformers then turns all dimensions."""


@dataclass(frozen=True)
class OracleFamily:
    """A model family in the oracle.

    Attributes:
        name: As in `specverify.reference.family.FAMILIES`.
        formulas: The family's formulas; Llama's by default.
        model_types: The values of `model_type` in its config.json; empty where its checkpoints are not read.
        defaults: The family's defaults of fields that config.json may leave out, where they matter to the numbers.
        epsilon: The field that holds the epsilon of norms.
        activation: The field that names the activation, and the value that the formulas compute.
        slides: Function from the fields, the number of layers and the family's name to whether each layer has the
            window.
        fields: Function from the fields to those of `Architecture` that are no size: biases, norms of queries and keys,
            caps, settings; and to numbers of heads and their width where the usual fields do not say them.
        place: Function from an architecture, a name and a shape of `specverify.reference.weights.shapes` to its place
            in a checkpoint.
        stacked: The same of checkpoints that hold all experts of a layer in one tensor, asked where the tensor of
            `place` is not stored; None for a family without such checkpoints.
        partial_rotary: Whether `fields` reads `partial_rotary_factor`.
        proportional: Whether the layers that see all columns may have proportional rotary embedding.
        sized_layers: Whether `fields` reads `per_layer_config`, the sizes of single layers.
        idle: From an architecture to whether files may hold a tensor of this name that no formula reads.
        refuses: Fields that are refused at some value, each with what is computed in its place; beside those of every
            family.
        rope: Function from the fields to the rope dictionary of the layers that see all columns.
        rope_fields: Fields of that dictionary that `fields` reads.
        layered_rope: Whether config.json has a rope dictionary for each kind of layer.
        module_prefixes: Prefixes of tensors beside the target's, of MTP modules, which a run without a draft leaves.
        nullable: Fields that config.json may set to null, as transformers' class takes it: the family's value is then
            that of a file without the field. Null in any other field that is read is refused.
        nulls: Fields that may be null with a meaning of their own, each with the value that null stands for.
        sample: The fields of `specverify.reference.oracle.configuration.SAMPLE` that make no model of this family, each
            with a value that does.
        wide: The ends of the names of weights that engines hold in float32 whatever the working dtype.
        wide_in_float16: The same, where the working dtype is float16.
    """

    name: str
    formulas: Formulas = LLAMA
    model_types: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    epsilon: str = "rms_norm_eps"
    activation: tuple[str, str] = ("hidden_act", "silu")
    slides: Callable[[Fields, int, str], list[bool]] = no_window
    fields: Callable[[Fields], dict[str, Any]] = lambda fields: {}
    place: Callable[[Architecture, str, tuple[int, ...]], Place] = same_place
    stacked: Callable[[Architecture, str, tuple[int, ...]], Place] | None = None
    partial_rotary: bool = False
    proportional: bool = False
    sized_layers: bool = False
    idle: Callable[[Architecture, str], bool] = lambda arch, name: False
    refuses: Mapping[str, str] = field(default_factory=dict)
    rope: Callable[[Fields], Any] = rope_dictionary
    rope_fields: frozenset[str] = frozenset()
    layered_rope: bool = False
    module_prefixes: tuple[str, ...] = ()
    nullable: frozenset[str] = NULLABLE
    nulls: Mapping[str, Any] = field(default_factory=dict)
    sample: Mapping[str, Any] = field(default_factory=dict)
    wide: tuple[str, ...] = ()
    wide_in_float16: tuple[str, ...] = ()

    def weight_dtype(self, name: str, dtype: str) -> str:
        """The dtype in which an engine of working dtype `dtype` holds the weight `name`."""
        wide = self.wide + (self.wide_in_float16 if dtype == "float16" else ())
        return "float32" if dtype != "float64" and name.endswith(wide) else dtype
