"""Masks are dense or compact by a budget of bytes, on every backend whose attention reads words; the others say so."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specverify.backends.compositions import READ_WORDS
from specverify.backends.engine.attention.compact import Compact
from specverify.backends.engine.attention.flex import Flex, MaskMod, word_mask
from specverify.backends.engine.backend import EngineBackend
from specverify.backends.flags import DENSE_MASK_BYTES
from specverify.backends.registry import open_backend
from specverify.backends.shipped import ROWS
from specverify.properties.invariants import ALL
from specverify.properties.strategies.models import GALLERY
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.layout import KINDS, KvLayout
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Trace
from specverify.reference.tree import Tree
from specverify.setup.subjects import subject_of

SHOWING = tuple(invariant for invariant in ALL if invariant.name == "attention.context-exact")

WINDOWED = Seeded(next(architecture for architecture in GALLERY if any(architecture.windows)), 0)
FORK = Tree((0, 0, 3, 0, 1), (6, 1, 2, 3, 1))
READERS = [
    row.name for row in ROWS if row.composition in READ_WORDS and row.device == "cpu" and "compiled" not in row.name
]


def windowed_case(kind: str) -> Case:
    """A batch of two requests of unequal lengths and trees, so that one of them has padding rows."""
    layout = KvLayout(kind=kind, padded_nodes=7, page_size=2 if KINDS[kind].pages else 0)
    mate = Mate((5, 1), Scripted((Tree((0, 0), (1, 4)),)))
    steps = (Action("add", (0,)), Action("add", (1,)), Action("step", (0, 1)), Action("step", (0, 1)))
    return Case(
        WINDOWED, (3, 1, 2, 2, 1, 2, 6), Scripted((FORK,)), layout, stops=Stops(6), session=Session((mate,), steps)
    )


def same_bits(first: Trace, second: Trace) -> None:
    assert first.output == second.output
    for step, other_step in zip(first.steps, second.steps, strict=True):
        assert step.scored is not None
        assert other_step.scored is not None
        assert step.scored.logits.tobytes() == other_step.scored.logits.tobytes()


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in READERS for kind in (("paged",) if "triton" in name else ("branch", "paged", "sliding"))],
)
def test_a_mask_beyond_the_budget_is_compact(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.startswith("triton"):
        pytest.importorskip("triton")
    case = replace(windowed_case(kind), dtype="float32")
    dense = open_backend(name).run(case)
    monkeypatch.setenv(DENSE_MASK_BYTES, "0")
    compact = open_backend(name).run(case)
    assert {*compact.fallbacks} == {*dense.fallbacks}, "no dense mask is made for a tree"
    same_bits(dense, compact)
    monkeypatch.setenv(DENSE_MASK_BYTES, "100000")
    within = open_backend(name).run(case)
    assert "a dense mask: its bytes are within the budget of 100000" in within.fallbacks
    same_bits(dense, within)


@pytest.mark.parametrize("name", ["cpu-eager", "cpu-fused", "cpu-measured", "ascend-fused-emulated"])
def test_an_attention_of_dense_masks_says_where_they_are_beyond_the_budget(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(windowed_case("paged"), dtype="float32")
    plain = open_backend(name).run(case)
    monkeypatch.setenv(DENSE_MASK_BYTES, "30")
    watched = open_backend(name).run(case)
    reasons = {reason for reason in watched.fallbacks if "beyond the budget of 30 bytes" in reason}
    assert len(reasons) == 1
    same_bits(plain, watched)
    monkeypatch.setenv(DENSE_MASK_BYTES, "100000")
    assert open_backend(name).run(case).fallbacks == plain.fallbacks


def without_the_window(packed: Compact) -> MaskMod:
    """The mask function in which a row sees the whole prefix, whatever its window."""
    return word_mask(replace(packed, first=torch.zeros_like(packed.first)))


def of_the_first_lane(packed: Compact) -> MaskMod:
    """The mask function in which every lane has the words of lane 0."""
    sees = word_mask(packed)

    def sees_first(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(torch.zeros_like(batch), head, query, key)

    return sees_first


@pytest.mark.parametrize("wrong", [None, without_the_window, of_the_first_lane])
def test_wrong_words_are_red(wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DENSE_MASK_BYTES, "0")
    backend = open_backend("cpu-fused-flex")
    assert isinstance(backend, EngineBackend)
    if wrong is not None:
        backend.seams = replace(backend.seams, attend=Flex(sees_words=wrong))  # type: ignore[arg-type]
    subject = subject_of(backend)
    names = {finding.invariant for finding in judge(windowed_case("branch"), SHOWING, Oracle(), subject).findings}
    assert ("attention.context-exact" in names) == (wrong is not None), names
