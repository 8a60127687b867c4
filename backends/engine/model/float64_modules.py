"""Float64 forms of the RMS norms and rotary tables of transformers models.

transformers computes these modules in float32 even in a float64 model. `make_exact` replaces them in a loaded model.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class ExactRmsNorm(nn.Module):
    """RMS norm in the dtype of its input."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Return `hidden` [..., H] divided by its root mean square and multiplied by the weight."""
        scaled: Tensor = self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps)
        return scaled


class ExactLayerNorm(ExactRmsNorm):
    """The same norm of a row less its mean."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return `hidden` [..., H] less its mean, normed and multiplied by the weight."""
        return super().forward(hidden - hidden.mean(-1, keepdim=True))


def layer_norm(module: nn.Module, _: Any) -> nn.Module:
    """The float64 form of a norm that subtracts the mean and has no bias."""
    return ExactLayerNorm(cast(Any, module).weight.detach(), cast(Any, module).variance_epsilon)


class _Unrounded(TorchFunctionMode):
    """Inside it `float` leaves a float64 tensor as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


def unrounded(module: nn.Module, _: Any) -> nn.Module:
    """The module itself, whose forward no longer rounds queries and keys to float32 where it turns them."""
    kind: Any = type(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Unrounded():
            return kind.forward(self, *args, **kwargs)

    # Faults look for functions in the file of the class.
    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return module


def rms_norm(epsilon: str, offset: float = 0.0) -> Callable[[nn.Module, Any], nn.Module]:
    """The float64 form of a norm that multiplies by `offset` + weight, or that has no weight.

    `epsilon` is the name of the epsilon attribute in transformers' class.
    """

    def exact(module: nn.Module, _: Any) -> nn.Module:
        weight = getattr(module, "weight", torch.ones((), dtype=torch.float64)).detach()
        return ExactRmsNorm(weight + offset if offset else weight, getattr(module, epsilon))

    return exact


class ExactRotary(nn.Module):
    """Rotary tables in float64; scaling variants as transformers' modeling_rope_utils names them."""

    inverse: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        inverse, self.scaling = inverse_frequencies(
            config.rope_parameters, rotary_width(config, config.rope_parameters), config.max_position_embeddings
        )
        # A buffer goes to the device with the model: a copy in the forward is refused while a graph is captured.
        self.register_buffer("inverse", inverse, persistent=False)

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [B, T, head_dim] for `position_ids` [B, T]."""
        angle = position_ids[..., None].double() * self.inverse
        angle = torch.cat((angle, angle), -1)
        return (angle.cos() * self.scaling).to(hidden.dtype), (angle.sin() * self.scaling).to(hidden.dtype)


def rotary_width(config: Any, rope: dict[str, Any]) -> int:
    """The number of dimensions of a head that rotary embedding turns, as transformers rounds it."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(head_dim * rope.get("partial_rotary_factor", 1.0))


