"""How often the host waits for the device in a step, path by path: as torch tells it, and line by line.

An engine a step ahead of its host waits twice at most (Meta's and SGLang's overlapped engines). A step of ours waits
for the copies that its trace takes too, which are charged to `tracing.py` and left out of the table below. A path that
gets better lowers its row.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from specverify.bench.host_waits import HostWaits
from specverify.reference.case import Case
from specverify.reference.draft import Ngram
from specverify.reference.layout import KvLayout
from specverify.reference.sampling import Stops
from specverify.reference.tree import RankTree
from tests.models import LLAMA
from tests.pretended.backends import device_and_backends, open_pretended
from tests.pretended.ledger import SYNCS, Ledger

CASE = Case(
    LLAMA,
    (1, 2, 1, 2, 1),
    Ngram(RankTree((0, 0, 0, 1), (0, 1, 0, 0)), 2),
    stops=Stops(max_new_tokens=12),
    dtype="float32",
)

WAITS = {
    ("cuda-eager", "branch"): 2.2,
    ("cuda-eager", "static"): 2.2,
    ("cuda-fused-sdpa", "static"): 2.2,
    ("cuda-fused-sdpa", "paged"): 2.2,
    ("cuda-fused-graphs", "static"): 2.2,
    ("cuda-fused-words", "paged"): 12.0,
}
"""Waits of a step at most, by backend and layout, the prefill's share among them: the accepted rows and the
log-probabilities, in a path without words."""

TRACE = "backends/engine/tracing.py"


@pytest.fixture(scope="module")
def device() -> Iterator[Ledger]:
    with device_and_backends() as ledger:
        yield ledger


@pytest.mark.parametrize(("name", "layout"), WAITS)
def test_a_step_waits_as_often_as_the_table_says(device: Ledger, name: str, layout: str) -> None:
    backend = open_pretended(name)
    case = replace(CASE, layout=KvLayout(kind=layout, page_size=2 if layout == "paged" else 0))
    backend.run(case)  # compiles and records
    device.clear()
    with HostWaits("cuda") as waits:
        trace = backend.run(case)
    waiting = [kind for kind in SYNCS if kind != "synchronize"]
    assert waits.count == device.count(*waiting)
    lines = {line: count for line, count in device.lines(*waiting).items() if TRACE not in line}
    assert sum(lines.values()) <= WAITS[name, layout] * len(trace.steps), lines
    assert waits.count > sum(lines.values())
