"""The table of measured attention times, by which a backend chooses its way.

The format is `backends/engine/attention/measured/table.schema.json`. A table is for the heads of one checkpoint, or for
those of all models that cases draw.
"""

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from specverify import __version__
from specverify.backends.engine.attention.measured.device import device_name
from specverify.backends.engine.attention.measured.table import VERSION, table_of
from specverify.bench import attention
from specverify.bench.attention import SETTINGS, Setting
from specverify.checkpoints.opening import directory_of
from specverify.properties.strategies.models import GALLERY
from specverify.reference.architecture import Architecture
from specverify.reference.case import DTYPES
from specverify.reference.oracle.checkpoint import UnreadableCheckpoint
from specverify.reference.oracle.configuration import read_architecture
from specverify.reports.format import clean, plural
from specverify.reports.progress import Progress
from specverify.reports.writing import write_whole
from specverify.setup.errors import UnusableInput

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
    """The figures of `attention.measure` for each of the settings."""
    if len(chosen) == 1:
        return [attention.measure(device, attention.REPETITIONS, chosen[0])]
    with Progress(len(chosen)) as progress:
        figures = []
        for setting in chosen:
            figures.append(attention.measure(device, attention.REPETITIONS, setting))
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