class ExactLayeredRotary(nn.Module):
    """Rotary tables in float64 of a model whose kinds of layers have tables of their own.

    `widths` are the widths of their heads, where these differ.
    """

    def __init__(self, config: Any, widths: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self.scaling: dict[str, float] = {}
        for kind in sorted(set(config.layer_types)):
            rope = config.rope_parameters[kind]
            width = rotary_width(config, rope) if widths is None else widths[kind]
            inverse, scaling = inverse_frequencies(rope, width, config.max_position_embeddings)
            self.scaling[kind] = scaling
            self.register_buffer(f"{kind}_inverse", inverse, persistent=False)

    def forward(self, hidden: Tensor, position_ids: Tensor, layer_type: str) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [B, T, head_dim] of the layers of `layer_type`, for `position_ids` [B, T]."""
        scaling = self.scaling[layer_type]
        angle = position_ids[..., None].double() * self.get_buffer(f"{layer_type}_inverse")
        angle = torch.cat((angle, angle), -1)
        return angle.cos() * scaling, angle.sin() * scaling


class ExactNeighbourRotary(ExactRotary):
    """The same tables for neighbouring dimensions that turn together."""

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [B, T, head_dim] for `position_ids` [B, T]."""
        angle = (position_ids[..., None].double() * self.inverse).repeat_interleave(2, dim=-1)
        return (angle.cos() * self.scaling).to(hidden.dtype), (angle.sin() * self.scaling).to(hidden.dtype)


class ExactComplexRotary(ExactRotary):
    """The same tables as complex numbers, as Llama 4's attention expects them."""

    def forward(self, hidden: Tensor, position_ids: Tensor) -> Tensor:  # type: ignore[override]
        """Return complex128 [B, T, head_dim / 2] for `position_ids` [B, T]."""
        angle = position_ids[..., None].double() * self.inverse
        return torch.polar(torch.full_like(angle, self.scaling), angle)


def make_exact(model: nn.Module, config: Any, forms: Mapping[str, Callable[[nn.Module, Any], nn.Module]]) -> None:
    """Replace every RMS norm and rotary table of a transformers model, in place, by its float64 form.

    `forms` holds the float64 forms of the known families, by the name of the module's class.

    Raises:
        ValueError: for a norm without a known float64 form.
    """
    for name, module in list(model.named_modules()):  # a list, because modules are replaced on the way
        kind = type(module).__name__
        if kind in forms:
            _replace(model, name, forms[kind](module, config))
        elif kind.endswith("Norm"):
            raise ValueError(f"{kind} has no float64 form here: use another dtype")
        elif kind.endswith("RotaryEmbedding"):
            _replace(model, name, ExactRotary(config))


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    holder, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(holder), leaf, module)


def inverse_frequencies(rope: dict[str, Any], head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Return inverse frequencies, float64 [head_dim / 2], and the factor on cosines and sines.

    `dynamic` uses the base frequencies and `longrope` its short factors. The engine refuses runs past the original
    context, where the tables would change although keys are already cached with the old ones (see
    models.refuse_long).
    """
    kind, theta = rope["rope_type"], float(rope["rope_theta"])
    pair = torch.arange(0, head_dim, 2, dtype=torch.float64)
    if kind == "dynamic" and rope.get("alpha"):  # Hunyuan's fixed stretch of the base
        theta *= rope["alpha"] ** (head_dim / (head_dim - 2))
    base = theta ** (-pair / head_dim)
    if kind in ("default", "dynamic"):
        return base, 1.0
    if kind == "linear":
        return base / rope["factor"], 1.0
    if kind == "proportional":  # the frequencies of the whole head, of which the last pairs keep still
        turned = int(rope.get("partial_rotary_factor", 1.0) * head_dim // 2)
        return (base / rope.get("factor", 1.0)).where(torch.arange(len(base)) < turned, 0.0), 1.0
    original = rope["original_max_position_embeddings"]
    if kind == "llama3":
        return _llama3(base, rope, original), 1.0
    if kind == "longrope":
        stretch = rope.get("factor") or max_positions / original
        attention_factor = rope.get("attention_factor")
        scaling = attention_factor or (1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original)))
        return base / torch.tensor(rope["short_factor"], dtype=torch.float64), scaling
    if kind == "yarn":
        return _yarn(base, rope, head_dim, original), _yarn_scaling(rope)
    raise ValueError(f"rotary scaling {kind!r} is not known to the float64 engine")


def _llama3(base: Tensor, rope: dict[str, Any], original: int) -> Tensor:
    wavelength = 2 * math.pi / base
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    stretched: Tensor = base * (smooth + (1 - smooth) / factor)
    return stretched


def _yarn(base: Tensor, rope: dict[str, Any], head_dim: int, original: int) -> Tensor:
    def turning(rotations: float) -> float:
        """Return the pair index whose frequency makes `rotations` turns over the original context."""
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(float(rope["rope_theta"])))

    first, last = turning(rope.get("beta_fast") or 32), turning(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    last = last + 0.001 if first == last else last  # as in transformers, against a division by zero below
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float64) - first) / (last - first)).clamp(0, 1)
    blended: Tensor = base / rope["factor"] * ramp + base * (1 - ramp)
    return blended


def _yarn_scaling(rope: dict[str, Any]) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def magnitude(scale: float) -> float:
        return 1.0 if rope["factor"] <= 1 else 0.1 * scale * math.log(rope["factor"]) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"])
    return magnitude(1.0)
