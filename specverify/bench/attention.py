"""The command `bench attention`: attention paths timed side by side.

The paths are written-out attention, our split of prefix and tree, our Triton kernel, SDPA under a dense mask and
FlexAttention. One reading of the KV cache gives the lower bound of memory traffic. The times become a table, for the
heads of one checkpoint or of all models that cases draw, by which a backend chooses its way; its format is
`backends/engine/attention/measured/table.schema.json`.
"""

import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specverify import __version__
from specverify.backends.devices import why_no_device
from specverify.backends.engine.attention.measured.table import VERSION, device_name, table_of
from specverify.backends.engine.attention.measured.ways import TRITON, ways_on
from specverify.backends.engine.columns import Attend, AttentionInputs
from specverify.checkpoints.opening import directory_of
from specverify.properties.strategies.models import GALLERY
from specverify.reference.architecture import Architecture
from specverify.reference.case import DTYPES
from specverify.reference.oracle.checkpoint import UnreadableCheckpoint
from specverify.reference.oracle.configuration import read_architecture
from specverify.reports.format import clean, plural
from specverify.reports.progress import Progress
from specverify.reports.writing import write_whole
from specverify.setup.errors import MissingInput, UnusableInput

REPETITIONS = 7
"""Timed repetitions of each path in each scene."""

BASE = "sdpa"
"""The path by whose time the others' are divided: SDPA under the dense mask."""


@dataclass(frozen=True)
class Setting:
    """The sizes that are measured on a device: prefixes, nodes and batches, with heads and dtype of one model."""

    prefixes: tuple[int, ...]
    nodes: tuple[int, ...]
    batches: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype


SETTINGS = {
    "cpu": Setting((128, 512, 2048, 8192), (1, 8, 64), (1, 4), 8, 2, 64, torch.float32),
    # Llama-3-8B's heads.
    "cuda": Setting((512, 2048, 8192), (1, 8, 64), (1, 8, 32), 32, 8, 128, torch.bfloat16),
}


@dataclass(frozen=True)
class Scene:
    """The inputs of attention in one layer of one forward; all lanes have the same prefix length and random tree."""

    query: Tensor
    columns: AttentionInputs
    scaling: float


def scenes(setting: Setting, device: str) -> Iterator[tuple[dict[str, int], Scene]]:
    """Every combination of the setting's sizes, as (sizes, scene) with random tensors."""
    for batch in setting.batches:
        for prefix in setting.prefixes:
            for nodes in setting.nodes:
                yield {"batch": batch, "prefix": prefix, "nodes": nodes}, _scene(setting, batch, prefix, nodes, device)


def _scene(setting: Setting, batch: int, prefix: int, nodes: int, device: str) -> Scene:
    dice = random.Random(nodes)
    generator = torch.Generator().manual_seed(0)
    ancestry = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        # A random earlier node becomes the parent; a row sees its parent's ancestors and itself.
        ancestry[node] |= ancestry[dice.randrange(node)]
    visible = torch.cat([torch.ones(nodes, prefix, dtype=torch.bool), ancestry], 1)
    width = prefix + nodes
    shapes = [(setting.heads, nodes), (setting.kv_heads, width), (setting.kv_heads, width)]
    query, key, value = (
        torch.randn(batch, heads, rows, setting.dim, generator=generator).to(device, setting.dtype)
        for heads, rows in shapes
    )
    masks = visible.expand(batch, 1, nodes, width).contiguous().to(device)
    ends = torch.full((batch,), prefix, dtype=torch.int32)
    return Scene(query, AttentionInputs(key, value, masks, ends, None, lambda _: None), setting.dim**-0.5)


def paths(device: str) -> dict[str, Attend | str]:
    """The compared paths by name; for an absent path, the reason."""
    attends: dict[str, Attend | str] = {way.name: way.attend for way in ways_on(device)}
    if device == "cpu":
        attends[TRITON] = "on the CPU the kernel is only interpreted: a time would mean nothing"
    return attends


def _attend(attend: Attend, scene: Scene) -> Tensor:
    return attend(scene.query, scene.columns, scene.scaling)


def read_once(scene: Scene) -> None:
    """Move as many bytes as one reading of keys and values: a copy of the keys reads and writes that many."""
    scene.columns.key.clone()


def measure(device: str, repetitions: int = REPETITIONS, setting: Setting | None = None) -> dict[str, Any]:
    """Time every path in every scene of `setting`, by default the device's own.

    A repetition visits all paths of a scene in random order.

    Returns:
        rows: batch, prefix, nodes, path, us (median, microseconds), ratio (over SDPA), over_read (over reading the KV
        once); absent: the reason for each absent path; device, threads, dtype, heads, kv_heads, dim, repetitions.

    Raises:
        MissingInput: The device, or a package that it needs, is missing.
    """
    why = why_no_device(device)
    if why is not None:
        raise MissingInput(f"bench attention --device {device}: {why}")
    setting = setting or SETTINGS[device]
    try:
        offered = paths(device)
    except ImportError as absent:
        raise MissingInput(f"bench attention --device {device}: {absent}") from None
    runs: dict[str, Callable[[Scene], object]] = {
        name: partial(_attend, attend) for name, attend in offered.items() if not isinstance(attend, str)
    }
    runs["read"] = read_once
    order = random.Random(0)
    rows = []
    for place, scene in scenes(setting, device):
        times: dict[str, list[float]] = {name: [] for name in runs}
        for repetition in range(repetitions + 1):
            for name in order.sample(list(runs), len(runs)):
                spent = _seconds(partial(runs[name], scene), device)
                if repetition:  # the first one warms up, and compiles
                    times[name].append(spent)
        medians = {name: statistics.median(spent) for name, spent in times.items()}
        rows += [
            {
                **place,
                "path": name,
                "us": 1e6 * spent,
                "ratio": spent / medians[BASE],
                "over_read": spent / medians["read"],
            }
            for name, spent in medians.items()
        ]
    return {
        "rows": rows,
        "absent": {name: reason for name, reason in offered.items() if isinstance(reason, str)},
        "device": device_name(device) if device == "cuda" else device,
        "threads": torch.get_num_threads(),
        "dtype": str(setting.dtype).removeprefix("torch."),
        "heads": setting.heads,
        "kv_heads": setting.kv_heads,
        "dim": setting.dim,
        "repetitions": repetitions,
    }


