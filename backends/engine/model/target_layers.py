"""Decoder layers and norms of the classes of a target, outside it, with the target's rotary tables.

MTP modules have such layers. Their caches hold what the target's hold: keys and values, or latent rows.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from specverify.backends.base import Unsupported
from specverify.backends.engine.attention.interface import pass_arguments
from specverify.backends.engine.attention.latent import OverLatentRows
from specverify.backends.engine.columns import Attend
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.model.built_in import Uninitialised
from specverify.backends.engine.model.causal_lm import CausalLm
from specverify.backends.engine.model.family import EXACT, FAMILIES
from specverify.backends.engine.model.family.experts import stack_experts
from specverify.backends.engine.model.float64_modules import make_exact
from specverify.backends.engine.reach import Reach


class TargetLayers(nn.Module):
    """Layers with full attention, and experts in each where the family has them, counted from 0.

    Attributes:
        model: A module with the `layers`, as a model of transformers has them.
        norms: The norms beside the layers, by their names with `_` in place of dots.
        reaches: The reach of each layer.
    """

    def __init__(self, target: CausalLm, layers: Sequence[Mapping[str, Tensor]], norms: Mapping[str, Tensor]) -> None:
        """Make a layer of each state dict in `layers`, under transformers' names, and the norms with these weights.

        Raises:
            Unsupported: a weight is missing, or has no place in a layer of the target's class.
        """
        super().__init__()
        network = target.unsharded
        config = config_of_modules(network.config, len(layers))
        kind = type(network.base_model.layers[-1])
        with torch.device("meta"), Uninitialised():
            decoder_layers = [kind(config, number) for number in range(len(layers))]
        try:
            for layer, state in zip(decoder_layers, layers, strict=True):
                layer.load_state_dict(stack_experts(dict(state)), strict=True, assign=True)
        except RuntimeError as why:
            line = " ".join(str(why).split())[:200]
            raise Unsupported(f"MTP modules are no {kind.__name__} of transformers: {line}") from why
        self.model: Any = nn.Module()
        self.model.layers = nn.ModuleList(decoder_layers)
        self.norms = nn.ModuleDict()
        for name, weight in norms.items():
            norm = deepcopy(decoder_layers[0].input_layernorm)
            norm.weight = nn.Parameter(weight, requires_grad=False)
            self.norms[name.replace(".", "_")] = norm
        for family in FAMILIES.values():
            if isinstance(network, family.model):
                family.prepare(self)
        if target.dtype == torch.float64:
            make_exact(self, config, EXACT)
        self.requires_grad_(False).eval()
        self.reaches = [Reach()] * len(layers)
        # In a list, since a module of a module would be one of its own.
        self._rotary = [network.base_model.rotary_emb]

    def norm(self, x: Tensor, name: str) -> Tensor:
        """`x` [R, hidden] through the norm `name`."""
        normed: Tensor = self.norms[name.replace(".", "_")](x)
        return normed

    def tables(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [R, width] of the target's rotary embedding at `positions` [R], in the dtype of `like`."""
        cos, sin = self._rotary[0](like, positions[None])
        return cos[0], sin[0]

    def run(
        self,
        number: int,
        stream: Tensor,
        tables: tuple[Tensor, Tensor],
        mask: Tensor,
        batch: BatchCache,
        attend: Attend,
    ) -> Tensor:
        """The residual stream [lanes, width, hidden] behind a layer; `tables` are [lanes, width, ...]."""
        attend = OverLatentRows(attend)
        with pass_arguments(attend, batch, self.reaches):
            output: Any = self.model.layers[number](
                hidden_states=stream,
                attention_mask=mask,
                past_key_values=batch,
                position_embeddings=tables,
                attend=attend,
                lanes=batch,
                reaches=self.reaches,
            )
        behind: Tensor = output[0] if isinstance(output, tuple) else output
        return behind


def config_of_modules(config: Any, count: int) -> Any:
    """The config of a target with `count` layers, each with full attention, and with experts where the family has them.

    As `PreTrainedConfig.get_mtp_config` of transformers 5.23 makes it.
    """
    config = deepcopy(config)
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = ["full_attention"] * count
    for name, value in (("first_k_dense_replace", 0), ("mlp_only_layers", [])):
        if hasattr(config, name):
            setattr(config, name, value)
    return config
