"""Budgets of drafted nodes and levels: the ways of one draft, and their grid."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from specverify.bench.contexts import check_window
from specverify.bench.turn import Way
from specverify.checkpoints.cases import LOOKUP_ORDER, branches
from specverify.checkpoints.given_draft import TOP_K
from specverify.reference.draft import Draft, Ngram
from specverify.reference.draft_trees import Expansion
from specverify.reference.malformed import Malformed
from specverify.reference.tree import RankTree
from specverify.setup.errors import UnusableInput

NGRAM_DEPTH = 4
"""Levels of an n-gram's tree where none is asked for."""

SWEPT_NODES, SWEPT_DEPTHS = (4, 8, 16, 32), (1, 2, 4, 8)
"""The budgets of a sweep where none are given."""

LONGEST_NAME = 24
"""Characters from which on the name of a draft is the last part of its path."""


def windows_of(way: Way, draft: Draft, windows: tuple[int, ...]) -> Iterator[tuple[Way, Draft]]:
    """The way as it is, and once for each window; a draft that cannot have one is refused.

    Raises:
        UnusableInput: As `check_window`.
    """
    yield way, draft
    for window in windows:
        check_window(way.given, draft)
        yield replace(way, name=f"{way.name} w{window}", window=window), draft


def ways_of(
    draft_name: str, draft: Draft | None, nodes: tuple[int, ...], depths: tuple[int, ...]
) -> Iterator[tuple[Way, Draft]]:
    """The ways of the draft that `--draft given` names: with its own tree, or one for each budget and each depth.

    A pair that no tree can have (more nodes than so few levels hold, or more levels than the draft has) is left out.

    Raises:
        UnusableInput: The draft is scripted, or no pair has a tree.
    """
    name = draft_name if len(draft_name) < LONGEST_NAME else Path(draft_name).name
    if draft is None:
        if draft_name != Ngram.TAG:
            raise UnusableInput(
                f"bench decode --draft {draft_name}: a scripted draft knows the text, so that no time means anything"
            )
        draft = Ngram(branches(NGRAM_DEPTH, NGRAM_DEPTH), LOOKUP_ORDER)
    if not nodes and not depths:
        yield Way(name, name), draft
        return
    shape = draft.shape if isinstance(draft.shape, Expansion) else None  # type: ignore[attr-defined]
    num_trees = 0
    for depth in depths or (shape.depth if shape else NGRAM_DEPTH,):
        for count in nodes or (shape.total - 1 if shape else depth,):
            with suppress(Malformed):
                tree = Expansion(TOP_K, depth, count + 1) if shape else _branch_tree(count, depth)
                shaped = replace(draft, shape=tree)  # type: ignore[type-var]
                num_trees += 1
                yield Way(f"{name} {count}x{depth}", name, count, depth), shaped
    if not num_trees:
        raise UnusableInput(f"bench decode --draft {draft_name}: no tree has such a number of nodes in such few levels")


def _branch_tree(nodes: int, depth: int) -> RankTree:
    """A static tree of branches from the root, each `depth` long, `nodes` together; a branch's rank is its number."""
    return branches(*(min(depth, nodes - num_placed) for num_placed in range(0, nodes, depth)))


def grids(ways: list[Way], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures of budgets, draft by draft.

    Args:
        ways: The ways that were timed.
        rows: The figures of each way (`specverify.bench.decode_figures.row`).

    Returns:
        For each draft that had several budgets: draft; nodes and depths (ascending); cells, each with nodes, depth,
        way, tokens_per_s, speed_up (mean over turns), accepted (mean per step) and break_even; best (the cell with the
        most tokens per second).
    """
    row_of_way = {row["way"]: row for row in rows}
    draft_grids: list[dict[str, Any]] = []
    for draft_name in dict.fromkeys(way.given for way in ways if way.nodes is not None and way.window is None):
        draft_ways = [way for way in ways if way.given == draft_name and way.nodes is not None and way.window is None]
        cells: list[dict[str, Any]] = [_cell(way, row_of_way[way.name]) for way in draft_ways]
        if len(cells) < 2:
            continue
        draft_grids.append(
            {
                "draft": draft_name,
                "nodes": sorted({cell["nodes"] for cell in cells}),
                "depths": sorted({cell["depth"] for cell in cells}),
                "cells": cells,
                "best": max(cells, key=lambda cell: float(cell["tokens_per_s"])),
            }
        )
    return draft_grids


def _cell(way: Way, row: dict[str, Any]) -> dict[str, Any]:
    accepted = row["accepted"]
    return {
        "nodes": way.nodes,
        "depth": way.depth,
        "way": way.name,
        "tokens_per_s": row["tokens_per_s"],
        "speed_up": row["speed_up"]["mean"],
        "accepted": None if accepted is None else accepted["mean"],
        "break_even": row["break_even"],
    }
