"""An installed engine: its package, imported when it is needed, and what it reads of a checkpoint."""

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from specverify.backends.base import Unavailable


def module_of(name: str) -> Any:
    """A module of an engine's package, imported.

    Raises:
        Unavailable: It cannot be imported; the message has the reason in one line.
    """
    try:
        return import_module(name)
    except Exception as why:  # a package of others may raise anything when it is imported
        raise Unavailable(f"{name} cannot be imported: {type(why).__name__}: {' '.join(str(why).split())}") from why


def positions_of(checkpoint: str, longest: int) -> int:
    """The positions that a checkpoint's config.json names, at most `longest`, which stands where it names none."""
    positions = json.loads((Path(checkpoint) / "config.json").read_text()).get("max_position_embeddings")
    return min(longest, int(positions or longest))


def positions_accepted(histogram: Sequence[int]) -> list[int]:
    """How many verifications accepted a token at each level, from those that accepted 0, 1, 2, ... tokens.

    >>> positions_accepted([4, 2, 0, 1])
    [3, 1, 1]
    """
    return [sum(histogram[level:]) for level in range(1, len(histogram))]
