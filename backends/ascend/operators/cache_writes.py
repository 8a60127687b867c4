"""Emulated Ascend operators that write to KV caches.

None of them checks an index on the device, so every bad index is undefined behaviour here.
"""

import torch
from torch import Tensor

from specverify.backends.ascend.operators.rules import NotEmulated, demand, demand_defined

INTEGER_DTYPES = (torch.int32, torch.int64)
"""The integer dtypes that indices may have."""


def _inside(slots: Tensor, room: int, family: str, rule: str = "slot-range") -> Tensor:
    """For each of `slots` whether it lies in 0..room-1.

    A slot outside is refused, or dropped while a probe asks for the kernel's behaviour.
    """
    inside = (slots >= 0) & (slots < room)
    demand_defined(bool(inside.all()), f"{family}.{rule}", f"{slots[~inside].tolist()[:4]} outside 0..{room - 1}")
    return inside


def scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Write `updates` in place to the entries of `input` that `indices` [..., depth] name."""
    deep = indices.dim() >= 2 and indices.dtype in INTEGER_DTYPES and indices.shape[-1] <= input.dim()
    demand(deep, "nd.indices", f"indices {indices.dtype} {list(indices.shape)} for an input {list(input.shape)}")
    supported_dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.int64, torch.int8)
    demand(
        updates.dtype == input.dtype and input.dtype in supported_dtypes,
        "nd.dtype",
        f"{updates.dtype} into {input.dtype}",
    )
    depth = indices.shape[-1]
    expected = (*indices.shape[:-1], *input.shape[depth:])
    demand(tuple(updates.shape) == expected, "nd.shape", f"updates {list(updates.shape)}, expected {list(expected)}")
    places = indices.reshape(-1, depth).long()
    sizes = torch.tensor(input.shape[:depth])
    inside = ((places >= 0) & (places < sizes)).all(-1)
    demand_defined(bool(inside.all()), "nd.range", f"{places[~inside].tolist()[:4]} outside {sizes.tolist()}")
    places = places[inside]
    # The order of writes is not defined, so a repeated place has no defined value.
    demand_defined(len(torch.unique(places, dim=0)) == len(places), "nd.duplicate", "one place is written twice")
    input.index_put_(tuple(places.T), updates.reshape(-1, *input.shape[depth:])[inside])
    return input


def scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """Write keys and values [tokens, heads, D] to the slots of plain caches [blocks, block size, heads, D]."""
    if any(argument is not None for argument in (compress_lens, compress_seq_offsets, seq_lens)):
        raise NotEmulated("compression in npu_scatter_pa_kv_cache")
    demand(cache_mode in (None, "Norm", "PA_NZ"), "pa.mode", f"cache_mode {cache_mode!r}")
    # PA_NZ is the operator's default and means NZ caches; a call with plain caches must name its mode.
    if cache_mode == "PA_NZ":
        nz = key_cache.dim() == 4 and key_cache.shape[-1] * key_cache.element_size() == 32
        demand(nz, "pa.mode", f"cache_mode 'PA_NZ', the default, with a cache {list(key_cache.shape)}: pass 'Norm'")
        raise NotEmulated("an NZ cache")
    every = (key, value, key_cache, value_cache, slot_mapping)
    demand(all(tensor.is_contiguous() for tensor in every), "pa.contiguous", "a tensor is not contiguous")
    shapes = f"key {list(key.shape)}, cache {list(key_cache.shape)}, slots {list(slot_mapping.shape)}"
    demand(_fits(key, value, key_cache, value_cache, slot_mapping), "pa.shape", shapes)
    demand(len({tensor.dtype for tensor in every[:4]}) == 1, "pa.dtype", "keys, values and caches differ in dtype")
    demand(slot_mapping.dtype in INTEGER_DTYPES, "pa.slot-dtype", f"slot_mapping is {slot_mapping.dtype}")
    inside = _inside(slot_mapping, key_cache.shape[0] * key_cache.shape[1], "pa")
    _write(key, value, key_cache, value_cache, slot_mapping, inside, "pa")


def scatter_update_(input: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    """Write `updates` in place to `input` along `axis`, beginning at `indices` [B].

    B is the first axis of `input` and of `updates`.
    """
    demand(
        indices.dtype in INTEGER_DTYPES and indices.dim() in (1, 2),
        "su.dtype",
        f"indices {indices.dtype}, {indices.dim()} axes",
    )
    demand(updates.dtype == input.dtype, "su.dtype", f"updates {updates.dtype} into {input.dtype}")
    along = axis % input.dim()
    alike = input.dim() == updates.dim() and 2 <= input.dim() <= 8
    alike = alike and all(
        input_size == update_size
        for number, (input_size, update_size) in enumerate(zip(input.shape, updates.shape, strict=True))
        if number != along
    )
    demand(alike, "su.rank", f"data {list(input.shape)} and updates {list(updates.shape)} along axis {axis}")
    if indices.dim() == 2 or along == 0:
        raise NotEmulated("scatter_update_ with indices of two axes, or along the first axis")
    wide = updates.shape[along]
    room = input.shape[along]
    # A single index holds for every request.
    for lane, first in enumerate(indices.tolist() * (input.shape[0] if len(indices) == 1 else 1)):
        demand_defined(0 <= first <= room - wide, "su.range", f"columns {first} to {first + wide} of {room}")
        if 0 <= first <= room - wide:
            input[lane].narrow(along - 1, first, wide).copy_(updates[lane])
    return input


def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor) -> None:
    """ATB's _npu_reshape_and_cache: writes plain caches as `scatter_pa_kv_cache` does, with slots of int32 only."""
    demand(slot_indices.dtype == torch.int32, "rc.slot-int32", f"slot should be int32, got {slot_indices.dtype}")
    shapes = f"key {list(key.shape)}, cache {list(key_cache.shape)}, slots {list(slot_indices.shape)}"
    demand(_fits(key, value, key_cache, value_cache, slot_indices), "rc.shape", shapes)
    dtypes = {tensor.dtype for tensor in (key, value, key_cache, value_cache)}
    message = "K&KCache/V&VCache's dtype must be same, of float16, bfloat16 and int8"
    demand(len(dtypes) == 1 and dtypes <= {torch.float16, torch.bfloat16, torch.int8}, "rc.dtype", message)
    is_kept = slot_indices >= 0
    demand_defined(
        bool(is_kept.all()), "rc.slot-negative", "a negative slot is skipped by the kernel, and no document says so"
    )
    inside = is_kept & _inside(slot_indices.clamp(min=0), key_cache.shape[0] * key_cache.shape[1], "rc")
    _write(key, value, key_cache, value_cache, slot_indices, inside, "rc")


def _fits(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> bool:
    """Whether keys, values, caches and slots have shapes that belong together."""
    pairs = ((key, key_cache), (value, value_cache))
    alike = all(new.dim() == 3 and cells.dim() == 4 and new.shape[1:] == cells.shape[2:] for new, cells in pairs)
    return alike and slots.dim() == 1 and len(slots) == len(key) == len(value)


def _write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, inside: Tensor, family: str
) -> None:
    """Write keys and values to the cells of the slots that `inside` marks."""
    target_slots = slots[inside].long()
    demand_defined(
        len(torch.unique(target_slots)) == len(target_slots), f"{family}.slot-duplicate", "one slot is written twice"
    )
    for new, cells in ((key, key_cache), (value, value_cache)):
        cells.view(-1, *cells.shape[2:])[target_slots] = new[inside]
