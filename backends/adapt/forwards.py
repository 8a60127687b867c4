"""Counts of drafted and accepted tokens, read from the forwards of a target.

This serves engines that call a target of transformers' classes and tell no counts themselves.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from specverify.backends.adapt.generated import Generated


@contextmanager
def rows_of_forwards(model: Any) -> Iterator[list[int]]:
    """The number of rows (tokens) of each forward of `model` inside the block, filled as the forwards come.

    Forwards with fewer layers than `model` has at the beginning are left out: in an early exit the target drafts so.
    """
    num_layers = model.config.num_hidden_layers
    rows: list[int] = []

    def note(network: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if network.config.num_hidden_layers == num_layers:
            tokens = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            rows.append(tokens.shape[1])

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield rows
    finally:
        hook.remove()


def generated_with_counts(tokens: Any, rows: list[int], prompt: int) -> Generated:
    """The generated `tokens` of a chain engine, with counts from the `rows` of its forwards after `prompt` tokens.

    Each forward has a row for the last token so far, the first one a row for each token of the prompt; all other rows
    are of drafted tokens. Each forward chooses one token itself.
    """
    num_chosen = len(rows)
    return Generated(tokens, proposed=sum(rows) - prompt - (num_chosen - 1), accepted=len(tokens) - num_chosen)
