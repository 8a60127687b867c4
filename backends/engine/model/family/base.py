"""The description of a model family, and the checks that families share.

A `ModelFamily` says how the engine opens the family's transformers model, built in or from a checkpoint.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from specverify.backends.base import Unsupported
from specverify.reference.architecture import Architecture, Rope

Exact = Callable[[nn.Module, Any], nn.Module]
"""From a module of a model and the model's config to a module that computes the same formula in float64."""


def refuse_unequal(arch: Architecture, settings: str, *values: Any) -> None:
    """Raise Unsupported if `values` differ, because transformers' model has one setting for all of them."""
    if len(set(values)) > 1:
        raise Unsupported(f"{arch.family} needs equal {settings}, as transformers' model has one setting for them")


def no_window(arch: Architecture) -> None:
    """Raise Unsupported for an architecture with a sliding window, which transformers' model does not have."""
    if any(arch.windows):
        raise Unsupported(f"{arch.family} with a sliding window: transformers' model has none")


def no_chunks(arch: Architecture) -> None:
    """Raise Unsupported for chunks or a temperature by position, for families that have layers without rotation."""
    if any(arch.chunks) or arch.floor_scale:
        raise Unsupported(f"{arch.family} with chunks or a temperature by position: only llama4 has them")


def no_irope(arch: Architecture) -> None:
    """Raise Unsupported for chunks or layers without rotary embedding, which only Llama 4 has."""
    if any(arch.chunks) or arch.unrotated:
        raise Unsupported(f"{arch.family} with chunks or layers without rotary embedding: only llama4 has them")


def one_window(arch: Architecture) -> None:
    """Raise Unsupported unless all layers have the same window, or none has."""
    refuse_unequal(arch, "all windows", *arch.windows)


def equal_windows(arch: Architecture) -> None:
    """Raise Unsupported unless all layers that have a window have the same."""
    refuse_unequal(arch, "windows in all layers that have one", *filter(None, arch.windows))


def accept_all(arch: Architecture) -> None:
    """Raise nothing."""


@dataclass(frozen=True)
class ModelFamily:
    """A model family, as the engine opens it.

    Attributes:
        name: The name in `specverify.reference.family.FAMILIES`.
        config: transformers' class of its config.
        model: transformers' class of its causal model.
        fields: From an architecture to the fields of the config that not all families share. Raises Unsupported for an
            architecture that transformers' model cannot have.
        windows: Raises Unsupported for windows that transformers' model cannot have.
        irope: The same for chunks and layers without rotary embedding.
        one_bias: Whether `attention_bias` says of q, k, v and o alike whether they have biases.
        caps_scores: Whether transformers' model applies a soft cap to the scores of attention itself, set by `fields`.
            For other families the engine passes `Architecture.score_cap` to attention.
        rename: From the name of a weight in `specverify.reference.weights` to transformers' name.
        arrange: From the state dict of `specverify.reference.weights`, with transformers' names, to that of the model,
            which may hold several of its tensors in one.
        complete: Gives a built-in model, in place, the buffers that no state dict holds.
        prepare: Changes an open model, in place, where transformers' own code is wrong for a tree of rows, or hands
            its cache something else than keys and values.
        exact: Float64 forms of modules that transformers computes in float32, by the name of their class.
        checkpoint: For each `model_type` that transformers does not know, a function from the content of config.json
            to a config.
    """

    name: str
    config: Any
    model: Any
    fields: Callable[[Architecture], dict[str, Any]] = lambda arch: {}
    windows: Callable[[Architecture], None] = no_window
    irope: Callable[[Architecture], None] = no_irope
    one_bias: bool = False
    caps_scores: bool = False
    rename: Callable[[str], str] = lambda name: name
    arrange: Callable[[dict[str, Tensor], Architecture], dict[str, Tensor]] = lambda state, arch: state
    complete: Callable[[Any], None] = lambda network: None
    prepare: Callable[[Any], None] = lambda network: None
    exact: Mapping[str, Exact] = field(default_factory=dict)
    checkpoint: Mapping[str, Callable[[dict[str, Any]], Any]] = field(default_factory=dict)

    def config_fields(self, arch: Architecture) -> dict[str, Any]:
        """The fields of the config of `arch` that not all families share.

        Raises:
            Unsupported: transformers' model cannot have this architecture.
        """
        self.irope(arch)
        self.windows(arch)
        if not self.one_bias:
            return self.fields(arch)
        refuse_unequal(arch, "qkv_bias and output_bias", arch.qkv_bias, arch.output_bias)
        return {"attention_bias": arch.qkv_bias, **self.fields(arch)}


def layer_types(arch: Architecture) -> list[str]:
    """The kind of each layer, with a window or without, under transformers' names."""
    return ["sliding_attention" if window else "full_attention" for window in arch.windows]


def rope_parameters(rope: Rope) -> dict[str, Any]:
    """`rope` as transformers' `rope_parameters`, without the fields that its variant does not have."""
    fields: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind in ("linear", "dynamic", "yarn", "llama3", "proportional"):
        fields["factor"] = rope.factor
    if rope.kind == "proportional":
        fields["partial_rotary_factor"] = rope.share
    if rope.kind in ("yarn", "llama3", "longrope"):
        fields["original_max_position_embeddings"] = rope.original
    if rope.kind == "llama3":
        fields |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        fields |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        if rope.mscale and rope.mscale_all_dim:
            fields |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
    if rope.kind == "longrope":
        fields |= {"short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor)}
        fields["factor"] = rope.factor
    if rope.kind in ("yarn", "longrope") and rope.attention_factor:
        fields["attention_factor"] = rope.attention_factor
    return fields


def rope_of(arch: Architecture) -> dict[str, Any]:
    """The `rope_parameters` of `arch`, with the share of each head's dimensions that its rotary embedding turns.

    Raises:
        Unsupported: if transformers would make another number of dimensions of that share.
    """
    if arch.rope.kind == "dynamic" and arch.rotary_dim == 2:
        raise Unsupported(f"{arch.family} with 2 dimensions turned by dynamic: transformers divides by these less 2")
    fields = rope_parameters(arch.rope)
    if not arch.settings.partial_rotary:
        return fields  # transformers knows the rotated width of latent attention by a field of its own
    factor = arch.rotary_dim / arch.head_dim
    if int(arch.head_dim * factor) != arch.rotary_dim:
        raise Unsupported(
            f"{arch.family} with {arch.rotary_dim} of {arch.head_dim} dimensions turned: no factor says so"
        )
    return {**fields, "partial_rotary_factor": factor}


def layered_rope(arch: Architecture, local: float) -> dict[str, Any]:
    """The `rope_parameters` of a model with a rotary table for each kind of layer; `local` is the base under windows.

    Raises:
        Unsupported: for yarn with an untruncated ramp, which transformers 5.23 reads for no kind of layer.
    """
    if arch.rope.kind == "yarn" and not arch.rope.truncate:
        raise Unsupported(f"{arch.family} with yarn and truncate false: transformers reads it for no kind of layer")
    return {
        "full_attention": rope_parameters(arch.rope),
        "sliding_attention": rope_parameters(Rope(theta=local)),
    }
