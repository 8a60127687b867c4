"""Scenes for tests of attention: lanes of random trees over prefixes, gathered or in pages, and the exact softmax."""

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specverify.backends.engine.columns import AttentionInputs, Paging

UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

FACTOR = {torch.float64: 64.0, torch.float32: 64.0, torch.bfloat16: 1.5, torch.float16: 1.5}
"""Roundings that an attention may be off by, in units of the largest value: sums in the working precision, or in
float32 and then rounded once."""


def no_fallback(reason: str) -> None:
    raise AssertionError(reason)


@dataclass(frozen=True)
class Scene:
    """B lanes of T rows: `lanes` holds (prefix, nodes) of each, and `truth` is attention in float64, [B, H, T, D]."""

    query: Tensor
    columns: AttentionInputs
    scaling: float
    lanes: tuple[tuple[int, int], ...]

    @property
    def keys(self) -> tuple[Tensor, Tensor]:
        """Gathered keys and values [B, Hkv, C, D], whatever layout attention reads."""
        columns = self.columns
        if columns.paging is None:
            return columns.key, columns.value
        width, paging = columns.visible.shape[-1], columns.paging
        gathered = []
        for cells in (paging.key_cells, paging.value_cells):
            gathered_lanes = cells.new_zeros(len(self.lanes), cells.shape[2], width, cells.shape[3])
            for lane, length in enumerate(paging.lengths.tolist()):
                for column in range(length):
                    page = int(paging.table[lane, column // paging.size])
                    gathered_lanes[lane, :, column] = cells[page, column % paging.size]
            gathered.append(gathered_lanes)
        return gathered[0], gathered[1]

    @property
    def truth(self) -> Tensor:
        """Softmax over the visible columns alone, one row at a time; zeros where there is none."""
        keys, values = self.keys
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        groups = self.query.shape[1] // keys.shape[1]
        for lane, (_, nodes) in enumerate(self.lanes):
            for row in range(nodes):
                visible_columns = self.columns.visible[lane, 0, row].nonzero()[:, 0]
                if len(visible_columns):
                    key = keys[lane][:, visible_columns].double().repeat_interleave(groups, 0)
                    value = values[lane][:, visible_columns].double().repeat_interleave(groups, 0)
                    scores = torch.einsum("hd,hcd->hc", self.query[lane, :, row].double(), key) * self.scaling
                    if self.columns.sinks is not None:
                        scores = torch.cat([scores, self.columns.sinks.double()[:, None]], -1)
                    weights = scores.softmax(-1)[:, : len(visible_columns)]
                    out[lane, :, row] = torch.einsum("hc,hcd->hd", weights, value)
        return out

    def error(self, out: Tensor) -> float:
        """The largest distance of `out` to the truth over rows that are no padding, in units of what it may be."""
        assert out.shape == self.query.shape
        assert out.dtype == self.query.dtype
        distance = torch.cat([
            (out[lane, :, :nodes].double() - self.truth[lane, :, :nodes]).flatten()
            for lane, (_, nodes) in enumerate(self.lanes)
        ])  # fmt: skip
        assert bool(distance.isfinite().all())
        _, values = self.keys
        most = float(values.double().nan_to_num().abs().max())
        return float(distance.abs().max()) / (FACTOR[out.dtype] * UNIT[out.dtype] * max(most, 1e-30))


def ancestry(nodes: int, dice: random.Random) -> Tensor:
    """Bool [nodes, nodes]: each row of a random tree sees itself and its ancestors; rows are in no order of depth."""
    place = list(range(1, nodes))
    dice.shuffle(place)
    order, ancestors = [0, *place], torch.eye(nodes, dtype=torch.bool)
    for index in range(1, nodes):
        ancestors[order[index]] |= ancestors[order[dice.randrange(max(0, index - 4), index)]]
    return ancestors


def scene(
    lanes: tuple[tuple[int, int], ...] = ((10, 6),),
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 8,
    dtype: torch.dtype = torch.float32,
    page: int = 0,
    window: int = 0,
    seed: int = 0,
    poison: float = float("nan"),
) -> Scene:
    """A scene of random numbers; with `page` its columns lie in pages of that size, other cells being `poison`."""
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows = max(nodes for _, nodes in lanes)
    width = max(prefix + rows for prefix, _ in lanes)
    visible = torch.zeros(len(lanes), 1, rows, width, dtype=torch.bool)
    for lane, (prefix, nodes) in enumerate(lanes):
        visible[lane, 0, :nodes, max(0, prefix - window) if window else 0 : prefix] = True
        if window:  # a window begins later for deeper rows
            for row in range(nodes):
                visible[lane, 0, row, : max(0, prefix - window + row % 3)] = False
        visible[lane, 0, :nodes, prefix : prefix + nodes] = ancestry(nodes, dice)
        spare = torch.arange(rows - nodes)
        visible[lane, 0, nodes + spare, prefix + nodes + spare] = True
    query = torch.randn(len(lanes), heads, rows, dim, generator=generator).to(dtype)
    key, value = torch.randn(2, len(lanes), kv_heads, width, dim, generator=generator).to(dtype)
    prefixes = torch.tensor([prefix for prefix, _ in lanes], dtype=torch.int32)
    columns = AttentionInputs(key, value, visible, prefixes, None, no_fallback)
    if page:
        columns = replace(
            columns,
            key=key[:, :, -rows:],
            value=value[:, :, -rows:],
            paging=_page_columns(columns, lanes, page, poison, dice),
        )
    return Scene(query, columns, dim**-0.5, lanes)


def _page_columns(
    columns: AttentionInputs, lanes: tuple[tuple[int, int], ...], size: int, poison: float, dice: random.Random
) -> Paging:
    lengths = [prefix + nodes for prefix, nodes in lanes]
    most = -(-max(lengths) // size)
    pages = list(range(1, 1 + sum(-(-length // size) for length in lengths) + 2))
    dice.shuffle(pages)
    shape = (len(pages) + 1, size, columns.key.shape[1], columns.key.shape[3])
    cells = [torch.full(shape, poison, dtype=columns.key.dtype) for _ in range(2)]
    table = torch.zeros(len(lanes), most, dtype=torch.int32)
    for lane, length in enumerate(lengths):
        for block in range(-(-length // size)):
            table[lane, block] = page = pages.pop()
            span = slice(block * size, min((block + 1) * size, length))
            for pool, pair in zip(cells, (columns.key, columns.value), strict=True):
                pool[page, : span.stop - span.start] = pair[lane, :, span].transpose(0, 1)
    return Paging(cells[0], cells[1], table, torch.tensor(lengths, dtype=torch.int32))


def constant(drawn_scene: Scene) -> Scene:
    """The same scene with queries and keys of zero and a value of its own in every column: the mean of what is seen."""
    columns = drawn_scene.columns
    pools = (
        [columns.key, columns.value]
        if columns.paging is None
        else [columns.paging.key_cells, columns.paging.value_cells]
    )
    values = torch.arange(pools[1].numel(), dtype=torch.float64).reshape(pools[1].shape)
    values = (values % 251 - 125).to(pools[1].dtype)
    keys = torch.zeros_like(pools[0])
    if columns.paging is None:
        changed = replace(columns, key=keys, value=values)
    else:
        changed = replace(columns, paging=replace(columns.paging, key_cells=keys, value_cells=values))
    return replace(drawn_scene, query=torch.zeros_like(drawn_scene.query), columns=changed)


def hidden_changed(drawn_scene: Scene, row: int, by: float) -> Scene:
    """The same scene with `by` in every block column of lane 0 that `row` does not see."""
    prefix, nodes = drawn_scene.lanes[0]
    hidden = (~drawn_scene.columns.visible[0, 0, row, prefix : prefix + nodes]).nonzero()[:, 0].tolist()
    columns, paging = drawn_scene.columns, drawn_scene.columns.paging
    if paging is None:
        key, value = columns.key.clone(), columns.value.clone()
        for column in hidden:
            key[0, :, prefix + column] = value[0, :, prefix + column] = by
        return replace(drawn_scene, columns=replace(columns, key=key, value=value))
    key, value = paging.key_cells.clone(), paging.value_cells.clone()
    for column in hidden:
        page = int(paging.table[0, (prefix + column) // paging.size])
        key[page, (prefix + column) % paging.size] = value[page, (prefix + column) % paging.size] = by
    return replace(drawn_scene, columns=replace(columns, paging=replace(paging, key_cells=key, value_cells=value)))
