"""Times of the target's verify forward and of its head, by size.

The grids are those of trees by batch, and of batches by context. The head is timed on transformers' own model, since
its product over the vocabulary is the same in every engine.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

import numpy as np
import torch

from specverify.backends.adapt.models import transformers_model
from specverify.backends.base import Serving, Unsupported
from specverify.checkpoints.opening import open_checkpoint
from specverify.dispatch.measure import forward_seconds
from specverify.reference.malformed import Malformed
from specverify.reports.progress import Progress
from specverify.setup.errors import UnusableInput
from specverify.setup.subjects import manifest, open_planted

STEPS = 3
"""Forwards that are timed at each size, after one that is not; the time is their median."""

TREE = 24
"""Nodes of the trees in the grid of batches by context, and rows whose logits are compared."""

DEEPEST = 9
"""Most tokens that a step on a tree of `specverify.dispatch.measure.tree_of` emits."""

PARTS = (8, 4, 2, 1)
"""The vocabularies that are timed: the target's over each of these."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that are timed.

    Attributes:
        nodes: Nodes of a tree, the root included.
        batches: Requests that step together.
        prefixes: Tokens of each prompt; the grid of trees by batch takes the first.
    """

    nodes: tuple[int, ...] = (1, 8, 16, 32, 64)
    batches: tuple[int, ...] = (1, 2, 4)
    prefixes: tuple[int, ...] = (128, 512, 1024)


def measure(name: str, model: str, dtype: str, sizes: Sizes, steps: int = STEPS) -> dict[str, Any]:
    """Time forwards of the checkpoint `model` on the backend `name`.

    Returns:
        facts; trees_by_batch and batches_by_prefix: rows (nodes, prefix, batch, ms); lines: for each batch and each
        prefix what one more node or request costs (`line_through`); vocabulary: rows (rows, vocabulary, ms); logits:
        the time of a forward that scores all rows, and of one that scores the last row alone, and their ratio.

    Raises:
        UnusableInput: The backend cannot time forwards, or the checkpoint has no room for a size.
    """
    checkpoint, backend = open_checkpoint(model), open_planted(name, None, None)
    if not isinstance(backend, Serving) or not backend.declaration.sessions:
        raise UnusableInput(f"bench growth --backend {name}: it steps no batches, so that no growth can be timed")

    longest = max(sizes.prefixes) + (steps + 1) * DEEPEST
    if longest > checkpoint.max_positions:
        raise UnusableInput(
            f"bench growth: {model} holds {checkpoint.max_positions} positions, and {longest} are needed"
        )

    def time_cell(nodes: int, prefix: int, batch: int) -> dict[str, Any]:
        try:
            seconds = forward_seconds(
                backend, checkpoint, batch=batch, nodes=nodes, prefix=prefix, steps=steps, dtype=dtype
            )
        except Malformed as why:
            raise UnusableInput(f"bench growth: {nodes} nodes after {prefix} tokens: {why}") from None
        except Unsupported as why:
            raise UnusableInput(f"bench growth --backend {name}: {why}") from None
        return {"nodes": nodes, "prefix": prefix, "batch": batch, "ms": 1000 * seconds}

    trees = [(nodes, sizes.prefixes[0], batch) for batch, nodes in product(sizes.batches, sizes.nodes)]
    contexts = [(TREE, prefix, batch) for batch, prefix in product(sizes.batches, sizes.prefixes)]
    with Progress(len(trees) + len(contexts)) as progress:
        grids: dict[str, list[dict[str, Any]]] = {}
        for grid, cells in (("trees_by_batch", trees), ("batches_by_prefix", contexts)):
            grids[grid] = []
            for cell in cells:
                grids[grid].append(time_cell(*cell))
                progress.advance()
    lines = [
        {"of": grid, "by": axis, "at": f"{fixed_axis} {fixed_size}"}
        | line_through({row[axis]: row["ms"] for row in rows})
        for grid, axis, fixed_axis in (
            ("trees_by_batch", "nodes", "batch"),
            ("trees_by_batch", "batch", "nodes"),
            ("batches_by_prefix", "prefix", "batch"),
        )
        for fixed_size in dict.fromkeys(row[fixed_axis] for row in grids[grid])
        for rows in [[row for row in grids[grid] if row[fixed_axis] == fixed_size]]
        if len(rows) > 1
    ]
    network = transformers_model(checkpoint, dtype)
    facts = {"backend": name, "dtype": dtype, "threads": torch.get_num_threads(), "steps": steps} | manifest(backend)
    return {"facts": facts, **grids, "lines": lines, **head_times(network, steps)}


def head_times(network: Any, steps: int) -> dict[str, Any]:
    """Times of the head by vocabulary, and of a whole forward that scores all rows or the last alone.

    Returns:
        vocabulary: rows (rows, vocabulary, ms); logits: all_ms, last_ms and ratio, over TREE rows.
    """
    head = network.get_output_embeddings()
    weights, hidden = head.weight, torch.zeros(TREE, head.weight.shape[1], dtype=head.weight.dtype)
    rows = []
    for part in PARTS:
        fewer = weights[: max(1, len(weights) // part)]
        ms = _median(lambda fewer=fewer: torch.nn.functional.linear(hidden, fewer), steps)  # type: ignore[misc]
        rows.append({"rows": TREE, "vocabulary": len(fewer), "ms": ms})
    ids = torch.zeros(1, TREE, dtype=torch.long)
    all_ms = _median(lambda: network(ids, logits_to_keep=0), steps)
    last_ms = _median(lambda: network(ids, logits_to_keep=1), steps)
    return {"vocabulary": rows, "logits": {"all_ms": all_ms, "last_ms": last_ms, "ratio": all_ms / last_ms}}


def _median(call: Callable[[], Any], steps: int) -> float:
    """The median time of a call in ms, after one that is not timed."""
    times = []
    with torch.no_grad():
        for _ in range(steps + 1):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
    return 1000 * median(times[1:])


def line_through(points: Mapping[int, float]) -> dict[str, Any]:
    """The least-squares line through times by size.

    Returns:
        base_ms and each_ms (the line at size 0, and what one more adds), straight (R squared: the share of the variance
        that the line explains; None where all times are equal or there are fewer than three).
    """
    sizes, times = np.array(list(points), dtype=float), np.array(list(points.values()))
    if len(sizes) < 2:
        return {"base_ms": float(times[0]), "each_ms": None, "straight": None}
    each, base = np.polyfit(sizes, times, 1)
    around = float(np.square(times - times.mean()).sum())
    residual = float(np.square(times - (base + each * sizes)).sum())
    straight = 1 - residual / around if around and len(sizes) > 2 else None
    return {"base_ms": float(base), "each_ms": float(each), "straight": straight}
