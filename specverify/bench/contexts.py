"""Prompts of given lengths, and windows of what a draft sees of its context."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specverify.backends.engine.backend import EngineBackend
from specverify.backends.engine.draft import HEADS
from specverify.backends.engine.model.causal_lm import Rows
from specverify.reference.case import Case
from specverify.reference.draft import Draft
from specverify.setup.errors import UnusableInput

Tokens = tuple[int, ...]


def lengthen(prompts: Sequence[Tokens], length: int) -> list[Tokens]:
    """Each prompt with exactly `length` tokens: the other prompts stand before it, and its own end stays its end."""
    lengthened_prompts = []
    for place in range(len(prompts)):
        tokens: Tokens = ()
        back = place
        while len(tokens) < length:
            tokens = prompts[back % len(prompts)] + tokens
            back -= 1
        lengthened_prompts.append(tokens[len(tokens) - length :])
    return lengthened_prompts


def check_window(name: str, draft: Draft) -> None:
    """Refuse a draft without a cache of its own: a window of its context would change nothing.

    Raises:
        UnusableInput: with the name of the draft.
    """
    if draft.model is None and draft.TAG not in HEADS:
        raise UnusableInput(
            f"bench decode --draft-window: {name} keeps no keys and values, of which it could see fewer"
        )


@contextmanager
def draft_window(backend: EngineBackend, case: Case, window: int | None) -> Iterator[None]:
    """Inside the `with`, each row of the draft of `case` sees the last `window` tokens alone; None changes nothing.

    Positions go on as they were, as in a draft with a sliding window. The draft's cache keeps what it no longer sees,
    so that this shows what a window costs in accepted tokens, and not what it saves.

    Raises:
        UnusableInput: The draft is the target, whose own forwards would be narrowed too.
    """
    if window is None:
        yield
        return
    if case.draft.model is None:
        head = backend.models.head(case, HEADS[case.draft.TAG])
        before = head.reaches
        head.reaches = [replace(reach, window=min(reach.window or window, window)) for reach in before]
        try:
            yield
        finally:
            head.reaches = before
        return
    # The layers of a causal model ask for the window of their config.json: its masks are narrowed instead.
    model = backend.models.open(case.draft.model, case.dtype)
    if model is backend.models.open(case.model, case.dtype):
        raise UnusableInput("bench decode --draft-window: the draft is the target itself, which must see everything")
    forward = model.forward

    def narrow_forward(batch: list[Rows], *arguments: Any, **named: Any) -> list[Tensor]:
        return forward([replace(rows, visible=_narrow(rows, window)) for rows in batch], *arguments, **named)

    vars(model)["forward"] = narrow_forward
    try:
        yield
    finally:
        del vars(model)["forward"]


def _narrow(rows: Rows, window: int) -> list[Tensor]:
    """The masks of `rows` without columns of tokens that lie `window` or more positions back.

    Columns of the tree that earlier forwards opened lie near, and stay.
    """
    narrow = []
    for mask in rows.visible:
        positions = torch.arange(mask.shape[1])
        positions[rows.cache.length :] = int(rows.positions.max())
        positions[mask.shape[1] - len(rows.tokens) :] = rows.positions
        narrow.append(mask & (positions > rows.positions[:, None] - window))
    return narrow
