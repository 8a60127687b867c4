"""The table of measured attention times, as `bench attention --table` writes it.

`table.schema.json` beside this file is the schema. A table belongs to one device and holds shapes of attention (dtype,
heads, head dimension), each with scenes: the times of every way that ran at one batch, prefix and number of nodes.
"""

import json
import math
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from specverify.reference.case_json import dotted_path, shorten

VERSION = 1
"""Version of the format; the field `attention_table` of a file holds it."""

SCHEMA = Path(__file__).parent / "table.schema.json"


class WrongTable(ValueError):
    """A file that is no table of attention times; the message says in one line what is wrong with it."""


@dataclass(frozen=True)
class Shape:
    """The dtype and the heads that all forwards of one model have in common.

    Attributes:
        dtype: The working dtype as cases name it.
        heads: Query heads.
        kv_heads: KV heads.
        head_dim: Numbers of a key.
    """

    dtype: str
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.dtype}, {self.heads} heads on {self.kv_heads} KV of {self.head_dim}"


@dataclass(frozen=True)
class Sizes:
    """The sizes of one forward: lanes, committed columns of the longest lane, rows of the widest lane."""

    batch: int
    prefix: int
    nodes: int

    def distance(self, sizes: "Sizes") -> float:
        """The sum of the distances of batch, prefix and nodes, each in powers of two."""
        # One more, because a first prefill has a prefix of 0.
        pairs = ((self.batch, sizes.batch), (self.prefix + 1, sizes.prefix + 1), (self.nodes, sizes.nodes))
        return sum(abs(math.log2(number / other_number)) for number, other_number in pairs)


@dataclass(frozen=True)
class Scene:
    """The times of each way that was measured at `sizes`.

    Attributes:
        sizes: Batch, prefix and nodes.
        us: The median of each way in microseconds.
    """

    sizes: Sizes
    us: Mapping[str, float] = field(hash=False)

    @property
    def fastest_first(self) -> tuple[str, ...]:
        """The measured ways, the fastest first; of equal times, the earlier name in the alphabet."""
        return tuple(sorted(self.us, key=lambda way: (self.us[way], way)))


@dataclass(frozen=True, eq=False)
class Table:
    """Measured times on one device; equal to itself alone, so that it is quick to look up.

    Attributes:
        kind: The kind of device: cpu or cuda.
        device: The name of the processor or of the GPU.
        threads: Threads of torch when the table was measured.
        shapes: The scenes of each shape.
    """

    kind: str
    device: str
    threads: int
    shapes: Mapping[Shape, tuple[Scene, ...]]

    @property
    def ways(self) -> tuple[str, ...]:
        """All ways that were measured in some scene."""
        return tuple(sorted({way for scenes in self.shapes.values() for scene in scenes for way in scene.us}))


@lru_cache(maxsize=4096)
def nearest(table: Table, shape: Shape, sizes: Sizes) -> Scene | None:
    """The measured scene of `shape` that lies nearest to `sizes`, the first of several; None for another shape.

    The distance is `Sizes.distance`. All layers of a forward ask for the same, so that answers are remembered.
    """
    return min(table.shapes.get(shape, ()), key=lambda scene: scene.sizes.distance(sizes), default=None)


@lru_cache(maxsize=4096)
def nearest_width_scene(table: Table, shape: Shape, sizes: Sizes) -> Scene | None:
    """As `nearest`, but with the nearest head dimension that was measured for this dtype and these heads."""
    heads = shape.dtype, shape.heads, shape.kv_heads
    widths = [
        measured_shape.head_dim
        for measured_shape in table.shapes
        if (measured_shape.dtype, measured_shape.heads, measured_shape.kv_heads) == heads
    ]
    if not widths:
        return None
    width = min(widths, key=lambda head_dim: (abs(math.log2(head_dim / shape.head_dim)), head_dim))
    return nearest(table, replace(shape, head_dim=width), sizes)


@cache
def schema() -> dict[str, Any]:
    """The JSON Schema of a table."""
    content: dict[str, Any] = json.loads(SCHEMA.read_text("utf-8"))
    return content


def table_of(content: Any) -> Table:
    """The table that a decoded JSON value describes.

    Raises:
        WrongTable: if the schema refuses it, or a shape or a scene stands twice.
    """
    if isinstance(content, dict) and content.get("attention_table") not in (None, VERSION):
        raise WrongTable(f"version {content['attention_table']!r} of the format; this program reads {VERSION}")
    complaint = best_match(Draft202012Validator(schema()).iter_errors(content))
    if complaint is not None:
        place = dotted_path(complaint.absolute_path)
        raise WrongTable(f"{place + ': ' if place else ''}{shorten(complaint.message)}")
    shapes: dict[Shape, tuple[Scene, ...]] = {}
    for entry in content["shapes"]:
        shape = Shape(entry["dtype"], entry["heads"], entry["kv_heads"], entry["head_dim"])
        scenes = [
            Scene(Sizes(scene["batch"], scene["prefix"], scene["nodes"]), scene["us"]) for scene in entry["scenes"]
        ]
        if shape in shapes or len({scene.sizes for scene in scenes}) < len(scenes):
            raise WrongTable(f"shapes: {shape} {'stands' if shape in shapes else 'has a scene'} twice")
        shapes[shape] = tuple(scenes)
    return Table(content["kind"], content["device"], content["threads"], shapes)


def read_table(file: str | Path) -> Table:
    """The table in `file`.

    Raises:
        WrongTable: if the file cannot be read, is no JSON, or is no table.
    """
    try:
        return table_of(json.loads(Path(file).read_text("utf-8")))
    except OSError as error:
        raise WrongTable(f"it cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, WrongTable):
            raise
        raise WrongTable(f"it is no JSON ({shorten(str(error))})") from None


def device_name(device: str) -> str:
    """The name of the GPU, or of the processor, as tables of measured times hold it."""
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine() or "cpu"
