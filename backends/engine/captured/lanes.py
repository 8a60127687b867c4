"""The lanes of a batched draft forward, and the cache of padded lanes."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specverify.backends.engine.columns import Attend
from specverify.backends.engine.kv.base import Codec, KvCache, Pair, Poison
from specverify.backends.engine.kv.lanes import BatchCache

Visible = list[Tensor]
"""For each layer or module, bool [R, C]: the columns that R rows see."""


@dataclass(frozen=True)
class LaneRows:
    """The rows of one level of one request's tree, before they are run.

    Attributes:
        tokens: int64 [R].
        positions: int64 [R].
        visible: The columns that the rows see; C = columns of the cache, these R rows included.
        cache: The draft's cache of the request.
        parents: For each row the open row above it, as `Rows.parents`.
        hidden_states: For a head, the states beside the tokens, [R, modules, hidden]; None for a causal model.
    """

    tokens: Tensor
    positions: Tensor
    visible: Visible
    cache: KvCache
    parents: list[int] | None = None
    hidden_states: Tensor | None = None


class LaneModel(Protocol):
    """A draft's model, which runs the levels of several requests in one forward.

    Attributes:
        fallbacks: How many layers of forwards took a slower path, by reason.
    """

    fallbacks: Counter[str]

    @property
    def attending(self) -> int:
        """Number of layers, or of modules, that call attention."""
        ...

    def run_lanes(self, lanes: list[LaneRows], attend: Attend, batch: type[BatchCache]) -> list[Tensor]:
        """Open the rows of each lane in its cache and run them; the outputs of each lane's rows, [R, ...]."""
        ...


class PaddingCache:
    """The cache of padded lanes: it has no columns, and forgets its rows after the forward that wrote them.

    Attributes:
        live: The caches of the requests of the same forward, in the order of their lanes.
        written: Number of rows that padded lanes wrote, over all layers.
    """

    def __init__(self, live: Callable[[], list[KvCache]]) -> None:
        self.length = 0
        self.most_rows = 0
        self.layers = 0
        self.live = live
        self.rows = 0
        self.latent = False
        self.codec: Codec | None = None
        self.written = 0
        self._open_pairs: dict[int, Pair] = {}

    def open(self, rows: int) -> None:
        """See `KvCache`; rows of an earlier forward are forgotten."""
        self.rows = rows
        self.latent = self.live()[0].latent  # all caches of a batch are of one layout
        self._open_pairs = {}

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See `KvCache`; nothing of it outlives the forward."""
        self.written += keys.shape[1]
        self._open_pairs[layer] = keys, values

    def read(self, layer: int) -> Pair:
        """See `KvCache`; the rows of this forward alone."""
        return self._open_pairs[layer]

    def first(self, layer: int) -> int:
        """See `KvCache`."""
        return 0

    def cell_mask(self, layer: int, visible: Tensor) -> Tensor:
        """See `KvCache`."""
        return visible

    def block(self, layer: int) -> Pair:
        """See `KvCache`; a padded lane commits nothing."""
        raise ValueError("the rows of a padded lane were read")

    def amend(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See `KvCache`; a padded lane commits nothing."""
        raise ValueError("the rows of a padded lane were amended")

    def commit(self, path: list[int]) -> str | None:
        """See `KvCache`; a padded lane commits nothing."""
        raise ValueError("the rows of a padded lane were committed")

    def crop(self, length: int) -> None:
        """See `KvCache`."""
        self._open_pairs = {}

    def begin_as(self, source: KvCache) -> None:
        """See `KvCache`; no request goes on from a padded lane."""
        raise ValueError("a padded lane was continued")

    def committed_columns(self, layer: int) -> tuple[int, Tensor, Tensor]:
        """See `KvCache`; no trace shows a padded lane."""
        raise ValueError("the columns of a padded lane were read")

    def poison(self, number: Poison) -> None:
        """See `KvCache`; there is no cell."""

    def release(self) -> None:
        """See `KvCache`."""
        self._open_pairs = {}

    def lane(self, rows: LaneRows) -> LaneRows:
        """`rows` over this cache: each row sees itself alone, since a softmax over no column would be NaN."""
        count = len(rows.tokens)
        diagonal = torch.eye(count, dtype=torch.bool)
        parents = None if rows.parents is None else [-1] * count
        return LaneRows(rows.tokens, rows.positions, [diagonal] * len(rows.visible), self, parents, rows.hidden_states)
