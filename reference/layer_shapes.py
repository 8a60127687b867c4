"""The shape of every tensor of a decoder layer, by its name in a Hugging Face state dict."""

from specverify.reference.architecture import Architecture


def layer_shapes(arch: Architecture, layer: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of `layer`, under `model.layers.<layer>.`."""
    hidden = arch.hidden_size
    table: dict[str, tuple[int, ...]] = {}
    prefix, sizes = f"model.layers.{layer}", arch.layer_heads(layer)
    all_query_width, kv_width = arch.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    value_width = sizes.value_dim if arch.words.projections is None else sizes.head_dim
    makes_kv = arch.kv_sources[layer] == layer
    for name in arch.words.norms.names:
        table[f"{prefix}.{name}.weight"] = (hidden,)
    mixer = arch.words.recurrent(arch, layer)
    if mixer is not None:
        table |= {f"{prefix}.{name}": shape for name, shape in mixer.items()}
    if layer in arch.unattended:
        pass
    elif arch.words.projections is not None:
        table |= {f"{prefix}.{name}": shape for name, shape in arch.words.projections(arch, layer).items()}
    else:
        query_width = all_query_width * (2 if arch.words.gated_attention else 1)
        widths = {"q": query_width}
        if makes_kv:
            widths["k"] = kv_width
        if makes_kv and not arch.settings.keys_serve_as_values(arch, layer):
            widths["v"] = sizes.kv_heads * value_width
        for name, out in widths.items():
            table[f"{prefix}.self_attn.{name}_proj.weight"] = (out, hidden)
            if arch.qkv_bias:
                table[f"{prefix}.self_attn.{name}_proj.bias"] = (out,)
        table[f"{prefix}.self_attn.o_proj.weight"] = (hidden, arch.heads * value_width)
        if arch.output_bias:
            table[f"{prefix}.self_attn.o_proj.bias"] = (hidden,)
    if arch.qk_norm and arch.words.query_key_gains and layer not in arch.unattended:
        is_whole = arch.words.whole_query_key_norms
        for name, heads in (("q", arch.heads), ("k", sizes.kv_heads)) if makes_kv else (("q", arch.heads),):
            table[f"{prefix}.self_attn.{name}_norm.weight"] = (sizes.head_dim * (heads if is_whole else 1),)
    for tensors_of in (arch.words.attention_extras, arch.words.feed_forward):
        table |= {f"{prefix}.{name}": shape for name, shape in tensors_of(arch, layer).items()}
    return table
