"""The compact form of an attention mask, and its structural checks.

The visibility of a row is the column at which the visible part of the prefix begins, and one bit for each column of
the block. Attention split at the prefix (`split.py`) and the Triton kernel read this form in place of the dense mask.
Where trees are lowered to words, the words of each request's rows become this form without a dense mask.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from specverify.backends.engine.columns import WORD, AttentionInputs, Paging, RowWords, signed
from specverify.backends.engine.uploads import upload

MOST_WIDTH = 16384
"""The largest number of columns in a block that is packed; a prefill is a block too."""


@dataclass(frozen=True)
class Compact:
    """The visibility of B lanes of T rows; a kernel that takes it reads no dense mask.

    Row t of lane b sees the prefix columns `first[b, t]` to `prefix[b]`. It sees column `prefix[b] + j`, of the block,
    if bit `j % 32` of word `j // 32` of `bits[b, t]` is set. All tensors are int32, contiguous and on one device. Their
    numbers are not negative, except for words with bit 31 set.

    Attributes:
        first: [B, T]; the lane's prefix length for a row that sees none of the prefix.
        prefix: [B]; the prefix length of each lane.
        widths: [B]; columns of each block, up to the last column that any row sees.
        bits: [B, T, W]; words beyond a lane's width are 0.
        lanes: (prefix length, width of the block, whether some row sees only part of the prefix) of each lane, on the
            host.
    """

    first: Tensor
    prefix: Tensor
    widths: Tensor
    bits: Tensor
    lanes: tuple[tuple[int, int, bool], ...]

    @property
    def longest(self) -> int:
        """Columns of the longest prefix."""
        return max(prefix for prefix, _, _ in self.lanes)

    @property
    def partly(self) -> bool:
        """Whether some row does not see all of its prefix."""
        return any(partly for _, _, partly in self.lanes)

    @property
    def widest(self) -> int:
        """Columns of the widest block."""
        return max(width for _, width, _ in self.lanes)

    def block(self, lane: int) -> Tensor:
        """Bool [T, width]: the block columns that the rows of `lane` see."""
        column = torch.arange(self.lanes[lane][1], device=self.bits.device)
        return (self.bits[lane].index_select(1, column // WORD) >> (column % WORD) & 1).bool()

    def prefix_rows(self, lane: int) -> Tensor:
        """Bool [T, prefix length]: the prefix columns that the rows of `lane` see."""
        column = torch.arange(self.lanes[lane][0], device=self.first.device)
        return column >= self.first[lane, :, None]


# torch raises a tensor's version with every write in place. Keys are compared by identity and held weakly, so that a
# mask of a later forward never meets an entry of a mask that is gone.
_packed_masks: MutableMapping[Tensor, tuple[tuple[int, int], list[int], Tensor | None, Compact]] = WeakIdKeyDictionary()
"""The packed form of each mask, with the inputs it was made from: versions of mask and lengths, prefixes, lengths."""

_stand_ins: MutableMapping[Tensor, Compact] = WeakIdKeyDictionary()
"""The compact form for which each stand-in stands."""

_checked_tables: MutableMapping[Tensor, tuple[Tensor, tuple[int, int], tuple[int, ...]]] = WeakIdKeyDictionary()
"""Block tables that passed the check, with the lengths, the versions of both, and the shape of the pool."""


def stand_in(packed: Compact, columns: int) -> Tensor:
    """A mask of one byte, bool [B, 1, T, columns] of stride 0, for which `compact` returns `packed`."""
    mask = torch.zeros((), dtype=torch.bool, device=packed.first.device)
    mask = mask.expand(packed.first.shape[0], 1, packed.first.shape[1], columns)
    _stand_ins[mask] = packed
    return mask


def words_of(visible: Tensor) -> Compact | None:
    """The compact form for which the mask `visible` stands in; None for a dense mask."""
    return _stand_ins.get(visible)


def compact(query: Tensor, columns: AttentionInputs) -> Compact:
    """Check `columns`, and pack their mask once for all layers that share it.

    Raises:
        ValueError: in one line, for shapes, dtypes or indices that a kernel would misread or read out of bounds.
    """
    check(query, columns)
    packed = _stand_ins.get(columns.visible)
    if packed is not None:
        return packed
    if columns.visible.numel() > 1 and not any(columns.visible.stride()):
        raise ValueError("the mask is a view of a stand-in, whose words belong to the whole mask")
    ends = None if columns.paging is None else columns.paging.lengths
    prefix = columns.prefix.tolist()
    entry = _packed_masks.get(columns.visible)
    version = columns.visible._version, 0 if ends is None else ends._version
    if entry is None or entry[:2] != (version, prefix) or entry[2] is not ends:
        entry = version, prefix, ends, pack(columns.visible, columns.prefix, ends)
        _packed_masks[columns.visible] = entry
    return entry[3]


def pack(visible: Tensor, prefix: Tensor, ends: Tensor | None = None) -> Compact:
    """The compact form of the mask `visible`, bool [B, 1, T, C], and of the prefix lengths `prefix`, int32 [B].

    If columns lie in pages, `ends` int32 [B] is the number of a lane's columns that do. A padding row of a batch has
    its own column in no page, and then sees nothing.

    Raises:
        ValueError: if a row does not see an unbroken run up to the end of the prefix, or a block is too wide.
    """
    mask = visible[:, 0]
    lengths = upload(prefix, visible.device)
    column = torch.arange(mask.shape[-1], device=mask.device)
    if ends is not None:
        if bool((ends < lengths).any()):
            raise ValueError(f"prefixes of {prefix.tolist()} columns in pages that hold {ends.tolist()}")
        mask = mask & (column < ends[:, None])[:, None]
    in_prefix = column < lengths[:, None]
    run = mask & in_prefix[:, None]
    # If the visible columns are one run up to the prefix's end, their number says where the run begins.
    first = lengths[:, None] - run.sum(-1)
    broken = (run != (in_prefix[:, None] & (column >= first[..., None]))).any(-1)
    last = torch.where(mask.any(1) & ~in_prefix, column + 1, 0).amax(-1)
    widths = (last - lengths).clamp(min=0)
    part = (first > 0).any(-1)
    # One transfer to the host for all facts of all lanes: each would wait for the device.
    facts = torch.stack([lengths.long(), widths.long(), part.long(), broken.any(-1).long()], 1).tolist()
    for lane, (_, width, _, is_broken) in enumerate(facts):
        if is_broken:
            row = int(broken[lane].nonzero()[0])
            raise ValueError(f"lane {lane}, row {row}: the prefix is not seen in one unbroken run up to its end")
        if width > MOST_WIDTH:
            raise ValueError(f"lane {lane}: a block of {width} columns, and at most {MOST_WIDTH} are packed")
    words = max(1, -(-max(width for _, width, _, _ in facts) // WORD))  # at least one, so that `bits` is never empty
    place = torch.arange(words * WORD, device=mask.device)
    source = lengths[:, None] + place
    in_block = place < widths[:, None]
    gathered = mask.gather(2, (source * in_block).long()[:, None].expand(-1, mask.shape[1], -1)) & in_block[:, None]
    powers = 2 ** torch.arange(WORD, device=mask.device)
    # Summed in int64, then made the int32 with the same 32 bits.
    numbers = (gathered.reshape(*gathered.shape[:2], words, WORD) * powers).sum(-1)
    return Compact(
        first.int().contiguous(),
        lengths.int().contiguous(),
        widths.int().contiguous(),
        signed(numbers).contiguous(),
        tuple((length, width, bool(partly)) for length, width, partly, _ in facts),
    )


def check(query: Tensor, columns: AttentionInputs) -> None:
    """Refuse shapes, dtypes and block tables that no attention path reads correctly.

    Raises:
        ValueError: naming the first error.
    """
    lanes, heads, rows, dim = query.shape
    visible = columns.visible
    prefix = columns.prefix
    key, value = columns.key, columns.value
    if columns.paging is not None:
        key, value = columns.paging.key_cells, columns.paging.value_cells
    kv_heads = key.shape[2 if columns.paging is not None else 1]
    if key.shape[:-1] != value.shape[:-1]:  # values may have another width
        raise ValueError(f"keys are {list(key.shape)}, values {list(value.shape)}")
    if key.shape[-1] != dim:
        raise ValueError(f"queries have {dim} numbers a head, keys {key.shape[-1]}")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} KV heads evenly")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"queries are {query.dtype}, keys {key.dtype}, values {value.dtype}")
    if visible.dtype != torch.bool or visible.shape[:3] != (lanes, 1, rows):
        raise ValueError(f"the mask is {visible.dtype} {list(visible.shape)}, not bool [{lanes}, 1, {rows}, columns]")
    if prefix.dtype != torch.int32 or prefix.shape != (lanes,):
        raise ValueError(f"prefix lengths are {prefix.dtype} {list(prefix.shape)}, not int32 [{lanes}]")
    if not all(0 <= length <= visible.shape[-1] for length in prefix.tolist()):
        raise ValueError(f"prefix lengths {prefix.tolist()} outside the mask's {visible.shape[-1]} columns")
    if columns.paging is None:
        if key.shape[0] != lanes or key.shape[2] != visible.shape[-1]:
            raise ValueError(f"keys are {list(key.shape)}, the mask has {lanes} lanes of {visible.shape[-1]} columns")
    else:
        paging = columns.paging
        versions = paging.table._version, paging.lengths._version
        facts = paging.lengths, versions, (*paging.key_cells.shape[:2], lanes)
        entry = _checked_tables.get(paging.table)
        # The table is the same in every layer, and reading it costs a transfer to the host: it is checked once.
        if entry is None or entry[0] is not facts[0] or entry[1:] != facts[1:]:
            _check_table(paging, lanes)
            _checked_tables[paging.table] = facts


def _check_table(paging: Paging, lanes: int) -> None:
    table = paging.table
    lengths = paging.lengths
    pages = paging.key_cells.shape[0]
    for name, tensor, dims in (("block table", table, 2), ("lengths", lengths, 1)):
        if tensor.dtype != torch.int32 or tensor.dim() != dims or tensor.shape[0] != lanes:
            raise ValueError(f"the {name} is {tensor.dtype} {list(tensor.shape)}, not int32 with {lanes} lanes")
        if not tensor.is_contiguous():
            raise ValueError(f"the {name} is not contiguous")
    outside = (table < 0) | (table >= pages)
    room = table.shape[1] * paging.size
    # One transfer to the host for both facts: each would wait for the device.
    has_outside, has_wrong_length = torch.stack([outside.any(), ((lengths < 0) | (lengths > room)).any()]).tolist()
    if has_outside:
        lane, place = outside.nonzero().tolist()[0]
        raise ValueError(f"lane {lane}, block {place}: page {int(table[lane, place])} is outside the pool of {pages}")
    if has_wrong_length:
        raise ValueError(f"lengths {lengths.tolist()} outside a block table with room for {room} columns")


@dataclass(frozen=True)
class Lane:
    """The rows of one request in a forward of T rows.

    Attributes:
        words: The columns that its rows see.
        dropped: Columns at the beginning of its prefix that the layer no longer holds.
        width: Columns of its cache in this layer, without the columns of rows that pad the batch.
        spare: Rows that pad the batch.
        alone: Whether a padding row has a column of its own behind the cache's, which it sees.
    """

    words: RowWords
    dropped: int
    width: int
    spare: int
    alone: bool

    @property
    def prefix(self) -> int:
        """Columns of the prefix that the layer holds."""
        return self.words.committed - self.dropped

    @property
    def block(self) -> int:
        """Columns of the block, up to the last one that a row sees."""
        if self.spare and self.alone:
            return self.width - self.prefix + self.spare
        return len(self.words.first)

    @property
    def partly(self) -> bool:
        """Whether some row does not see all of the prefix."""
        return self.prefix > 0 and (self.spare > 0 or self.words.padded or self.words.earliest > self.dropped)


def pack_lanes(lanes: list[Lane], device: torch.device) -> Compact:
    """The compact form of the masks of all lanes, with the numbers that `compact.pack` finds in dense masks."""
    rows = max(len(lane.words.first) + lane.spare for lane in lanes)
    words = max(1, *(-(-lane.block // WORD) for lane in lanes))
    first, bits = [], []
    for lane in lanes:
        num_rows = len(lane.words.first)
        begin = (lane.words.first - lane.dropped).clamp(min=0)
        first.append(torch.nn.functional.pad(begin, (0, rows - num_rows), value=lane.prefix))
        lane_bits = torch.nn.functional.pad(lane.words.bits, (0, words - lane.words.bits.shape[1], 0, rows - num_rows))
        if lane.spare and lane.alone:
            place = lane.width - lane.prefix + torch.arange(rows - num_rows, device=device)
            mark = torch.arange(words, device=device) == (place // WORD)[:, None]
            # A shift by 31 of an int32 is the word whose sign alone is set.
            lane_bits[num_rows:] = torch.where(
                mark, (torch.ones_like(place, dtype=torch.int32) << place % WORD)[:, None], 0
            )
        bits.append(lane_bits)
    facts = [[lane.prefix, lane.block] for lane in lanes]
    counts = torch.tensor(facts, dtype=torch.int32).to(device, non_blocking=True)
    return Compact(
        torch.stack(first).int().contiguous(),
        counts[:, 0].contiguous(),
        counts[:, 1].contiguous(),
        torch.stack(bits).int().contiguous(),
        tuple((lane.prefix, lane.block, lane.partly) for lane in lanes),
    )
