"""Speeds that only a device gives: a head beside its target, and verify forwards by size."""

from functools import partial
from itertools import product
from typing import Any

from specverify.backends.compositions import open_engine
from specverify.bench.decode_figures import figures
from specverify.bench.decode_record import Measurements
from specverify.bench.decode_run import Run
from specverify.bench.growth import line_through
from specverify.bench.turn import TARGET, Way
from specverify.dispatch.measure import forward_seconds
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.layout import KvLayout
from specverify.reference.sampling import Stops
from specverify.reference.tree import RankTree

TIMED_MODEL = Seeded(Architecture("llama", 512, 256, 704, 4, 2, 64, (0,) * 4), 0)
"""A target of nearly as many weights as a seeded model may have: its attention is that of a real head, and its products
are so small that launches are most of a forward."""

HEAD = Eagle1(RankTree((0, 0, 0, 1, 1, 2, 3), (0, 0, 1, 0, 1, 0, 0)), HiddenStates(place="normed", shift=1),
              HeadLayer(4, 2, 64, 704), seed=1)  # fmt: skip
"""A head without training: nearly nothing that it drafts is accepted, so that its steps have the price of a head, and
`break_even` says how many accepted tokens pay for it."""

TIMED_BACKEND = {"cuda": "cuda-fused", "npu": "ascend-fused"}
"""The backend that is timed on each device."""

DTYPE = "bfloat16"
"""The dtype of timed models."""

PAGES = KvLayout(kind="paged", page_size=16)
"""The KV layout of timed models."""

TOKENS = 64
"""Tokens of a timed generation."""

REPEATS = 3
"""Timed generations of each way, after those that compile."""

STEPS = 3
"""Timed forwards of each size."""

TREES = {"nodes": (1, 8, 24, 64), "batch": (1, 4, 16), "prefix": (256,)}
"""Sizes of the grid of trees by batch."""

CONTEXTS = {"nodes": (24,), "batch": (1, 4, 16), "prefix": (256, 1024, 3072)}
"""Sizes of the grid of batches by context."""

FIGURES_OF_WAY = ("way", "tokens_per_s", "tpot_ms", "tokens_per_call", "break_even")
"""What the page tells of a way; see `specverify.bench.decode_figures.row`."""


def head_figures(device: str) -> tuple[bool, dict[str, Any]]:
    """Whether a text with the head is another than the target's; tokens per second of both, waits and memory."""
    name = TIMED_BACKEND[device]
    prompt = tuple(position % TIMED_MODEL.vocab_size for position in range(1, 129))
    base = Case(TIMED_MODEL, prompt, HEAD, PAGES, stops=Stops(TOKENS), dtype=DTYPE).plain_decode()
    way = Way(HEAD.TAG, HEAD.TAG)
    run = Run(open_engine(name), [base], {way.name: (way, HEAD)}, [TARGET, way.name])
    run.warm_up()
    turns = list(run.run_prompt(0, REPEATS))
    measured = Measurements(run.ways, [way.name], turns, run.agreements[0], run.facts, [way])
    result = figures(measured)
    waits = run.facts.get("waits_per_step", {})
    rows = [
        {name: row[name] for name in FIGURES_OF_WAY}
        | {"over_target": row["speed_up"]["mean"], "peak_mb": row["memory"]["peak_mb"], "waits": waits.get(row["way"])}
        for row in result["ways"]
    ]
    parted = not all(agreement.agrees for agreement in run.agreements[0])
    return parted, {"backend": name, "dtype": DTYPE, "rows": rows}


def grid_figures(device: str, sizes: dict[str, tuple[int, ...]], axis: str) -> tuple[bool, dict[str, Any]]:
    """Milliseconds of the verify forward at each size, and for each batch what one more along `axis` costs.

    Args:
        device: cuda or npu.
        sizes: Nodes of a tree, requests that step together, and tokens of a prompt.
        axis: `nodes` or `prefix`.
    """
    name = TIMED_BACKEND[device]
    time_forward = partial(forward_seconds, open_engine(name), TIMED_MODEL, steps=STEPS, dtype=DTYPE, layout=PAGES)
    rows: list[dict[str, Any]] = []
    for batch, nodes, prefix in product(sizes["batch"], sizes["nodes"], sizes["prefix"]):
        seconds = time_forward(batch=batch, nodes=nodes, prefix=prefix)
        rows.append({"batch": batch, "nodes": nodes, "prefix": prefix, "ms": round(1000 * seconds, 4)})
    lines = [
        {"batch": batch, "by": axis} | line_through({row[axis]: row["ms"] for row in rows if row["batch"] == batch})
        for batch in sizes["batch"]
    ]
    return False, {"backend": name, "dtype": DTYPE, "rows": rows, "lines": lines}
