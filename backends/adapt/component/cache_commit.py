"""Cache commits: functions that keep the accepted rows of a KV cache.

The function commits the target's cache after each verification, and the draft model's cache likewise.
"""

from dataclasses import replace

import torch

from specverify.backends.adapt.component.contract import Component, Contract
from specverify.backends.engine.kv.base import KvCache
from specverify.backends.engine.kv.branch import Branch
from specverify.backends.engine.seams import Seams
from specverify.reference.trace import Stage

COMMIT = Contract(
    kind="commit",
    stage=Stage.COMMITTED,
    offers={
        "keys": "float [layers, kv_heads, columns, head_dim]: the committed columns, then one for each row of the tree",
        "values": "float [layers, kv_heads, columns, head_dim]: likewise",
        "committed": "the number of committed columns",
        "path": "a list of the rows to keep, from the root (0) downwards",
    },
    needs=(("keys",), ("values",), ("committed",), ("path",)),
    returns="keys and values [layers, kv_heads, committed + len(path), head_dim]",
    judged_by=("cache.commit-equivalence", "cache.untouched-slots", "cache.*"),
)


class CacheCommit:
    """A cache commit in our engine, on the branch layout."""

    def __init__(self, component: Component) -> None:
        self._component = component

    def plant_into(self, seams: Seams) -> Seams:
        """The engine with this commit."""
        commit, roll_back = seams.commit, seams.roll_back
        return replace(
            seams,
            commit=lambda cache, path: commit(cache, self._gather_columns(cache, path)),
            roll_back=lambda cache, rows: roll_back(cache, self._gather_columns(cache, rows)),
        )

    def _gather_columns(self, cache: KvCache, path: list[int]) -> list[int]:
        """Replace the branch by the columns that the function returns; the rows to commit are then the first ones."""
        if not path or not cache.rows:
            return path
        assert isinstance(cache, Branch)  # the declaration has no other layout
        keys, values = (torch.stack([pair[side] for pair in cache.branch]) for side in (0, 1))
        layers, heads, _, width = keys.shape
        answer = self._component(keys=keys, values=values, committed=cache.length, path=list(path))
        if not isinstance(answer, (tuple, list)) or len(answer) != 2:
            raise self._component.wrong_answer(answer, "a pair: keys and values")
        columns = cache.length + len(path)
        axes = (("layers", layers), ("kv_heads", heads), ("committed + len(path)", columns), ("head_dim", width))
        cache_sides = [
            self._component.tensor(name, tensor, "float", axes).to(keys)
            for name, tensor in zip(("keys", "values"), answer, strict=True)
        ]
        cache.branch = [(cache_sides[0][layer], cache_sides[1][layer]) for layer in range(layers)]
        cache.rows = len(path)
        return list(range(len(path)))
