"""Tree builders: functions from a drafted tree to its index arrays.

What the function returns takes the place of our engine's own arrays, and the trace shows no others. The arrays that it
does not return come from our engine, so that the step can go on.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specverify.backends.adapt.component.contract import Component, Contract
from specverify.backends.engine.lower_tree import TreeTensors
from specverify.backends.engine.reach import Reach
from specverify.backends.engine.seams import Seams
from specverify.reference.trace import Stage
from specverify.reference.tree import Tree

TREE_BUILDER = Contract(
    kind="tree_builder",
    stage=Stage.LOWERED,
    offers={
        "parent": "int64 [nodes]: the row of each node's parent; the root is row 0 and its own parent",
        "tokens": "int64 [nodes]: the token of each node",
        "committed": "the number of committed tokens, which is also the position of the root",
        "padded_nodes": "the least number of rows; a tree with fewer nodes is padded",
        "window": "the layer's sliding window in tokens, the row's own included, or 0; called once for each window",
        "chunk": "the length of the layer's attention chunks in tokens, or 0; likewise",
    },
    needs=(("parent",),),
    returns="a dict with any of: mask (bool [rows, committed + rows], or [rows, rows] for the rows alone), position,"
    " depth, slot, parent, next_token, next_sibling (int [rows], 0 for none), valid (bool [rows]), ancestor (int"
    " [rows, height + 1]), retrieve_index (int [nodes])",
    judged_by=("structure.*",),
)

FIELDS = {
    "mask": "bool", "position": "int", "depth": "int", "slot": "int", "parent": "int", "next_token": "int",
    "next_sibling": "int", "valid": "bool", "ancestor": "int", "retrieve_index": "int",
}  # fmt: skip
"""The arrays that a builder may return, each with its kind."""


def _name_list(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))


class TreeBuilder:
    """A tree builder in our engine.

    Attributes:
        shown_names: The names of the arrays that it has returned so far, as fields of
            `specverify.reference.trace.Lowered`.
    """

    def __init__(self, component: Component) -> None:
        self._component = component
        self.shown_names: frozenset[str] = frozenset()

    def plant_into(self, seams: Seams) -> Seams:
        """The engine with this builder."""
        lower = seams.lower_tree

        def lower_tree(
            tree: Tree, committed: int, position: int, reaches: list[Reach], padded_nodes: int
        ) -> TreeTensors:
            engine_tensors = lower(tree, committed, position, reaches, padded_nodes)
            return self._replace_arrays(engine_tensors, tree, committed, reaches, padded_nodes)

        return replace(seams, lower_tree=lower_tree)

    def _replace_arrays(
        self, engine_tensors: TreeTensors, tree: Tree, committed: int, reaches: list[Reach], padded_nodes: int
    ) -> TreeTensors:
        """The engine's arrays, replaced by the arrays that the function returns; a mask is asked for each reach."""
        arrays: dict[str, Any] = {}
        masks: dict[Reach, Tensor] = {}
        for reach in dict.fromkeys(reaches):
            answer = self._component(
                parent=torch.tensor(tree.parent), tokens=torch.tensor(tree.token), committed=committed,
                padded_nodes=padded_nodes, window=reach.window, chunk=reach.chunk,
            )  # fmt: skip
            arrays = self._admit_answer(answer, len(engine_tensors.parent), len(tree), committed)
            if "mask" in arrays:
                masks[reach] = arrays.pop("mask")
        if masks:
            arrays["visible"] = [masks[reach] for reach in reaches]
        return replace(engine_tensors, **arrays)

    def _admit_answer(self, answer: Any, rows: int, nodes: int, committed: int) -> dict[str, Tensor]:
        """The returned arrays as tensors of the right shapes."""
        component = self._component
        if not isinstance(answer, Mapping) or not answer or set(answer) - set(FIELDS):
            strange = f" of {', '.join(map(str, answer))}" if isinstance(answer, Mapping) else ""
            raise component.wrong_answer(
                answer, f"a dict with any of {', '.join(FIELDS)}{strange and f', not{strange}'}"
            )
        arrays: dict[str, Tensor] = {}
        for name, value in answer.items():
            length = ("nodes", nodes) if name == "retrieve_index" else ("rows", rows)
            axes = (length, ("columns", None)) if name in ("mask", "ancestor") else (length,)
            arrays[name] = component.tensor(name, value, FIELDS[name], axes)
        if "mask" in arrays:
            arrays["mask"] = self._full_mask(arrays["mask"], rows, committed)
        names = frozenset("visible" if name == "mask" else name for name in arrays)
        if self.shown_names and names != self.shown_names:
            raise component.failure(
                f"{component.name} returned {_name_list(names)}, and {_name_list(self.shown_names)} before"
            )
        self.shown_names = names
        return arrays

    def _full_mask(self, mask: Tensor, rows: int, committed: int) -> Tensor:
        """The mask with the committed columns, which every row sees, before a mask of the rows alone."""
        if mask.shape[1] == rows and committed:
            return torch.cat([torch.ones(rows, committed, dtype=torch.bool), mask], 1)
        if mask.shape[1] != committed + rows:
            name = self._component.name
            line = f"{name}: mask of {mask.shape[1]} columns, expected {committed} committed ones and {rows} rows"
            raise self._component.failure(line)
        return mask
