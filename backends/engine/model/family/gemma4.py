"""The Gemma 4 family, text model.

transformers 5.23 keeps sizes of layers in a config for each of them. Layers that share keys and values take them from
the layer that has them in the same forward, and write nothing to a cache.
"""

from typing import Any

import torch
import transformers
from torch import nn

from specverify.backends.base import Unsupported
from specverify.backends.engine.model.family.base import ModelFamily, equal_windows, layer_types, layered_rope
from specverify.backends.engine.model.float64_modules import ExactLayeredRotary, rms_norm
from specverify.reference.architecture import Architecture
from specverify.reference.family.gemma4 import Gemma4Settings


def _fields(arch: Architecture) -> dict[str, Any]:
    if arch.score_cap:
        raise Unsupported("gemma4 with a soft cap of attention: transformers' attention hands none on")
    settings = Gemma4Settings.of(arch)
    full_layers = [layer for layer, window in enumerate(arch.windows) if not window]
    sizes = [arch.layer_heads(layer) for layer in full_layers]
    return {
        "layer_types": layer_types(arch),
        "sliding_window": max(arch.windows) or 1,  # transformers makes its mask even where no layer has a window
        "rope_parameters": layered_rope(arch, settings.local_theta or arch.rope.theta),
        "final_logit_softcapping": settings.logit_cap or None,
        "per_layer_config": {
            layer: {"head_dim": own.head_dim, "num_key_value_heads": own.kv_heads}
            for layer, own in zip(full_layers, sizes, strict=True)
        },
        "attention_k_eq_v": settings.keys_as_values,
        "num_kv_shared_layers": settings.shared_layers,
        "use_double_wide_mlp": settings.wide_blocks,
        "hidden_size_per_layer_input": settings.layer_input_width,
        "vocab_size_per_layer_input": arch.vocab_size,
    }


def with_exact_scale(module: Any, _: Any) -> nn.Module:
    """Give an embedding its factor, rounded once to the dtype of the weights; transformers' own is of float32."""
    dtype = module.weight.dtype
    module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64).to(dtype)
    assert isinstance(module, nn.Module)
    return module


def _complete(network: Any) -> None:
    """Give the embeddings of a built-in model the factors that no state dict holds."""
    for name in ("embed_tokens", "embed_tokens_per_layer"):
        if hasattr(network.model, name):
            with_exact_scale(getattr(network.model, name), network.config)
    network.model._maybe_slice_kv_shared_inputs = _all_rows


def _all_rows(
    hidden: Any, per_layer_inputs: Any, position_embeddings: Any, masks: Any, *_: Any, **__: Any
) -> tuple[Any, Any, Any, Any]:
    """The inputs of the layers that share keys and values, of all rows.

    transformers drops the rows whose logits nobody asked for, and then fails for a model without inputs of layers.
    """
    return hidden, per_layer_inputs, position_embeddings, masks


def _prepare(network: Any) -> None:
    """Note the sizes of each layer and whose keys and values it reads, for caches; keep the rows of all layers."""
    network.model._maybe_slice_kv_shared_inputs = _all_rows
    attentions = [layer.self_attn for layer in network.model.layers]
    kinds, sources = list(network.config.layer_types), list[int]()
    for layer, attention in enumerate(attentions):
        if attention.is_kv_shared_layer:
            own_layers = [source for source in range(layer) if sources[source] == source]
            sources.append(max(source for source in own_layers if kinds[source] == kinds[layer]))
        else:
            sources.append(layer)
    network.kv_sources = sources
    widths = [attentions[source].head_dim for source in sources]
    network.heads_by_layer = tuple(
        (attentions[source].k_proj.out_features // width, width, width)
        for source, width in zip(sources, widths, strict=True)
    )


def _exact_rotary(_: nn.Module, config: Any) -> nn.Module:
    widths = {kind: config.per_layer_config[kind].head_dim for kind in set(config.layer_types)}
    return ExactLayeredRotary(config, widths)


if hasattr(transformers, "Gemma4ForCausalLM"):  # later than the oldest release that the engine runs on
    GEMMA4 = ModelFamily(
        "gemma4",
        transformers.Gemma4TextConfig,
        transformers.Gemma4ForCausalLM,
        _fields,
        windows=equal_windows,
        one_bias=True,
        complete=_complete,
        prepare=_prepare,
        exact={
            "Gemma4RMSNorm": rms_norm("eps"),
            "Gemma4TextScaledWordEmbedding": with_exact_scale,
            "Gemma4TextRotaryEmbedding": _exact_rotary,
        },
    )
