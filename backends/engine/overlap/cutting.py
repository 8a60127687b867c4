"""The commit of a launched step as the host keeps it.

The device keeps the whole accepted path; a stop may cut it.
"""

from dataclasses import replace

from reference.trace import Committed, Kv, frozen


def cut_to(committed: Committed, length: int) -> Committed:
    """`committed` with the first `length` columns; recurrent states, and caches that let columns go, are not shown."""
    if committed.length <= length:
        return committed
    after, draft = _shorter(committed.after, length), _shorter(committed.draft, length)
    return replace(committed, length=length, after=after, draft=draft, recurrent=None)


def _shorter(held: Kv | None, length: int) -> Kv | None:
    if held is None or held.length <= length:
        return held
    # A layer with a window has let go of columns that it would still hold at this length.
    if held.first or not length:
        return None
    return Kv(frozen(held.keys[:, :, :length]), frozen(held.values[:, :, :length]))
