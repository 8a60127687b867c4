"""Attention that chooses its way in each layer by a table of measured times.

The way is the fastest of the measured scene that lies nearest to the batch, the prefix and the nodes of the call. A way
that does not take the inputs leaves them to the next fastest, and says so.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from specverify.backends.base import Unavailable, Unsupported, WrongFlag
from specverify.backends.engine.attention.gathered import eager_gathered, gather_columns
from specverify.backends.engine.attention.measured.table import (
    Scene,
    Shape,
    Sizes,
    Table,
    WrongTable,
    device_name,
    nearest,
    nearest_width_scene,
    read_table,
)
from specverify.backends.engine.attention.measured.ways import Way, ways_on
from specverify.backends.engine.columns import Attend, AttentionInputs
from specverify.backends.flags import ATTENTION_TABLE
from specverify.reference.trace import CHOSEN

DRAWN = Path(__file__).parent / "drawn.json"
"""The table of the models that cases draw: `bench attention --model drawn` on an AMD EPYC, with one thread."""

MEASURE = "`specverify bench attention --model DIR --dtype DTYPE --table FILE` measures them"
"""The advice of refusals."""


def shape_of(query: Tensor, columns: AttentionInputs) -> Shape:
    """The shape of a call, by which its scenes are found."""
    dtype = str(query.dtype).removeprefix("torch.")
    kv_heads = columns.key.shape[1] if columns.paging is None else columns.paging.key_cells.shape[2]
    return Shape(dtype, query.shape[1], kv_heads, query.shape[-1])


def sizes_of(query: Tensor, columns: AttentionInputs) -> Sizes:
    """The sizes of a call: its lanes, the longest prefix, and its rows; no device is asked for them."""
    return Sizes(query.shape[0], int(columns.prefix.max()), query.shape[2])


def columns_for(way: Way, columns: AttentionInputs) -> AttentionInputs:
    """The columns as `way` reads them: in their pages, or gathered."""
    return columns if way.in_pages else gather_columns(columns)


@dataclass(frozen=True)
class MeasuredAttention:
    """Attention by the fastest measured way, as an `Attend` with replaceable parts; see `columns.Attend`.

    The result is bit for bit what the chosen way gives alone. Each choice is announced behind CHOSEN.

    Attributes:
        table: The measured times.
        ways: The ways that this device has.
        strict: Whether a shape that was not measured is refused; otherwise written-out attention runs, and says so.
        shape: From query and columns to the shape.
        sizes: From query and columns to the sizes.
        nearest: From table, shape and sizes to the nearest scene.
        lacks: From way, query and columns to what the way does not take; see `Way.lacks`.
        columns_for: From way and columns to the columns that the way reads.
        eager: The attention that replaces this one in a mode without fused attention.
    """

    table: Table
    ways: tuple[Way, ...]
    strict: bool = True
    shape: Callable[[Tensor, AttentionInputs], Shape] = shape_of
    sizes: Callable[[Tensor, AttentionInputs], Sizes] = sizes_of
    nearest: Callable[[Table, Shape, Sizes], Scene | None] = nearest
    lacks: Callable[[Way, Tensor, AttentionInputs], str | None] = Way.lacks
    columns_for: Callable[[Way, AttentionInputs], AttentionInputs] = columns_for
    eager: Attend = eager_gathered

    def __call__(self, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        """Attention of `query` [B, H, T, D] over `columns`, [B, H, T, E] in the dtype of the query.

        Raises:
            Unsupported: if the shape was not measured, and the attention is strict.
        """
        shape = self.shape(query, columns)
        scene = self.nearest(self.table, shape, self.sizes(query, columns))
        if scene is None:
            if self.strict:
                raise Unsupported(f"the table of attention times has none for {shape}; {MEASURE}")
            columns.announce(f"no attention times for {shape}: written-out attention ran")
            return self.eager(query, columns, scaling)
        by_name = {way.name: way for way in self.ways}
        for way in (by_name[name] for name in scene.fastest_first):
            unsupported = self.lacks(way, query, columns)
            if unsupported is None:
                columns.announce(f"{CHOSEN}{way.name}")
                return way.attend(query, self.columns_for(way, columns), scaling)
            columns.announce(f"{way.name}, the fastest measured way, takes no {unsupported}: the next fastest ran")
        columns.announce("no measured way takes these inputs: written-out attention ran")
        return self.eager(query, columns, scaling)


def measured_attention(device: str, file: str | None) -> MeasuredAttention:
    """Attention on `device`, cpu or cuda, that chooses by the table in `file`; on a CPU, by DRAWN if it is None.

    Raises:
        Unavailable: if there is no table, and the shipped one is of another kind of device.
        WrongFlag: if the table cannot be read, or was measured on another device.
        ImportError: as in `ways_on`.
    """
    if file is None and device != "cpu":
        raise Unavailable(
            f"{ATTENTION_TABLE} is not set: on {device} attention is chosen by a table of this very device, "
            f"which `specverify bench attention --device {device} --table FILE` writes"
        )
    try:
        table = read_table(DRAWN if file is None else file)
    except WrongTable as error:
        raise WrongFlag(f"{ATTENTION_TABLE}={file}: {error}") from None
    this_device = device_name(device)
    # The shipped table serves to judge the choice, on whatever processor; a given one serves to be fast.
    if table.kind != device or (file is not None and table.device != this_device):
        raise WrongFlag(
            f"{ATTENTION_TABLE}={file}: measured on {table.kind}, {table.device}, and this is {device}, {this_device}; "
            f"`specverify bench attention --device {device} --table FILE` measures here"
        )
    ways = ways_on(device)
    unknown_ways = sorted({*table.ways} - {way.name for way in ways})
    if unknown_ways:
        raise WrongFlag(f"{ATTENTION_TABLE}={file}: {unknown_ways[0]} is no way of attention on {device}")
    # Probes with transparent weights have a head dimension for each number of columns, which no table can list.
    return MeasuredAttention(table, ways, nearest=nearest_width_scene if file is None else nearest)
