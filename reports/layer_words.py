"""The words for what is special in a layer: windows, chunks, soft caps, sinks, latent rows."""

from specverify.reference.architecture import Architecture, Model, Seeded
from specverify.reports.format import number, plural


def architecture_of(model: Model) -> Architecture | None:
    """The architecture of a built-in model; None for a checkpoint, whose layers are not opened for a page."""
    return model.architecture if isinstance(model, Seeded) else None


def special_words(model: Model, layer: int | None = None) -> list[str]:
    """What is special in the attention of `layer`, or of any layer where none is named: `window of 4 in layer 1`."""
    arch = architecture_of(model)
    if arch is None:
        return []
    named = layer is not None and 0 <= layer < arch.layers
    layers = [layer] if named and layer is not None else [*range(arch.layers)]
    words = _by_layer("window of {}", arch.windows, layers, arch.layers)
    words += _by_layer("chunks of {}", arch.chunks, layers, arch.layers)
    unrotated = [number_ for number_ in layers if number_ in arch.unrotated]
    words += [f"no rotation{_where(unrotated, arch.layers)}"] if unrotated else []
    attended = [number_ for number_ in layers if number_ not in arch.unattended]
    if not attended:
        return [*words, f"no attention{_where(layers, arch.layers)}"]
    words += [f"scores capped at {number(arch.score_cap)}"] if arch.score_cap else []
    logit_cap = float(getattr(arch.settings, "logit_cap", 0.0))
    words += [f"logits capped at {number(logit_cap)}"] if logit_cap else []
    words += ["sinks"] if arch.words.sinks else []
    if arch.settings.latent_rank:
        words.append(f"latent rows of {arch.settings.latent_rank}")
    return words


def _by_layer(pattern: str, values: tuple[int, ...], layers: list[int], count: int) -> list[str]:
    """A phrase for each value other than 0, with the layers that have it."""
    layers_of: dict[int, list[int]] = {}
    for layer in layers:
        if layer < len(values) and values[layer]:
            layers_of.setdefault(values[layer], []).append(layer)
    return [f"{pattern.format(value)}{_where(named, count)}" for value, named in layers_of.items()]


def _where(layers: list[int], count: int) -> str:
    """The layers in words; nothing for a model of one layer, or for all of them."""
    if len(layers) == count:
        return ""
    noun = "layer" if len(layers) == 1 else "layers"
    return f" in {noun} {', '.join(map(str, layers))}"


def hiding_words(model: Model, layer: int, row: int, column: int) -> str:
    """Why the row at position `row` may not see position `column` before it in `layer`; empty where it may."""
    arch = architecture_of(model)
    if arch is None or not 0 <= layer < arch.layers or column > row:
        return ""
    window = arch.windows[layer]
    if window and column <= row - window:
        return f"outside the window of {window} of layer {layer}"
    chunk = arch.chunks[layer] if layer < len(arch.chunks) else 0
    if chunk and column // chunk != row // chunk:
        return f"in another chunk of {chunk} of layer {layer}"
    return ""


def showing_words(model: Model, layer: int) -> str:
    """The limit inside which a row sees positions in `layer`; empty for a layer without one."""
    arch = architecture_of(model)
    if arch is None or not 0 <= layer < arch.layers:
        return ""
    if arch.windows[layer]:
        return f"inside the window of {plural(arch.windows[layer], 'token')} of layer {layer}"
    if layer < len(arch.chunks) and arch.chunks[layer]:
        return f"in the same chunk of {arch.chunks[layer]} of layer {layer}"
    return ""
