"""Counts of drafted and accepted tokens, read from the forwards of a target.

This serves engines that call a target of transformers' classes and tell no counts themselves.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from backends.adapt.generated import Generated


@contextmanager
def rows_of_forwards(model: Any) -> Iterator[list[int]]:
    """The number of rows (tokens) of each forward of `model` inside the block, filled as the forwards come.

    Forwards with fewer layers than `model` has at the beginning are left out: in an early exit the target drafts so.
    """
    whole, rows = model.config.num_hidden_layers, []

    def note(network: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if network.config.num_hidden_layers == whole:
            tokens = named["input_ids"] if "input_ids" in named else given[0]
            rows.append(tokens.shape[1])

    noting = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield rows
    finally:
        noting.remove()


def counted(tokens: Any, rows: list[int], prompt: int) -> Generated:
    """The generated `tokens` of a chain engine, with counts from the `rows` of its forwards after `prompt` tokens.

    Each forward has a row for the last token so far, the first one a row for each token of the prompt; all other rows
    are of drafted tokens. Each forward chooses one token itself.
    """
    chosen = len(rows)
    return Generated(tokens, proposed=sum(rows) - prompt - (chosen - 1), accepted=len(tokens) - chosen)
