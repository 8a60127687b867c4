"""HeadFiles: the directory that holds the weights of a draft head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HeadFiles:
    """A directory with the weights of a head, known by its content.

    Attributes:
        source: The directory that was read. Not part of the case's digest.
        digest: `sha256:` over config.json and the safetensors files; a replay on another machine checks the weights
            by it.
    """

    source: str
    digest: str


FILES_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["source", "digest"],
    "properties": {"source": {"type": "string"}, "digest": {"type": "string"}},
}
"""The JSON Schema of HeadFiles."""