def _seconds(run: Callable[[], object], device: str) -> float:
    # Kernels run asynchronously on a device: wait for it before and after.
    if device != "cpu":
        torch.accelerator.synchronize()
    began = time.perf_counter()
    run()
    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - began


DRAWN = "drawn"
"""The value of `--model` that stands for all models which cases draw."""

SMALL = ((8, 64), (1, 8), (1, 3))
"""Prefixes, nodes and batches that are measured for drawn models: the sizes of drawn cases."""


def settings(device: str, model: str | None, dtype: str | None) -> list[Setting]:
    """The setting that is measured: the device's own, or the sizes with the heads of `model`, in `dtype`.

    Raises:
        UnusableInput: The checkpoint cannot be read, or is of a family whose heads are not known.
        MissingInput: As in `directory_of`.
    """
    setting = SETTINGS[device]
    setting = setting if dtype is None else replace(setting, dtype=getattr(torch, dtype))
    if model is None:
        return [setting]
    if model == DRAWN:
        prefixes, nodes, batches = SMALL
        dtypes = DTYPES if dtype is None else (dtype,)
        heads = sorted({sizes for architecture in GALLERY for sizes in heads_of(architecture)})
        return [
            Setting(prefixes, nodes, batches, *sizes, dtype=getattr(torch, name)) for name in dtypes for sizes in heads
        ]
    try:
        architecture = read_architecture(directory_of(model) / "config.json")
    except UnreadableCheckpoint as why:
        raise UnusableInput(str(why)) from None
    return [
        replace(setting, heads=heads, kv_heads=kv_heads, dim=dim) for heads, kv_heads, dim in heads_of(architecture)
    ]


def heads_of(architecture: Architecture) -> list[tuple[int, int, int]]:
    """Query heads, KV heads and head dimension of a model's attention; of latent attention, over latent rows too."""
    sizes = [(architecture.heads, architecture.kv_heads, architecture.head_dim)]
    if architecture.settings.latent_rank:
        sizes.append((architecture.heads, 1, architecture.settings.latent_rank + architecture.rotary_dim))
    return sizes


def measure_settings(device: str, chosen: list[Setting]) -> list[dict[str, Any]]:
    """The figures of `measure` for each of the settings."""
    if len(chosen) == 1:
        return [measure(device, REPETITIONS, chosen[0])]
    with Progress(len(chosen)) as progress:
        figures = []
        for setting in chosen:
            figures.append(measure(device, REPETITIONS, setting))
            progress.advance()
    return figures


def table(device: str, figures: list[dict[str, Any]]) -> dict[str, Any]:
    """The table of all figures, as JSON holds it."""
    content = {
        "attention_table": VERSION,
        "kind": device,
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "versions": {"specverify": __version__, "torch": torch.__version__},
        "repetitions": figures[0]["repetitions"],
        "absent": figures[0]["absent"],
        "shapes": [
            {
                "dtype": shape["dtype"],
                "heads": shape["heads"],
                "kv_heads": shape["kv_heads"],
                "head_dim": shape["dim"],
                "scenes": _scenes(shape["rows"]),
            }
            for shape in figures
        ],
    }
    table_of(content)  # what is written can be read
    return content


def _scenes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    scenes: dict[tuple[int, int, int], dict[str, float]] = {}
    for row in rows:
        if row["path"] != "read":
            times = scenes.setdefault((row["batch"], row["prefix"], row["nodes"]), {})
            times[row["path"]] = round(row["us"], 1)
    return [
        {"batch": batch, "prefix": prefix, "nodes": nodes, "us": us} for (batch, prefix, nodes), us in scenes.items()
    ]


def write(file: str, content: dict[str, Any]) -> None:
    """Write a table whole or not at all, each scene on a line of its own.

    Raises:
        Unwritable: when the system refuses.
    """
    shapes = []
    for shape in content["shapes"]:
        scenes = ",\n".join(f"   {json.dumps(scene)}" for scene in shape["scenes"])
        head = json.dumps({name: value for name, value in shape.items() if name != "scenes"})
        shapes.append(f'  {head[:-1]}, "scenes": [\n{scenes}\n  ]}}')
    head = json.dumps({name: value for name, value in content.items() if name != "shapes"}, indent=1)
    joined = ",\n".join(shapes)
    write_whole(file, f'{head[:-2]},\n "shapes": [\n{joined}\n ]\n}}\n'.encode())


def summary(content: dict[str, Any]) -> str:
    """A table in lines: device, shapes, and how often each way is the fastest."""
    scenes = [scene for shape in table_of(content).shapes.values() for scene in shape]
    first = Counter(scene.fastest_first[0] for scene in scenes)
    fastest = ", ".join(f"{way} in {count}" for way, count in first.most_common())
    return (
        f"bench attention on {clean(content['device'])}, {plural(content['threads'], 'thread')}: "
        f"{plural(len(content['shapes']), 'shape')}, {plural(len(scenes), 'scene')}\n  fastest: {fastest}\n"
    )
