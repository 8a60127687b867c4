"""Gemma 4, text model (transformers `models/gemma4`).

Gemma 3's norms, whose weights multiply as they are, around blocks. Layers without a window have heads of a width and a
number of their own, and there the projection of keys may be that of values. Values are normed without a gain, and no
factor multiplies scores. The last layers may read keys and values of an earlier layer of their kind. In the smaller
models an embedding of the token enters the end of each layer. A learned number multiplies the output of each layer.
"""

from dataclasses import dataclass, replace

from specverify.reference.family.base import Family, Shapes, gated_block
from specverify.reference.family.gemma2 import GEMMA2
from specverify.reference.family.settings import ArchitectureFields, LayerHeads, Settings, whole
from specverify.reference.malformed import Malformed


@dataclass(frozen=True)
class Gemma4Settings(Settings):
    """The sizes of layers without a window, and what the layers share.

    Attributes:
        logit_cap: A logit s becomes cap * tanh(s / cap); 0 for none.
        local_theta: The base of rotary embedding in layers with a window; 0 for that of the others.
        full_head_dim: The width of heads in layers without a window; 0 for that of the others.
        full_kv_heads: Their number of heads of keys and values; 0 for that of the others.
        keys_as_values: Whether the projection of keys of layers without a window is that of values too.
        shared_layers: So many last layers read keys and values of the last layer of their kind before them.
        wide_blocks: Whether the feed-forward blocks of these layers are twice as wide.
        layer_input_width: The width of what enters the end of each layer; 0 where nothing does.
    """

    logit_cap: float = 0.0
    local_theta: float = 0.0
    full_head_dim: int = whole(0, least=0)
    full_kv_heads: int = whole(0, least=0)
    keys_as_values: bool = False
    shared_layers: int = whole(0, least=0)
    wide_blocks: bool = False
    layer_input_width: int = whole(0, least=0)

    def layer_heads(self, arch: ArchitectureFields, layer: int) -> LayerHeads:
        """See `Settings.layer_heads`."""
        if arch.windows[layer]:
            return LayerHeads(arch.kv_heads, arch.head_dim, arch.head_dim)
        width = self.full_head_dim or arch.head_dim
        return LayerHeads(self.full_kv_heads or arch.kv_heads, width, width)

    def kv_source(self, arch: ArchitectureFields, layer: int) -> int:
        """See `Settings.kv_source`."""
        first_shared = arch.layers - self.shared_layers
        if layer < first_shared:
            return layer
        kind = bool(arch.windows[layer])
        return next(source for source in reversed(range(first_shared)) if bool(arch.windows[source]) == kind)

    def keys_serve_as_values(self, arch: ArchitectureFields, layer: int) -> bool:
        """See `Settings.keys_serve_as_values`."""
        return self.keys_as_values and not arch.windows[layer]

    def check(self, arch: ArchitectureFields) -> None:
        """See `Settings.check`."""
        if self.local_theta and not self.local_theta > 1:
            raise Malformed("settings", f"local_theta of {self.local_theta} is not a rotary base (more than 1), nor 0")
        if arch.windows[-1]:
            raise Malformed("windows", f"the last layer of {arch.family} has no window")
        # transformers asks for a layer of each kind even where no layer behind it is of that kind.
        first_shared = max(0, arch.layers - self.shared_layers)
        kinds = {bool(window) for window in arch.windows}
        if self.shared_layers and {bool(window) for window in arch.windows[:first_shared]} != kinds:
            raise Malformed("settings", f"shared_layers of {self.shared_layers} leave no layer of a kind to read from")
        if self.wide_blocks and not self.shared_layers:
            raise Malformed("settings", "wide_blocks are those of shared_layers, of which the model has none")
        if not arch.qk_norm or arch.mlp_bias:
            raise Malformed("qk_norm", f"{arch.family} norms queries and keys, and its blocks have no biases")

    def with_wider_heads(self, ratio: float) -> "Gemma4Settings":
        """See `Settings.with_wider_heads`."""
        return replace(self, full_head_dim=int(self.full_head_dim * ratio) // 2 * 2)

    def probed(self, width: int) -> "Gemma4Settings":
        """See `Settings.probed`."""
        return replace(self, full_head_dim=0)


def _block(arch: ArchitectureFields, layer: int) -> Shapes:
    settings = Gemma4Settings.of(arch)
    is_wide = settings.wide_blocks and settings.kv_source(arch, layer) != layer
    return gated_block("mlp", arch.hidden_size, arch.intermediate_size * (1 + is_wide))


def _end_of_layer(arch: ArchitectureFields, layer: int) -> Shapes:
    hidden, width = arch.hidden_size, Gemma4Settings.of(arch).layer_input_width
    if not width:
        return {"layer_scalar": (1,)}
    return {
        "per_layer_input_gate.weight": (width, hidden),
        "per_layer_projection.weight": (hidden, width),
        "post_per_layer_input_norm.weight": (hidden,),
        "layer_scalar": (1,),
    }


EMBEDDING_OF_LAYERS = "model.embed_tokens_per_layer.weight"


def _layer_inputs(arch: ArchitectureFields) -> Shapes:
    width = Gemma4Settings.of(arch).layer_input_width
    if not width:
        return {}
    return {
        EMBEDDING_OF_LAYERS: (arch.vocab_size, arch.layers * width),
        "model.per_layer_model_projection.weight": (arch.layers * width, arch.hidden_size),
        "model.per_layer_projection_norm.weight": (width,),
    }


SIZES = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "heads": 2, "kv_heads": 1, "head_dim": 4,
         "norm_eps": 1e-6, "qk_norm": True}  # fmt: skip

GEMMA4 = Family(
    "gemma4",
    norms=GEMMA2.norms,
    unscaled=True,
    rare=True,
    feed_forward=_block,
    attention_extras=_end_of_layer,
    beside_layers=_layer_inputs,
    rows_by_token=(EMBEDDING_OF_LAYERS,),
    settings=Gemma4Settings,
    drawn=(
        {**SIZES, "windows": (4, 0, 0), "tied": True,
         "rope": {"theta": 1000.0, "kind": "proportional", "share": 0.5},
         "settings": Gemma4Settings(local_theta=100.0, full_head_dim=8, shared_layers=1, wide_blocks=True,
                                    layer_input_width=4, logit_cap=6.0)},
        {**SIZES, "vocab_size": 45, "heads": 4, "kv_heads": 2, "windows": (5, 0),
         "rope": {"theta": 1000000.0, "kind": "proportional", "share": 0.25},
         "settings": Gemma4Settings(local_theta=50.0, full_head_dim=8, full_kv_heads=1, keys_as_values=True)},
        {**SIZES, "vocab_size": 19, "windows": (0, 0, 0),
         "settings": Gemma4Settings(shared_layers=1, layer_input_width=3)},
    ),
)  # fmt: skip
