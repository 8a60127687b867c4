"""The ways of one draft: budgets of nodes and levels, chains, widths of weights, vocabularies."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from specverify.bench.contexts import check_window
from specverify.bench.turn import STORED, Way
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
    draft_name: str,
    draft: Draft | None,
    nodes: tuple[int, ...],
    depths: tuple[int, ...],
    chains: tuple[int, ...] = (),
) -> Iterator[tuple[Way, Draft]]:
    """The ways of the draft that `--draft given` names: with its own tree, or one for each budget and each depth.

    `chains` are ways beside those of budgets, or alone. A pair that no tree can have (more nodes than so few levels
    hold, or more levels than the draft has) is left out, and so is a chain that is longer than the draft can be.

    Raises:
        UnusableInput: The draft is scripted, or no pair and no chain has a tree.
    """
    name = short_name(draft_name)
    if draft is None:
        if draft_name != Ngram.TAG:
            raise UnusableInput(
                f"bench decode --draft {draft_name}: a scripted draft knows the text, so that no time means anything"
            )
        draft = Ngram(branches(NGRAM_DEPTH, NGRAM_DEPTH), LOOKUP_ORDER)
    if not nodes and not depths and not chains:
        yield Way(name, name), draft
        return
    shape = draft.shape if isinstance(draft.shape, Expansion) else None  # type: ignore[attr-defined]
    num_trees = 0
    for length in chains:
        with suppress(Malformed):
            chain = replace(draft, shape=branches(length))  # type: ignore[type-var]
            num_trees += 1
            yield Way(f"{name} chain {length}", name, length, length, chain=True), chain
    own_depths = (shape.depth if shape else NGRAM_DEPTH,)
    for depth in (depths or own_depths) if nodes or depths else ():
        for count in nodes or (shape.total - 1 if shape else depth,):
            with suppress(Malformed):
                tree = Expansion(TOP_K, depth, count + 1) if shape else _branch_tree(count, depth)
                shaped = replace(draft, shape=tree)  # type: ignore[type-var]
                num_trees += 1
                yield Way(f"{name} {count}x{depth}", name, count, depth), shaped
    if not num_trees:
        raise UnusableInput(f"bench decode --draft {draft_name}: no tree has such a number of nodes in such few levels")


def short_name(draft_name: str) -> str:
    """The argument of `--draft` as it stands in tables."""
    return draft_name if len(draft_name) < LONGEST_NAME else Path(draft_name).name


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
    budgets = [way for way in ways if way.nodes is not None and not way.chain and _is_plain(way)]
    for draft_name in dict.fromkeys(way.given for way in budgets):
        draft_ways = [way for way in budgets if way.given == draft_name]
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


def _is_plain(way: Way) -> bool:
    """Whether the draft runs as it is, so that ways with one budget are one way."""
    return way.window is None and way.vocabulary is None and not way.weights


def series(ways: list[Way], rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The figures of ways that differ in one property of the draft.

    Args:
        ways: The ways that were timed.
        rows: The figures of each way (`specverify.bench.decode_figures.row`), with its memory.

    Returns:
        chains: a row for each draft length; weights: for each kind of weights of a draft that had several;
        vocabularies: for each number of tokens that a draft can name, where several were asked for. A row has way, the
        property (length, weights, vocabulary; None for all tokens), tokens_per_call, accepted (mean per step),
        speed_up, each with its error, drafting_ms (a step's), draft_mb and draft_parameters.
    """
    row_of_way = {row["way"]: row for row in rows}
    chains = [way for way in ways if way.chain and way.name in row_of_way]
    weighted_names = {way.given for way in ways if way.weights}
    named_names = {way.given for way in ways if way.vocabulary is not None}
    weights = [way for way in ways if way.given in weighted_names and way.name in row_of_way]
    vocabularies = [way for way in ways if way.given in named_names and way.name in row_of_way]
    return {
        "chains": [{"length": way.depth} | _summary(row_of_way[way.name]) for way in chains],
        "weights": [{"weights": way.weights or STORED} | _summary(row_of_way[way.name]) for way in weights],
        "vocabularies": [{"vocabulary": way.vocabulary} | _summary(row_of_way[way.name]) for way in vocabularies],
    }


def _summary(row: dict[str, Any]) -> dict[str, Any]:
    accepted, drafting = row["accepted"], row["stage_ms"].get("draft")
    return {
        "way": row["way"],
        "tokens_per_call": row["tokens_per_call"],
        "tokens_per_call_error": row["tokens_per_call_error"],
        "accepted": None if accepted is None else accepted["mean"],
        "speed_up": row["speed_up"]["mean"],
        "speed_up_error": row["speed_up_error"],
        "drafting_ms": None if drafting is None else drafting["mean"],
        "draft_mb": row["memory"]["draft_mb"],
        "draft_parameters": row["memory"]["draft_parameters"],
    }


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
