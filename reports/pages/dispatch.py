"""The page of `dispatch learn`: the tree of each batch size."""

from rich.table import Table

from specverify.reference.draft_trees import tree_description
from specverify.reference.tree import RankTree
from specverify.reports.format import clean, number, plural
from specverify.reports.layout80 import plain_text


def learned_page(draft: str, steps: int, rows: list[tuple[int, RankTree, float, float]]) -> str:
    """The learned table.

    Args:
        draft: The kind of draft whose nodes were counted.
        steps: The number of steps that offered a best child of the root.
        rows: For each batch size the tree, the expected tokens of a request's step, and the tokens per unit of time.
    """
    title = f"trees by batch size, from {plural(steps, 'step')} of the draft {clean(draft)}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("batch up to", justify="right", no_wrap=True)
    table.add_column("tree")
    table.add_column("tokens a step", justify="right", no_wrap=True)
    table.add_column("tokens per time", justify="right", no_wrap=True)
    for batch, tree, tokens, rate in rows:
        table.add_row(str(batch), tree_description(tree), number(tokens), number(rate))
    return plain_text(table).rstrip("\n")
