"""The command `bench oracle`: its trees beside those of transformers.

Both run a context and a tree from scratch, with the same weights in float64. The oracle shares the work of paths with a
common prefix, as every run does; transformers runs all rows in one forward under a tree mask. Calls alternate.
"""

import time
from statistics import median
from typing import Any

import numpy as np
import torch

from specverify.backends.adapt.models import transformers_model
from specverify.checkpoints.opening import open_checkpoint
from specverify.dispatch.measure import tree_of
from specverify.properties.strategies.models import GALLERY
from specverify.reference.architecture import Model, Seeded
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.shared_prefix import SharedPrefix
from specverify.reference.trace import Array
from specverify.reference.tree import Tree

NODES, CONTEXT, ROUNDS = (1, 8, 24, 64), 32, 5
"""Nodes of the trees, tokens before each, and calls of which the median is taken."""

APART = 1e-3
"""The largest difference of logits at which both have run the same tree; rotary tables of transformers are float32."""


def measure(
    model: str | None, nodes: tuple[int, ...] = NODES, context: int = CONTEXT, rounds: int = ROUNDS
) -> dict[str, Any]:
    """Time trees of each number of nodes, on a checkpoint or on the first built-in model.

    Returns:
        model, context, threads; trees: rows with nodes, oracle_ms, transformers_ms, ratio (oracle over transformers)
        and apart (the largest difference of their logits); same (whether every difference is at most APART).

    Raises:
        UnusableInput, MissingInput: As `open_checkpoint`.
    """
    target: Model = Seeded(GALLERY[0], 0) if model is None else open_checkpoint(model)
    parameters = Oracle().model(target, "float64").parameters
    network = transformers_model(target, "float64")
    tokens = tuple(position % target.vocab_size for position in range(context))
    rows = []
    for count in nodes:
        drawn = tree_of(count)
        tree = Tree(drawn.parent, tuple((7 * node + 1) % target.vocab_size for node in range(count)))
        inputs = _inputs(tokens, tree)
        oracle_times = list[float]()
        transformers_times = list[float]()
        apart = 0.0
        for _ in range(rounds + 1):  # the first round warms both up
            began = time.perf_counter()
            exact = SharedPrefix(parameters).nodes(tokens, tree).logits
            between = time.perf_counter()
            logits = _forward(network, inputs, count)
            oracle_times.append(between - began)
            transformers_times.append(time.perf_counter() - between)
            apart = max(apart, float(np.abs(exact - logits).max()))
        oracle_ms, transformers_ms = 1000 * median(oracle_times[1:]), 1000 * median(transformers_times[1:])
        rows.append(
            {
                "nodes": count,
                "oracle_ms": oracle_ms,
                "transformers_ms": transformers_ms,
                "ratio": oracle_ms / transformers_ms,
                "apart": apart,
            }
        )
    name = model or f"built-in {GALLERY[0].family}"
    is_same = all(row["apart"] <= APART for row in rows)
    return {"model": name, "context": context, "threads": torch.get_num_threads(), "trees": rows, "same": is_same}


def _inputs(tokens: tuple[int, ...], tree: Tree) -> dict[str, Any]:
    """Context and tree as one forward of transformers: ids, positions, and the mask that is added, float64."""
    above, rows = len(tokens), len(tokens) + len(tree)
    sees = torch.zeros(rows, rows, dtype=torch.bool)
    sees[:above, :above] = torch.ones(above, above).tril().bool()
    sees[above:, :above] = True
    for node, parent in enumerate(tree.parent):
        if node:
            sees[above + node] = sees[above + parent]
        sees[above + node, above + node] = True
    mask = torch.zeros(1, 1, rows, rows, dtype=torch.float64).masked_fill(~sees, torch.finfo(torch.float64).min)
    positions = [*range(above), *(above + depth for depth in tree.depth)]
    return {
        "input_ids": torch.tensor([[*tokens, *tree.token]]),
        "position_ids": torch.tensor([positions]),
        "attention_mask": mask,
        "use_cache": False,
    }


def _forward(network: Any, inputs: dict[str, Any], count: int) -> Array:
    with torch.no_grad():
        logits: Array = network(**inputs, logits_to_keep=count).logits[0].numpy()
    return logits
