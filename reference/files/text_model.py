"""The words of the text model inside a checkpoint of several modalities.

Such a config.json holds the fields of the text model in `text_config`, and its checkpoint the tensors of the text model
behind `language_model.` (transformers 4) or `model.language_model.` (transformers 5), beside those of a vision tower.
A text without images runs the text model alone.
"""

from pathlib import Path
from typing import Any

from specverify.reference.files.fields import UnreadableCheckpoint, quote_value

COMPOSITES = ("gemma3", "gemma4", "llama4", "mistral3", "kimi_k25", "qwen3_5", "qwen3_5_moe")
"""The values of `model_type` of models whose text model is read by itself."""

NESTED = "text_config"

SHARED = ("tie_word_embeddings", "quantization_config", "eos_token_id")
"""Fields of the text model that may stand outside `text_config`; a file that states one twice must state it alike."""

PREFIXES = {"model.language_model.": "model.", "language_model.": ""}
"""The prefixes of the text model's tensors, each with what stands there in a checkpoint of the text model alone."""

HEAD = "lm_head.weight"


def is_composite(content: dict[str, Any]) -> bool:
    """Whether the content of a config.json is that of a model whose text model is read by itself."""
    return content.get("model_type") in COMPOSITES and isinstance(content.get(NESTED), dict)


def text_content(file: Path, content: dict[str, Any]) -> dict[str, Any]:
    """The fields of the text model that `content`, of the config.json `file`, describes.

    Raises:
        UnreadableCheckpoint: A field stands in `text_config` and outside, with different values.
    """
    if not is_composite(content):
        return content
    nested: dict[str, Any] = content[NESTED]
    shared = {name: content[name] for name in SHARED if content.get(name) is not None}
    for name, value in shared.items():
        if nested.get(name) is not None and nested[name] != value:
            raise UnreadableCheckpoint(
                f"{file}: {name} is {quote_value(value)}, and {quote_value(nested[name])} in {NESTED}; correct one"
            )
    return {**shared, **{name: value for name, value in nested.items() if value is not None or name not in shared}}


def sizes_content(content: dict[str, Any]) -> dict[str, Any]:
    """`content` with the fields of any `text_config` in it, whose sizes are those of the scored tokens."""
    nested = content.get(NESTED)
    return {**content, **nested} if isinstance(nested, dict) else content


def text_tensor(name: str) -> str | None:
    """The name of a composite checkpoint's tensor in a checkpoint of the text model; None for a tensor of a tower."""
    for prefix, text_prefix in PREFIXES.items():
        if name.startswith(prefix):
            return text_prefix + name.removeprefix(prefix)
    return name if name == HEAD else None
