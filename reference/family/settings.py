"""Settings: the numbers that a family alone has, as a frozen dataclass of that family.

A field's type, default and bounds say which numbers it may hold. Case files hold settings as pairs of name and number,
in ascending order and without those at their default.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, TypeVar

from specverify.reference.malformed import Malformed

S = TypeVar("S", bound="Settings")


class ArchitectureFields(Protocol):
    """The fields that a family reads of a `specverify.reference.architecture.Architecture`."""

    @property
    def family(self) -> str:
        """The name of the family."""

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""

    @property
    def layers(self) -> int:
        """The number of decoder layers."""

    @property
    def windows(self) -> tuple[int, ...]:
        """The sliding window of each layer, 0 for none."""

    @property
    def hidden_size(self) -> int:
        """The width of the residual stream."""

    @property
    def intermediate_size(self) -> int:
        """The inner width of a gated block."""

    @property
    def heads(self) -> int:
        """The number of query heads."""

    @property
    def kv_heads(self) -> int:
        """The number of heads of keys and values."""

    @property
    def head_dim(self) -> int:
        """The width of a head."""

    @property
    def qkv_bias(self) -> bool:
        """Whether the projections of attention's input have biases."""

    @property
    def output_bias(self) -> bool:
        """Whether the projection of attention's output has a bias."""

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normed."""

    @property
    def mlp_bias(self) -> bool:
        """Whether a gated block has biases."""

    @property
    def settings(self) -> "Settings":
        """The family's own settings."""


@dataclass(frozen=True)
class LayerHeads:
    """The sizes of one layer's heads of keys and values.

    Attributes:
        kv_heads: Their number.
        head_dim: The width of a head of keys, and of queries.
        value_dim: The width of a head of values, and of attention's output.
        index_dim: The width of the index key that a cache holds behind each key; 0 for a layer without an indexer.
    """

    kv_heads: int
    head_dim: int
    value_dim: int
    index_dim: int = 0

    @property
    def key_width(self) -> int:
        """The width of a key in a cache."""
        return self.head_dim + self.index_dim


def whole(default: int, least: int = 1, most: int = 65536) -> Any:
    """A field that holds a whole number from `least` to `most`."""
    return field(default=default, metadata={"least": least, "most": most})


def positive(default: float) -> Any:
    """A field that holds a number above 0."""
    return field(default=default, metadata={"positive": True})


def check_whole(name: str, value: float, least: int, most: int = 65536) -> None:
    """Raise Malformed for a value of the setting `name` that is not a whole number from `least` to `most`."""
    if value != int(value) or not least <= value <= most:
        raise Malformed("settings", f"{name} of {float(value)} is not a whole number from {least} to {most}")


@dataclass(frozen=True)
class Settings:
    """The settings of a family: here of a family that has none.

    A number without annotation is no field: it holds for families that have no such setting.
    """

    rotary_dim = 0  # the number of dimensions of a head that rotary embedding turns; 0 for all of them
    partial_rotary = False  # whether config.json says so by a factor of the width of a head
    value_dim = 0  # the width of a head of values; 0 for that of queries and keys
    index_columns = 0  # the most columns that an indexer leaves to each row; 0 for attention to all of them
    latent_rank = 0  # the width of latent vectors of keys and values; 0 for attention without them
    dense_layers = 0  # the number of leading layers without experts in a family with experts

    def __post_init__(self) -> None:
        for setting in fields(self):
            name, value = setting.name, getattr(self, setting.name)
            if not 0 <= value <= 1e6:  # and so for NaN
                raise _refuse(name, value)
            bounds = setting.metadata
            if "least" in bounds:
                check_whole(name, value, bounds["least"], bounds["most"])
            if "positive" in bounds and not value > 0:
                raise Malformed("settings", f"{name} of {float(value)} is not positive")
            if setting.type is bool and value not in (0, 1):
                raise Malformed("settings", f"{name} is neither 0 nor 1")
            # JSON has one kind of number. `check` of the family refuses a fraction that is still here.
            kind: Any = setting.type
            if kind(value) == value:
                object.__setattr__(self, name, kind(value))

    def layer_heads(self, arch: ArchitectureFields, layer: int) -> LayerHeads:
        """The sizes of the heads that `layer` attends with; the same in all layers of most families."""
        return LayerHeads(arch.kv_heads, arch.head_dim, int(self.value_dim or arch.head_dim))

    def kv_source(self, arch: ArchitectureFields, layer: int) -> int:
        """The layer whose keys and values `layer` reads: itself, or an earlier one, and then it makes none."""
        return layer

    def keys_serve_as_values(self, arch: ArchitectureFields, layer: int) -> bool:
        """Whether the projection of keys of `layer` is that of values too, so that the layer has no other."""
        return False

    def with_wider_heads(self: S, ratio: float) -> S:
        """The settings of a like model whose heads are `ratio` times as wide, with scores of the same size."""
        return self

    @classmethod
    def read(cls: type[S], family: str, pairs: Iterable[tuple[str, float]]) -> S:
        """The settings that the `pairs` of a case file hold.

        Raises:
            Malformed: For names in another order, a setting that `family` lacks, or a value that it may not have.
        """
        values = list(pairs)
        names = [name for name, _ in values]
        if names != sorted(set(names)):
            raise Malformed("settings", "names in ascending order, each once")
        defaults = {setting.name: setting.default for setting in fields(cls)}
        for name, value in values:
            if name not in defaults:
                raise Malformed("settings", f"{family} has no {name!r}; it has {', '.join(defaults) or 'none'}")
            if value == defaults[name]:  # a stated default would give one model two digests
                raise _refuse(name, value)
        return cls(**dict(values))

    @classmethod
    def of(cls: type[S], arch: ArchitectureFields) -> S:
        """The settings of an architecture whose family has settings of this class."""
        settings = arch.settings
        assert isinstance(settings, cls)
        return settings

    @property
    def pairs(self) -> tuple[tuple[str, float], ...]:
        """The settings that differ from their default, as a case file holds them."""
        values = {setting.name: getattr(self, setting.name) for setting in fields(self)}
        changed = [setting.name for setting in fields(self) if values[setting.name] != setting.default]
        return tuple((name, float(values[name])) for name in sorted(changed))

    def check(self, arch: ArchitectureFields) -> None:
        """Raise Malformed for settings that make no sense together, or not in an architecture `arch`."""
        width = self.rotary_dim
        if width % 2 or width >= arch.head_dim:
            reason = f"rotary_dim of {width:g} is not even and less than the {arch.head_dim} of a head"
            raise Malformed("settings", reason)

    def probed(self: S, width: int) -> S:
        """The settings of a transparent probe of such a model, whose heads hold `width` codes."""
        return self


@dataclass(frozen=True)
class PartialRotary(Settings):
    """Rotary embedding turns so many leading dimensions of a head; 0 for all."""

    partial_rotary = True

    rotary_dim: int = 0


def _refuse(name: str, value: float) -> Malformed:
    return Malformed("settings", f"{name} of {float(value)} is not from 0 to 1e6, or only says the default")
