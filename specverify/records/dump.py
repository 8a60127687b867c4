"""The dump of a step that went wrong: its tree, drafted and lowered."""

from specverify.records.read import Fact
from specverify.reference.trace import Lowered, Step


def step_fact(step: Step) -> Fact:
    """The drafted tree, the lowered tree and the accepted path of a step; None where the step does not show them.

    Layers with one reach share a mask: `visible` holds each mask once. Arrays of more than
    `specverify.reports.writing.LARGEST_ARRAY` entries are described when they are written.
    """
    drafted, lowered, accepted = step.drafted, step.lowered, step.accepted
    return {
        "tree": None if drafted is None else {"parent": drafted.tree.parent, "token": drafted.tree.token},
        "lowered": None if lowered is None else _lowered_fact(lowered),
        "path": None if accepted is None else accepted.path,
    }


def _lowered_fact(lowered: Lowered) -> Fact:
    fact: Fact = {name: getattr(lowered, name) for name in lowered.array_names}
    if lowered.visible is not None:
        fact["visible"] = list({id(mask): mask for mask in lowered.visible}.values())
    return fact
