"""The model of a case: a seeded architecture, or a Hugging Face checkpoint.

A seeded model has the same weights on every machine. A checkpoint is known by the digest of its files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, ClassVar

from specverify.reference.adapters import ADAPTED, Adapter
from specverify.reference.family import FAMILIES, Family
from specverify.reference.family.settings import LayerHeads, Settings
from specverify.reference.files.json_types import READERS, build
from specverify.reference.images import Images, check_images
from specverify.reference.malformed import Malformed
from specverify.reference.quantisation import QUANTISED, check_quantised
from specverify.reference.rules import OMIT_DEFAULT

LARGEST = 2**22
"""Most weights of a built-in model: a case file is small."""

LONGEST = 4096
"""Most positions of a built-in model."""

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim", "max_positions")
ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")


@dataclass(frozen=True)
class Rope:
    """Rotary embedding and its scaling variant, in the fields and words of Hugging Face's `rope_parameters`.

    Fields without a use stay at their defaults: of `attention_factor` that means what the variant derives. `share` is
    the part of a head's pairs that `proportional` turns, the first ones; the others keep still.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original: int = 0  # original_max_position_embeddings
    attention_factor: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    share: float = field(default=1.0, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise Malformed("kind", f"{self.kind!r} is none of {', '.join(ROPE_KINDS)}")
        if not self.theta > 1:  # and not `<=`, so that NaN is refused too
            raise Malformed("theta", f"{self.theta} is not a rotary base (more than 1)")
        if not 0 <= self.share <= 1 or (self.share != 1 and self.kind != "proportional"):
            raise Malformed("share", f"{self.share} is no part of the pairs, from 0 to 1, of proportional")
        if self.kind in ("linear", "dynamic", "yarn", "llama3", "proportional") and not self.factor >= 1:
            raise Malformed("factor", f"{self.factor} does not stretch (at least 1)")
        if self.kind in ("yarn", "llama3", "longrope") and self.original < 2:
            raise Malformed("original", f"{self.kind} needs the original context length (at least 2)")


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer: RMS norm, rotary attention with grouped queries, a gated feed-forward block.

    `specverify.reference.family` says which weights the layers of a family have, `specverify.reference.oracle.family`
    its formulas. `windows[l]` is layer l's sliding window in tokens, the row's own token included (the row at position
    p sees p - window < j <= p), or 0 for none. In family `llama4`, Llama 4's text model with dense layers, `qk_norm` is
    a root mean square norm without gain, of rotated queries and keys, in rotated layers alone.

    Attributes:
        chunks: Layer l's chunk in tokens (the row at position p sees j <= p with j // chunk == p // chunk), or 0 for
            none; empty where no layer has a chunk. No layer has both a window and a chunk.
        unrotated: Layers without rotary embedding (NoPE), ascending.
        floor_scale: Queries of unrotated layers are scaled by 1 + attn_scale * ln(1 + floor((p + 1) / floor_scale)), p
            being their position (arXiv 2501.19399 as Llama 4 has it); 0 for none.
        attn_scale: See floor_scale.
        score_cap: Soft cap c of attention (arXiv 2408.00118): a scaled score s becomes c * tanh(s / c); 0.0 for none.
        settings: The family's own settings, of the class `Family.settings`.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    rope: Rope = Rope()
    norm_eps: float = 1e-5
    max_positions: int = 4096
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    chunks: tuple[int, ...] = field(default=(), metadata=OMIT_DEFAULT)
    unrotated: tuple[int, ...] = field(default=(), metadata=OMIT_DEFAULT)
    floor_scale: int = field(default=0, metadata=OMIT_DEFAULT)
    attn_scale: float = field(default=0.1, metadata=OMIT_DEFAULT)
    score_cap: float = field(default=0.0, metadata=OMIT_DEFAULT)
    settings: Settings = field(default=Settings(), metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise Malformed("family", f"{self.family!r} is none of {', '.join(FAMILIES)}")
        for name in SIZES:
            if getattr(self, name) < 1:
                raise Malformed(name, f"{getattr(self, name)} is not a size")
        if not self.windows or min(self.windows) < 0:
            reason = (
                "a window is a number of tokens, or 0 for none" if self.windows else "a model has at least one layer"
            )
            raise Malformed("windows", reason)
        self._check_chunks()
        if type(self.settings) is Settings:
            object.__setattr__(self, "settings", self.words.settings())
        if type(self.settings) is not self.words.settings:
            raise Malformed("settings", f"{type(self.settings).__name__} are not those of {self.family}")
        self.settings.check(self)
        if not 0 <= self.score_cap <= 1e6:
            raise Malformed("score_cap", f"{self.score_cap} is no soft cap (above 0, up to 1e6; 0 for none)")
        if len(self.unattended) == self.layers:
            raise Malformed("settings", "no layer has attention")
        for sizes in self._heads_by_layer:
            if self.heads % sizes.kv_heads:
                raise Malformed("kv_heads", f"{self.heads} heads do not share {sizes.kv_heads} KV heads evenly")
            if sizes.head_dim % 2 and self.words.projections is None:
                raise Malformed("head_dim", f"{sizes.head_dim} is odd; rotary embedding turns pairs")
        if not 0 < self.norm_eps <= 1:
            raise Malformed("norm_eps", f"{self.norm_eps} is not above 0 and at most 1")
        # `rope` is that of layers without a window, where layers have several.
        layer = next((layer for layer, window in enumerate(self.windows) if not window), 0)
        pairs = int(self.settings.rotary_dim or self.layer_heads(layer).head_dim) // 2
        for name in ("short_factor", "long_factor"):
            if self.rope.kind == "longrope" and len(getattr(self.rope, name)) != pairs:
                raise Malformed(f"rope.{name}", f"{len(getattr(self.rope, name))} factors for {pairs} rotary pairs")

    def _check_chunks(self) -> None:
        """Raise Malformed where chunks, unrotated layers and temperature make no sense together."""
        chunks, unrotated, layers = self.chunks, self.unrotated, self.layers
        if len(chunks) not in (0, layers):
            raise Malformed("chunks", f"{len(chunks)} entries for {layers} layers (or none at all)")
        if chunks and (min(chunks) < 0 or not any(chunks)):
            none = "no layer has a chunk: leave the field empty"
            raise Malformed("chunks", "a chunk is a number of tokens, or 0 for none" if min(chunks) < 0 else none)
        for layer, (window, chunk) in enumerate(self.reaches):
            if window and chunk:
                raise Malformed(f"chunks[{layer}]", "a layer has a window or a chunk, not both")
        # Comparing with the sorted set refuses wrong order, repetition and layers that do not exist at once.
        if list(unrotated) != sorted({layer for layer in unrotated if 0 <= layer < layers}):
            raise Malformed("unrotated", f"layers 0..{layers - 1} in ascending order, each once")
        if self.floor_scale < 0:
            raise Malformed("floor_scale", f"{self.floor_scale} is negative (0 leaves the temperature alone)")
        if self.floor_scale and not unrotated:
            raise Malformed("floor_scale", "scales the queries of unrotated layers, and this model has none")
        if not 0 < self.attn_scale <= 100:
            raise Malformed("attn_scale", f"{self.attn_scale} is not above 0 and at most 100")

    @cached_property
    def _heads_by_layer(self) -> tuple[LayerHeads, ...]:
        return tuple(self.settings.layer_heads(self, layer) for layer in range(self.layers))

    def layer_heads(self, layer: int) -> LayerHeads:
        """The sizes of the heads that `layer` attends with; of most models all layers have the same."""
        return self._heads_by_layer[layer]

    @cached_property
    def widest(self) -> LayerHeads:
        """The most heads of keys and values of a layer and the widest ones, which an array of all layers has room for.

        Behind the sizes of a layer such an array holds zeros.
        """
        sizes = self._heads_by_layer
        return LayerHeads(*(max(getattr(layer, name) for layer in sizes) for name in LayerHeads.__dataclass_fields__))

    @cached_property
    def kv_sources(self) -> tuple[int, ...]:
        """For each layer the one whose keys and values it reads; a layer that reads an earlier one's makes none."""
        return tuple(self.settings.kv_source(self, layer) for layer in range(self.layers))

    @property
    def rotary_dim(self) -> int:
        """The number of dimensions of a head that rotary embedding turns: the first ones, or a latent head's last."""
        return self.settings.rotary_dim or self.head_dim

    @property
    def value_dim(self) -> int:
        """The width of a head of values; that of queries and keys but for latent attention."""
        return self.settings.value_dim or self.head_dim

    @property
    def mixes_rows(self) -> bool:
        """Whether some layer has experts, so that the low bits of a row may depend on the other rows of a forward."""
        return self.words.mixes_rows and self.settings.dense_layers < self.layers

    @property
    def words(self) -> Family:
        """The family's entry in `specverify.reference.family`: norms, settings and architectures to draw."""
        return FAMILIES[self.family]

    @property
    def reaches(self) -> tuple[tuple[int, int], ...]:
        """The pair (window, chunk) of each layer, 0 for none."""
        return tuple(zip(self.windows, self.chunks or (0,) * self.layers, strict=True))

    @property
    def recurrent(self) -> tuple[int, ...]:
        """The layers that have a recurrent state, ascending."""
        return tuple(layer for layer in range(self.layers) if self.words.recurrent(self, layer) is not None)

    @property
    def unattended(self) -> tuple[int, ...]:
        """The layers without attention, ascending; their keys and values are zeros."""
        return () if self.words.beside_attention else self.recurrent

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self.windows)

    @property
    def weights(self) -> int:
        """Number of entries of the model's weight matrices; norms and most biases are not counted."""
        if self.words.projections is None:
            mixer = self.words.recurrent
            attention = 0
            for layer, sizes in enumerate(self._heads_by_layer):
                kv_heads = sizes.kv_heads if self.kv_sources[layer] == layer else 0
                attention += 2 * (self.heads + kv_heads) * sizes.head_dim if layer not in self.unattended else 0
        else:
            attention = 0
            mixer = self.words.projections
        tables = [f(self, layer) or {} for layer in range(self.layers) for f in (mixer, self.words.feed_forward)]
        blocks: int = sum(prod(shape) for table in tables for shape in table.values() if len(shape) > 1)
        blocks += sum(prod(shape) for shape in self.words.beside_layers(self).values() if len(shape) > 1)
        return self.hidden_size * (self.vocab_size * (2 - self.tied) + attention) + blocks


def _read_architecture(content: Mapping[str, Any]) -> Architecture:
    """The architecture that a checked JSON object describes; its settings are pairs of the family's names."""
    pairs = [(name, float(value)) for name, value in content.get("settings", ())]
    settings = FAMILIES[content["family"]].read_settings(pairs)
    architecture: Architecture = build(Architecture, {**content, "settings": settings})
    return architecture


READERS[Architecture] = _read_architecture


@dataclass(frozen=True)
class Seeded:
    """A built-in model: the same weights on every machine, from `architecture` and `seed` alone.

    Attributes:
        weights: `margin` draws weights whose logits move visibly with every mask cell; `transparent` builds a probe
            whose logits show which row sees which token (see reference/weights.py).
        probed_layer: The one layer of a `transparent` model that attends.
        relabel: 0 keeps the vocabulary; another number renames every token id by the permutation of that seed.
        noise: Share of other random numbers in `margin` weights, from 0 (none) to 1 (nothing else). A draft whose noise
            is small proposes much of what the model without noise would choose.
        quantised: Kind of projections of few bits, one of QUANTISED; empty for those of the dtype.
        adapter: A low-rank addition to its projections; None for the weights alone.
        images: The blocks of the prompt whose tokens it numbers as grids; only families with three axes have any.
    """

    TAG: ClassVar[str] = "seeded"

    architecture: Architecture
    seed: int
    weights: str = "margin"
    probed_layer: int = 0
    relabel: int = 0
    noise: float = field(default=0.0, metadata=OMIT_DEFAULT)
    quantised: str = field(default="", metadata=OMIT_DEFAULT)
    adapter: Adapter | None = field(default=None, metadata=OMIT_DEFAULT)
    images: Images = field(default=(), metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        if self.weights not in ("margin", "transparent"):
            raise Malformed("weights", f"{self.weights!r} is neither margin nor transparent")
        if self.quantised and (self.quantised not in QUANTISED or self.weights != "margin"):
            raise Malformed("quantised", f"{self.quantised!r} is none of {', '.join(QUANTISED)} of margin weights")
        if not 0 <= self.probed_layer < self.architecture.layers:
            raise Malformed("probed_layer", f"{self.probed_layer} is not one of {self.architecture.layers} layers")
        if self.seed < 0 or self.relabel < 0:
            raise Malformed("seed" if self.seed < 0 else "relabel", "seeds are not negative")
        if not 0.0 <= self.noise <= 1.0 or (self.noise and self.weights != "margin"):
            raise Malformed("noise", f"{self.noise} is no share from 0 to 1 of margin weights")
        arch = self.architecture
        if self.adapter is not None and (self.weights != "margin" or self.quantised or arch.family not in ADAPTED):
            raise Malformed("adapter", f"belongs to margin weights of the working dtype, of {' or '.join(ADAPTED)}")
        check_images(self.images, arch.family, arch.words.three_axes)
        if arch.weights > LARGEST:
            raise Malformed("architecture", f"{arch.weights} weights; a built-in model has at most {LARGEST}")
        if (most := arch.max_positions) > LONGEST:
            raise Malformed("architecture.max_positions", f"{most}; a built-in model has at most {LONGEST}")
        # The smallest vocabulary and hidden size that the blocks of `weights.models._transparent` fit into.
        probe = (arch.heads * arch.head_dim + 1, (1 + arch.heads) * arch.head_dim)
        if self.weights == "transparent" and (arch.tied or arch.vocab_size != probe[0] or arch.hidden_size < probe[1]):
            raise Malformed("weights", "transparent weights need the architecture that probe_architecture makes")

    @property
    def bare(self) -> "Seeded":
        """The model without its adapter, and without the images of a prompt."""
        return replace(self, adapter=None, images=()) if self.adapter is not None or self.images else self

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.architecture.vocab_size

    @property
    def mixes_rows(self) -> bool:
        """Whether the low bits of a row may depend on the other rows of the forward; see `Checkpoint.mixes_rows`."""
        return self.architecture.mixes_rows

    @property
    def indexed(self) -> bool:
        """Whether an indexer chooses the columns that each row attends to."""
        return self.architecture.words.indexed

    @property
    def chooses(self) -> bool:
        """Whether rows choose experts or columns, so that their numbers jump where two scores are equal."""
        return self.mixes_rows or self.indexed


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face checkpoint directory, known by its content.

    Attributes:
        source: The directory that was read, or `builtin:NAME`. Not part of the case's digest.
        digest: `sha256:` over config.json and the safetensors files, by which a replay checks the weights.
        vocab_size: Number of token ids the model scores.
        max_positions: Longest sequence that the model's config admits, in tokens.
        mixes_rows: Whether the low bits of a row may depend on the other rows of the forward, as behind experts.
        indexed: Whether an indexer chooses the columns that each row attends to.
        quantised: Kind of projections of few bits, one of QUANTISED, to which a draft rounds as it opens; else empty.
        stored_rows: Rows of the stored embedding and head, where a draft is opened with `vocab_size` rows of another
            number, the target's: further rows are zero, and rows beyond are cut. 0 where all are as stored.
    """

    TAG: ClassVar[str] = "checkpoint"
    adapter: ClassVar[None] = None
    images: ClassVar[Images] = ()
    """Only built-in models have adapters and images."""

    source: str
    digest: str
    vocab_size: int
    max_positions: int
    mixes_rows: bool = field(default=False, metadata=OMIT_DEFAULT)
    indexed: bool = field(default=False, metadata=OMIT_DEFAULT)
    quantised: str = field(default="", metadata=OMIT_DEFAULT)
    stored_rows: int = field(default=0, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        check_quantised(self.quantised)
        if self.stored_rows < 0 or 0 < self.stored_rows == self.vocab_size:
            raise Malformed("stored_rows", f"{self.stored_rows}, where {self.vocab_size} rows are opened")

    @property
    def chooses(self) -> bool:
        """Whether rows choose experts or columns; see `Seeded.chooses`."""
        return self.mixes_rows or self.indexed

    @property
    def bare(self) -> "Checkpoint":
        """The model itself, which has no adapter."""
        return self

    def with_rows(self, vocab_size: int) -> "Checkpoint":
        """The model of a draft whose target scores `vocab_size` ids; see `stored_rows`."""
        stored_rows = self.stored_rows or self.vocab_size
        return replace(self, vocab_size=vocab_size, stored_rows=0 if stored_rows == vocab_size else stored_rows)


Model = Seeded | Checkpoint
