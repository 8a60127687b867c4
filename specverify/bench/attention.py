"""The command `bench attention`: attention paths timed side by side.

The paths are written-out attention, our split of prefix and tree, our Triton kernel, SDPA under a dense mask and
FlexAttention. One reading of the KV cache gives the lower bound of memory traffic. The times become a table by which a
backend chooses (`backends/engine/attention/measured`).
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specverify.backends.devices import why_no_device
from specverify.backends.engine.attention.measured.device import device_name
from specverify.backends.engine.attention.measured.ways import TRITON, ways_on
from specverify.backends.engine.columns import Attend, AttentionInputs
from specverify.setup.errors import MissingInput

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
