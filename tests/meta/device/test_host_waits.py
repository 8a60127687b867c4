"""How often the host waits for the device in a step, path by path: as torch tells it, and line by line.

An engine a step ahead of its host waits twice at most (Meta's and SGLang's overlapped engines). A step of ours waits
for the copies that its trace takes too, which are charged to `tracing.py` and left out of the table below. A path that
gets better lowers its row.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from specverify.bench.host_waits import HostWaits
from specverify.properties.strategies.draft.head import LAYERS
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Ngram
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.layout import KvLayout
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.tree import RankTree
from tests.models import LLAMA
from tests.pretended.backends import device_and_backends, open_pretended
from tests.pretended.ledger import SYNCS, Ledger
from tests.tiers import gated

SHAPE = RankTree((0, 0, 0, 1), (0, 1, 0, 0))
SAMPLED = Sampling(temperature=1.0, seed=3)
HEAD = Eagle1(SHAPE, HiddenStates(place="normed", shift=1), LAYERS[0], seed=1)

CASE = Case(LLAMA, (1, 2, 1, 2, 1), Ngram(SHAPE, 2), stops=Stops(max_new_tokens=12), dtype="float32")

PATHS = {
    "ngram": CASE,
    "model": replace(CASE, draft=LanguageModel(LLAMA, SHAPE)),
    "head": replace(CASE, draft=HEAD),
    "sampled": replace(CASE, sampling=SAMPLED),
    "sampled model": replace(CASE, draft=LanguageModel(LLAMA, SHAPE), sampling=SAMPLED),
}

WAITS = {
    ("cuda-eager", "branch", "ngram"): 2.2,
    ("cuda-eager", "static", "ngram"): 2.2,
    ("cuda-eager", "static", "model"): 4.2,
    ("cuda-eager", "static", "head"): 4.2,
    ("cuda-eager", "static", "sampled"): 3.2,
    ("cuda-eager", "static", "sampled model"): 5.2,
    ("cuda-fused-sdpa", "static", "ngram"): 2.2,
    ("cuda-fused-sdpa", "paged", "ngram"): 2.2,
    ("cuda-fused-graphs", "static", "ngram"): 2.2,
    ("cuda-fused-graphs", "static", "model"): 4.2,
    ("cuda-fused-graphs", "static", "head"): 4.2,
    ("cuda-fused-graphs", "static", "sampled"): 3.2,
    ("cuda-fused-words", "paged", "ngram"): 4.5,
    ("cuda-fused-words", "paged", "model"): 12.6,
    ("cuda-fused-words", "paged", "head"): 12.6,
    ("cuda-fused-words", "paged", "sampled"): 5.5,
}
"""Waits of a step at most, by backend, layout and path, the prefill's share among them.

All read the accepted rows and the log-probabilities: the two. A draft with scores reads the tokens of the children of
each node that has any, two here, and sampling the coins that it spent. The kernel that reads pages checks the block
table of each forward, and words the lowered tree, before anything may read out of bounds: a wait each.
"""

SLOW = ("cuda-fused-graphs", "cuda-fused-words")
"""Backends whose other paths are left to the slow tier."""

TRACE = "backends/engine/tracing.py"


@pytest.fixture(scope="module")
def device() -> Iterator[Ledger]:
    with device_and_backends() as ledger:
        yield ledger


@pytest.mark.parametrize(
    ("name", "layout", "path"),
    gated(list(WAITS), lambda number: list(WAITS)[number][0] not in SLOW or list(WAITS)[number][2] == "ngram"),
)
def test_a_step_waits_as_often_as_the_table_says(device: Ledger, name: str, layout: str, path: str) -> None:
    backend = open_pretended(name)
    case = replace(PATHS[path], layout=KvLayout(kind=layout, page_size=2 if layout == "paged" else 0))
    backend.run(case)  # compiles and records
    device.clear()
    with HostWaits("cuda") as waits:
        trace = backend.run(case)
    waiting = [kind for kind in SYNCS if kind != "synchronize"]
    assert waits.count == device.count(*waiting)
    lines = {line: count for line, count in device.lines(*waiting).items() if TRACE not in line}
    assert sum(lines.values()) <= WAITS[name, layout, path] * len(trace.steps), lines
    assert waits.count > sum(lines.values())
