"""The kinds of tree that may be sampled losslessly, each with its proposal law."""

from dataclasses import dataclass

from specverify.reference.rules import DRAWS


@dataclass(frozen=True)
class TreeLaw:
    """The facts that a rule is told of the tokens of one kind of tree.

    Attributes:
        name: The kind of tree.
        draws: The ways to name siblings (DRAWS) for which there is a proposal law; a case refuses others.
        proposal: The law that a rule is told for each node, and why no rule is misled by it.
    """

    name: str
    draws: tuple[str, ...]
    proposal: str


TREE_LAWS = (
    TreeLaw(
        "static",
        DRAWS,
        "A best token counts as surely proposed. A drawn token has the draft's law at its parent; without replacement, "
        "that law without the siblings before it.",
    ),
    TreeLaw(
        "product",
        DRAWS,
        "Medusa's law depends on the depth of a node alone; the children of each node are drawn from it by coins of "
        "their own, so that the proposal laws are those of a static tree.",
    ),
    TreeLaw(
        "batch size",
        DRAWS,
        "The table gives a static tree by the number of requests that step together, before the first coin of the step "
        "is read: given all earlier tokens, each step is one of a static tree.",
    ),
    TreeLaw(
        "dynamic",
        ("top-k",),
        "Nodes and shape follow from the draft's scores alone, and each token counts as surely proposed. Drawn tokens "
        "that are kept by their scores follow no law that a rule could correct.",
    ),
)
"""Every kind of tree. `tests/meta/laws/test_kinds_of_tree.py` enumerates the law of each."""
