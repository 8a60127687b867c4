"""Leaks in large trees, and behind 2048 columns in bfloat16, where a tolerance sees little and changed bits show much.

Each fault is judged on a whole case. `attention.no-leakage` finds a node that sees too much,
`attention.visibility-exact` one that sees too little; rule N (`attention.context-exact`) says what it can.
"""

from dataclasses import replace

import numpy as np
import pytest

from specverify.backends import faults
from specverify.properties.invariants.attention.visibility import MOST_CHANGES
from specverify.properties.strategies.models import GALLERY
from specverify.properties.verdict.finding import Finding
from specverify.properties.verdict.variants import leak_designs, probes
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.layout import KvLayout
from specverify.reference.sampling import Stops
from specverify.reference.trace import Stage
from specverify.reference.tree import Tree
from specverify.setup.subjects import open_planted, subject_of
from tests.corruption import BY_NAME, ORACLE

PREFIX = 2048
NODES = 40

TOO_MUCH = (
    "ancestor-words-read-as-first",
    "ancestor-bits-of-row-before",
    "ancestor-offset-wraps",
    "ancestor-bits-inverted",
    "earlier-tiles-unmasked",
    "tree-mask-dropped-when-split",
    "page-turned-one-cell-early",
    "ascend-rows-before-heads",
    "ascend-mask-inverted",
    "ascend-additive-mask-as-boolean",
    "ascend-sparse-mode-3",
    "ascend-mask-row-offset",
    "ascend-mask-without-prefix",
)

TOO_LITTLE = (
    "ancestor-sign-bit-lost",
    "window-start-of-last-row",
    "block-read-without-prefix",
    "ascend-sparse-mode-2",
    "ascend-lengths-short-of-tree",
)

PAGED = KvLayout(kind="paged", page_size=16)


def long_case(prefix: int, model: int, layout: KvLayout) -> Case:
    """One verify step of a bushy tree behind `prefix` columns, in bfloat16."""
    seeded = Seeded(replace(GALLERY[model], max_positions=prefix + 200), 0)
    rng = np.random.default_rng(prefix)
    prompt = tuple(int(token) for token in rng.integers(0, seeded.vocab_size, prefix + 1))
    parent = tuple(0 if node < 4 else node - 1 if node % 3 else node // 3 for node in range(NODES))
    tree = Tree(parent, (prompt[-1], *(int(token) for token in rng.integers(0, seeded.vocab_size, NODES - 1))))
    return Case(seeded, prompt, Scripted((tree,)), layout, stops=Stops(1), steps=1, dtype="bfloat16")


def first_found(name: str, invariant: str) -> Finding | None:
    """What `invariant` finds first where the fault is planted; with a window if the fault speaks of one."""
    fault = faults.fault_named(name)
    ascend = fault.on.startswith("ascend")
    case = long_case(PREFIX, 19 if "window" in name else 9 if ascend else 11, KvLayout() if ascend else PAGED)
    facts = BY_NAME[invariant].check(case, ORACLE, subject_of(open_planted(fault.on, name)))
    return next((fact for fact in facts if isinstance(fact, Finding)), None)


SEEN_BY = [
    *((name, "attention.no-leakage", ("bit-identical",)) for name in TOO_MUCH),
    *((name, "attention.visibility-exact", ("visible", "hidden")) for name in TOO_LITTLE),
]


def test_nodes_of_long_branches_are_changed_by_lot() -> None:
    seeded = Seeded(GALLERY[11], 0)
    parents = tuple(0 if node in (0, 1, NODES // 2) else node - 1 for node in range(NODES))
    tree = Tree(parents, tuple(number % seeded.vocab_size for number in range(NODES)))
    case = Case(seeded, (5, 0), Scripted((tree,)), stops=Stops(1), steps=1)
    assert len(leak_designs(tree)) > MOST_CHANGES
    right = subject_of(open_planted("cpu-eager", None))
    check = BY_NAME["attention.no-leakage"].check
    assert not [fact for fact in check(case, ORACLE, right) if isinstance(fact, Finding)]
    assert right.runs == MOST_CHANGES + 3  # the case, its first step twice, and a run for each change
    leaking = subject_of(open_planted("cpu-eager", "tree-masked-as-chain"))
    assert [fact for fact in check(case, ORACLE, leaking) if isinstance(fact, Finding)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "invariant", "sides"), SEEN_BY, ids=[name for name, _, _ in SEEN_BY])
def test_what_sees_too_much_leaks_and_what_sees_too_little_is_hidden(
    name: str, invariant: str, sides: tuple[str, ...]
) -> None:
    finding = first_found(name, invariant)
    assert finding is not None
    assert finding.stage is Stage.ATTENDED
    assert (finding.expected, finding.observed)[: len(sides)] == sides


@pytest.mark.slow
@pytest.mark.parametrize("on", sorted({faults.fault_named(name).on for name in (*TOO_MUCH, *TOO_LITTLE)}))
def test_without_a_fault_nothing_is_found(on: str) -> None:
    subject = subject_of(open_planted(on, None))
    case = long_case(PREFIX, 11, PAGED)
    for name in ("attention.no-leakage", "attention.visibility-exact", "attention.context-exact"):
        assert not [fact for fact in BY_NAME[name].check(case, ORACLE, subject) if isinstance(fact, Finding)]


def test_probes_reach_both_sides_of_the_first_and_the_last_edge_of_a_page() -> None:
    case = long_case(PREFIX + 2, 11, PAGED)
    probed = {column for _, columns in probes(case, 0) for column in columns}
    assert {15, 16, PREFIX - 1, PREFIX} <= probed < set(range(PREFIX + 2 + NODES))
