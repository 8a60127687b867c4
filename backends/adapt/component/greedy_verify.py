"""Greedy verify kernels: functions from a tree and logits to an accepted path.

The answer is the accepted rows and one more token.
"""

from dataclasses import replace

from torch import Tensor

from specverify.backends.adapt.component.contract import Component, Contract
from specverify.backends.engine.lower_tree import TreeTensors
from specverify.backends.engine.seams import Seams
from specverify.reference.trace import Stage

VERIFY = Contract(
    kind="verify",
    stage=Stage.ACCEPTED,
    offers={
        "tokens": "int64 [nodes]: the token of each node",
        "parent": "int64 [nodes]: the row of each node's parent; the root is row 0 and its own parent",
        "next_token": "int64 [nodes]: the first child of each node, 0 for none",
        "next_sibling": "int64 [nodes]: the next sibling of each node in row order, 0 for none",
        "logits": "float [nodes, vocabulary]: the target's logits after each node",
        "best": "int64 [nodes]: the target's best token after each node, the lowest id of equals",
    },
    needs=(("tokens",), ("parent", "next_token", "logits", "best"), ("logits", "best")),
    returns="the accepted rows from the root (0) downwards, and the token after the last of them",
    judged_by=("acceptance.greedy-walk", "acceptance.support", "acceptance.*"),
)


class GreedyVerify:
    """A greedy verify kernel in our engine."""

    def __init__(self, component: Component) -> None:
        self._component = component

    def plant_into(self, seams: Seams) -> Seams:
        """The engine with this kernel."""

        def walk(tensors: TreeTensors, logits: Tensor) -> tuple[list[int], int]:
            nodes = len(logits)
            answer = self._component(
                tokens=tensors.token[:nodes],
                parent=tensors.parent[:nodes],
                next_token=tensors.next_token[:nodes],
                next_sibling=tensors.next_sibling[:nodes],
                logits=logits.clone(),
                best=logits.argmax(-1),
            )
            return self._component.walk(answer, nodes, logits.shape[-1])

        return replace(seams, walk=walk)
