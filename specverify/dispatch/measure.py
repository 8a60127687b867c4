"""Times of verify forwards by batch size and number of nodes, on our engine."""

from statistics import median

from specverify.backends.base import Serving
from specverify.reference.architecture import Model
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.draft_trees import named_tree
from specverify.reference.layout import KvLayout
from specverify.reference.sampling import Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.tree import Tree


def tree_of(nodes: int) -> Tree:
    """A tree of `nodes` nodes, a part of the full tree of 8 levels and branching factor 4, with token 0 everywhere.

    The time of a forward depends on the number of rows and hardly on the shape.
    """
    return Tree(named_tree(f"D8-BF4-N{nodes}").parent, (0,) * nodes)


def forward_seconds(
    backend: Serving,
    model: Model,
    *,
    batch: int,
    nodes: int,
    prefix: int,
    steps: int,
    dtype: str,
    layout: KvLayout = KvLayout(),
) -> float:
    """The median time, in seconds, of the target's verify forward for `batch` requests with trees of `nodes` nodes.

    Args:
        backend: The engine; it tells the seconds of its forwards.
        model: The target.
        batch: The number of requests that step together.
        nodes: The nodes of each tree, the root included.
        prefix: Tokens of each prompt.
        steps: Steps that are timed, after one that is not.
        dtype: The working dtype.
        layout: The KV layout.
    """
    prompt = tuple(position % model.vocab_size for position in range(prefix))
    tree = tree_of(nodes)
    script = Scripted(tuple(tree.with_root(prompt[-1]) for _ in range(steps + 1)))
    stops = Stops((steps + 1) * (tree.height + 1))
    mates = tuple(Mate(prompt, script, stops=stops) for _ in range(batch - 1))
    live = backend.serve(Case(model, prompt, script, layout, stops=stops, dtype=dtype, session=Session(mates)))
    everyone = tuple(range(batch))
    for number in everyone:
        live.do(Action("add", (number,)))
    times = []
    for _ in range(steps + 1):
        before = live.trace.forward_s
        live.do(Action("step", everyone))
        times.append(live.trace.forward_s - before)
    # The first step may compile or allocate.
    return median(times[1:])
