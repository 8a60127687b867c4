"""Family: the facts about a model family that a case needs.

Its norms, its settings and the architectures to draw; nothing here computes. `specverify.reference.oracle.family` has a
family's formulas, and `specverify.backends.engine.model.family` opens its model in the engine; each has a file for each
family.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, TypeVar

from specverify.reference.family.settings import ArchitectureFields, Settings

T = TypeVar("T")


Shapes = Mapping[str, tuple[int, ...]]
"""Names of tensors within one decoder layer, each with its shape."""


def gated(arch: ArchitectureFields, layer: int) -> Shapes:
    """The gated feed-forward block of Llama (arXiv 2002.05202)."""
    return gated_block("mlp", arch.hidden_size, arch.intermediate_size, arch.mlp_bias)


def gated_block(prefix: str, hidden: int, inner: int, biased: bool = False) -> Shapes:
    """A gated feed-forward block with the names `prefix`.gate_proj, `prefix`.up_proj and `prefix`.down_proj."""
    weights = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    table: dict[str, tuple[int, ...]] = {}
    for name, shape in weights.items():
        table[f"{prefix}.{name}_proj.weight"] = shape
        if biased:
            table[f"{prefix}.{name}_proj.bias"] = shape[:1]
    return table


def no_tensors(arch: ArchitectureFields, layer: int) -> Shapes:
    """An empty table."""
    return {}


def no_layer(arch: ArchitectureFields) -> Shapes:
    """An empty table of tensors beside the layers."""
    return {}


@dataclass(frozen=True)
class LayerNorms:
    """The norms of one decoder layer, by their names in a state dict; None for a norm that the family lacks.

    Attributes:
        before_attention: The norm of the input of attention.
        before_feed_forward: The norm of the input of the feed-forward block.
        after_attention: The norm of what attention adds to the residual stream.
        after_feed_forward: The norm of what the feed-forward block adds to the residual stream.
    """

    before_attention: str | None = "input_layernorm"
    before_feed_forward: str | None = "post_attention_layernorm"
    after_attention: str | None = None
    after_feed_forward: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the norms that the family has."""
        all_names = (self.before_attention, self.before_feed_forward, self.after_attention, self.after_feed_forward)
        return tuple(name for name in all_names if name is not None)


def attention_alone(arch: ArchitectureFields, layer: int) -> Shapes | None:
    """None: the `recurrent` of a family whose layers all have attention."""
    return None


@dataclass(frozen=True)
class Family:
    """A family of decoder-only transformers.

    Attributes:
        name: Its name in case files.
        norms: The norms of each layer.
        centred_norms: Whether the norms of layers, and the last one, subtract the mean (LayerNorm).
        side_by_side: Whether attention and feed-forward block of a layer read the same normed input, and both outputs
            are added to the residual stream before the layer.
        unscaled: Whether attention multiplies the products of queries and keys by no factor; seeded norms of queries
            then lie around one over the square root of the head's width, so that scores are as large as elsewhere.
        resting_gain: The weight with which a norm multiplies by 1; seeded weights of norms lie around this number.
        query_key_gains: Whether the norms of queries and keys, where a model has them, have weights.
        whole_query_key_norms: Whether these norms run over all heads of a row together, and not over each head.
        feed_forward: The tensors of the feed-forward block of a layer.
        attention_extras: The tensors of a layer's attention beside its projections and norms.
        beside_layers: The tensors of the model beside its layers, embedding, head and last norm.
        rows_by_token: The names of those of them that have a row for each token id.
        projections: The tensors of a layer's attention where it has others than q, k, v and o; None for those four.
        recurrent: The tensors of a layer by which it has a recurrent state; None for a layer without one.
        beside_attention: Whether layers with a recurrent state have attention too; else it stands in its place.
        gated_attention: Whether the projection of queries is twice as wide, for a gate on the output of attention.
        mixes_rows: Whether the low bits of a row may depend on the other rows of a forward; see
            `specverify.reference.architecture.Checkpoint.mixes_rows`.
        sinks: Whether each head of attention has a sink, a score without a column.
        indexed: Whether an indexer chooses the columns that each row attends to.
        three_axes: Whether tokens have positions on the axes time, height and width.
        fixed: The ends of the names of seeded weights that are no random numbers, each with the value.
        settings: The class of the numbers that this family alone has.
        modules: From the settings of a model to those of its MTP modules, each a layer of the family with full
            attention; None for a family without published modules of that kind (`specverify.reference.draft.mtp`).
        soft_caps: Whether the family's own attention has a soft cap.
        drawn: Architectures that generated cases run, as fields of `Architecture` without `family`, the simplest
            first. Families with an empty list are drawn from `specverify.properties.strategies.models.GALLERY`.
        rare: Whether its architectures are drawn less often than others
            (`specverify.properties.strategies.models.RARE`).
    """

    name: str
    norms: LayerNorms = LayerNorms()
    centred_norms: bool = False
    side_by_side: bool = False
    unscaled: bool = False
    resting_gain: float = 1.0
    query_key_gains: bool = True
    whole_query_key_norms: bool = False
    feed_forward: Callable[[ArchitectureFields, int], Shapes] = gated
    attention_extras: Callable[[ArchitectureFields, int], Shapes] = no_tensors
    beside_layers: Callable[[ArchitectureFields], Shapes] = no_layer
    rows_by_token: tuple[str, ...] = ()
    projections: Callable[[ArchitectureFields, int], Shapes] | None = None
    recurrent: Callable[[ArchitectureFields, int], Shapes | None] = attention_alone
    beside_attention: bool = False
    gated_attention: bool = False
    mixes_rows: bool = False
    sinks: bool = False
    indexed: bool = False
    three_axes: bool = False
    soft_caps: bool = False
    fixed: Mapping[str, float] = field(default_factory=dict)
    settings: type[Settings] = Settings
    modules: Callable[[Settings], Settings] | None = None
    drawn: tuple[Mapping[str, Any], ...] = ()
    rare: bool = False

    def read_settings(self, pairs: Iterable[tuple[str, float]]) -> Settings:
        """The settings that the `pairs` of a case file hold; see `Settings.read`."""
        return self.settings.read(self.name, pairs)

    @property
    def hybrid(self) -> bool:
        """Whether layers may have a recurrent state."""
        return self.recurrent is not attention_alone


def members(package: str, path: Iterable[str], kind: type[T]) -> list[T]:
    """The objects of class `kind` that the modules of a folder define, by file name, then by definition.

    Args:
        package: The dotted name of the folder's package.
        path: Its `__path__`.
        kind: The class.
    """
    modules = sorted(iter_modules(path), key=lambda module: module.name)
    namespaces = [vars(import_module(f"{package}.{module.name}")) for module in modules]
    return [value for namespace in namespaces for value in namespace.values() if isinstance(value, kind)]
