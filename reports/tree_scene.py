"""The scene of a finding: the tree, the accepted path and the node concerned.

All of it belongs to the step in which the finding lies.
"""

import operator
from dataclasses import dataclass
from typing import Any

from specverify.properties.verdict.finding import Finding, Verdict
from specverify.reference.case import Case
from specverify.reference.trace import Stage, Step
from specverify.reference.tree import Tree


@dataclass(frozen=True)
class Scene:
    """The surroundings of a finding in the trace; None for each part that the trace does not show.

    Attributes:
        tree: The step's proposed tree, as the backend reveals it or otherwise as the case scripts it.
        path: The nodes that the backend accepted.
        node: The node of the finding: the node or row that it names, or the node that wrote the slot it names.
        writer: The node whose forward wrote the slot that the finding names.
        context: The number of columns of the committed context, which stand before those of the tree.
        case: The request as a case of its own.
    """

    tree: Tree | None = None
    path: tuple[int, ...] | None = None
    node: int | None = None
    writer: int | None = None
    context: int | None = None
    case: Case | None = None

    @property
    def writer_rejected(self) -> bool:
        """Whether the slot was written by a node that was not accepted."""
        return self.writer is not None and self.path is not None and self.writer not in self.path


def scene_of(verdict: Verdict, finding: Finding) -> Scene:
    """The scene of `finding`."""
    case, steps = request_of(verdict, finding)
    step = steps[finding.step] if 0 <= finding.step < len(steps) else None
    tree = step.drafted.tree if step and step.drafted else _scripted_tree(case, finding.step, steps)
    if tree is None:
        return Scene(case=case)
    path = None
    if step and step.accepted:
        # The path is the backend's own, and may name nodes that the tree has not.
        path = tuple(node for node in step.accepted.path if 0 <= node < len(tree))
    writer = _writer(finding, step, len(tree))
    node = _named_index(finding.where, "node", len(tree))
    if node is None:
        node = _named_index(finding.where, "row", len(tree))
    return Scene(tree, path, writer if node is None else node, writer, len(step.context) if step else None, case)


def request_of(verdict: Verdict, finding: Finding) -> tuple[Case, tuple[Step, ...]]:
    """The request of the finding as a case of its own, and its steps; in a session another one than the case's own."""
    case, trace = verdict.case, verdict.trace
    steps = trace.steps if trace else ()
    number = finding.where.get("request")
    if case.session is None or not isinstance(number, int) or not 0 < number <= len(case.session.mates):
        return case.alone(), steps
    shared = trace.shared if trace else None
    if shared is None or number >= len(shared.requests):
        return case.alone(number), ()
    request = shared.requests[number]
    return case.alone(number), request.steps if request is not None else ()


def position_of(scene: Scene, column: object) -> int | None:
    """The position of a column of the mask: that of the context, or a node's by its depth; None where there is none."""
    if not isinstance(column, int) or scene.context is None or column < 0:
        return None
    if column < scene.context:
        return column
    node = column - scene.context
    if scene.tree is None or node >= len(scene.tree):
        return None
    return scene.context + scene.tree.depth[node]


def revealed_stages(verdict: Verdict) -> frozenset[Stage]:
    """The stages that the backend's trace shows in any step."""
    if verdict.revealed is not None:
        return verdict.revealed
    steps = verdict.trace.steps if verdict.trace else ()
    return frozenset(stage for stage in Stage for step in steps if getattr(step, stage.word) is not None)


def _scripted_tree(case: Case, index: int, steps: tuple[Step, ...]) -> Tree | None:
    """The scripted tree of step `index` under the token that is pending there, as far as the trace shows that token."""
    if case.draft.trees is None or index < 0:
        return None
    last_emitted = steps[index - 1].emitted if 0 < index <= len(steps) else None
    root = last_emitted.tokens[-1] if last_emitted and last_emitted.tokens else None
    if index == 0:
        root = case.prompt[-1]
    if index < len(case.draft.trees):
        tree = case.draft.trees[index]
        return tree if root is None else tree.with_root(root)
    # A step behind the last scripted tree has the bare root as its tree.
    return None if root is None else Tree((0,), (root,))


def _named_index(where: dict[str, Any], name: str, size: int) -> int | None:
    """The coordinate `name` as an index below `size`; None where it is absent or no such index."""
    try:
        index = operator.index(where[name])
    except (KeyError, TypeError):
        return None
    return index if 0 <= index < size else None


def _writer(finding: Finding, step: Step | None, size: int) -> int | None:
    """The one node whose row was written to the slot that the finding names; None where no single node was."""
    if step is None or step.lowered is None or finding.stage is not Stage.COMMITTED:
        return None
    # The lowered slots are those of the target's cache.
    if finding.where.get("cache", "target") != "target":
        return None
    slot = _named_index(finding.where, "slot", 1 << 31)
    if slot is None:
        slot = _named_index(finding.where, "position", 1 << 31)
    if slot is None:
        return None
    lowered = step.lowered
    if lowered.retrieve_index is None or lowered.slot is None:
        return None
    rows = [int(row) for row in lowered.retrieve_index]
    writers = [node for node, row in enumerate(rows) if 0 <= row < len(lowered.slot) and int(lowered.slot[row]) == slot]
    return writers[0] if len(writers) == 1 and writers[0] < size else None
