"""The forwards of a model over one cache, counted by kind."""

from collections import Counter
from typing import Any


def calls_over(cache: Any) -> "Counter[str]":
    """The forwards over `cache` so far, by kind: prefill, decode, verify; an empty count is put there at first."""
    calls = getattr(cache, "calls_by_kind", None)
    if calls is None:
        calls = cache.calls_by_kind = Counter()
    assert isinstance(calls, Counter)
    return calls


def kind_of_forward(rows: int, is_watched: bool) -> str:
    """The kind of a forward of so many rows of one request.

    A watched one verifies a tree, of the root alone too. Another one appends tokens: several in a prefill, one in a
    decode, as the methods of an exported target are called (target_prefill, target_decode, target_verify).
    """
    if is_watched:
        return "verify"
    return "decode" if rows == 1 else "prefill"
