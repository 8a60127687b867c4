"""How near the rows of a model with experts lie to another choice of experts.

The choice jumps where two scores are equal: a row there may go through either expert, and its numbers with it.
"""

import numpy as np

from reference.oracle.evaluator import Evaluator
from reference.trace import Array
from reference.tree import Tree


def margins(evaluator: Evaluator, context: tuple[int, ...], tree: Tree) -> Array | None:
    """`Formulas.router_margins` of the tokens of `context` and then the nodes of `tree`: [layers, context + nodes].

    None for a family without experts.
    """
    above, parameters = len(context), evaluator.parameters
    if parameters.formulas.router_margins is None:
        return None
    # The context as a chain, with the tree below its last token: one run gives the states of every row.
    below = tuple(above + parent if node else max(0, above - 1) for node, parent in enumerate(tree.parent))
    whole = Tree((0, *range(above - 1), *below) if above else tree.parent, (*context, *tree.token))
    states, attended = evaluator.node_states((), whole), evaluator.nodes((), whole).attended
    found = []
    for layer in range(parameters.architecture.layers):
        mixed = attended[layer].swapaxes(0, 1).reshape(len(whole), -1)
        found.append(parameters.router_margins(layer, states[layer], mixed))
    return np.stack([one for one in found if one is not None])
