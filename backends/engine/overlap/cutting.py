"""The commit of a launched step as the host keeps it.

The device keeps the whole accepted path; a stop may cut it.
"""

from dataclasses import replace

from specverify.reference.trace import Committed, Kv, frozen


def cut_commit(committed: Committed, length: int) -> Committed:
    """`committed` with the first `length` columns; recurrent states, and caches that let columns go, are not shown."""
    if committed.length <= length:
        return committed
    cache_after = _cut_kv(committed.after, length)
    draft = _cut_kv(committed.draft, length)
    return replace(committed, length=length, after=cache_after, draft=draft, recurrent=None)


def _cut_kv(kv: Kv | None, length: int) -> Kv | None:
    if kv is None or kv.length <= length:
        return kv
    # A layer with a window has let go of columns that it would still hold at this length.
    if kv.first or not length:
        return None
    return Kv(frozen(kv.keys[:, :, :length]), frozen(kv.values[:, :, :length]))
