"""Figures that only a device gives: forwards, waits of the host, ways of attention."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specverify.backends.compositions import open_engine
from specverify.bench import attention
from specverify.bench.host_waits import HostWaits
from specverify.properties.strategies.models import GALLERY
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel
from specverify.reference.layout import KvLayout
from specverify.reference.sampling import Stops
from specverify.reference.tree import RankTree

TARGET = Seeded(GALLERY[7], 0)
"""A model so small that a forward is all launches: what graphs save is what its times show."""

TREE = RankTree((0, 0, 0, 1, 1, 2, 3), (0, 0, 1, 0, 1, 0, 0))
"""The tree of each step."""

TOKENS = 24
"""Tokens of the timed generation."""

TIMED = {
    "cuda": (("cuda-fused-sdpa", "static"), ("cuda-fused-graphs", "static"), ("cuda-fused-words", "paged")),
    "npu": (("ascend-eager", "paged"), ("ascend-fused", "paged")),
}
"""The backends that are timed, each in a layout."""

REPETITIONS = 3
"""Timed repetitions of each way of attention."""


def forward_figures(device: str) -> tuple[bool, dict[str, Any]]:
    """For each backend the steps, the milliseconds of forwards and the waits of the host in a step, and fallbacks.

    A generation runs twice, since the first one compiles and records. The texts of all backends are compared.
    """
    rows = []
    outputs = set()
    for name, layout in TIMED[device]:
        prompt = tuple(position % TARGET.vocab_size for position in range(1, 17))
        page = 16 if layout == "paged" else 0
        draft = LanguageModel(TARGET, TREE)
        case = Case(TARGET, prompt, draft, KvLayout(kind=layout, page_size=page), stops=Stops(TOKENS))
        backend = open_engine(name)
        backend.run(case)
        with HostWaits(device) as waits:
            trace = backend.run(case)
        outputs.add(trace.output)
        steps = len(trace.steps)
        rows.append(
            {
                "backend": name,
                "layout": layout,
                "steps": steps,
                "forward_ms": round(1000 * (trace.forward_s or 0.0) / steps, 4),
                "waits": None if waits.count is None else round(waits.count / steps, 2),
                "fallbacks": dict(trace.fallbacks),
            }
        )
    return len(outputs) > 1, {"rows": rows}


def attention_figures(device: str, dtype: str, folder: Path) -> tuple[bool, dict[str, Any]]:
    """The times of each way of attention in `dtype`; they are a table in `folder`, by which a backend may choose.

    Raises:
        MissingInput: The device, or a package that a way needs, is missing.
    """
    setting = replace(attention.SETTINGS[device], dtype=getattr(torch, dtype))
    figures = attention.measure(device, REPETITIONS, setting)
    file = folder / f"attention-{dtype}.json"
    attention.write(str(file), attention.table(device, [figures]))
    best: dict[str, float] = {}
    for row in figures["rows"]:
        if row["path"] != "read":
            best[row["path"]] = max(best.get(row["path"], 0.0), row["over_read"])
    return False, {"table": file.name, "most_over_read": best, "absent": figures["absent"]}
