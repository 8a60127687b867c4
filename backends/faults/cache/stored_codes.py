"""Faults of caches that store keys and values in eight bits.

A scale is left out, is another one's, or stays behind where its codes go; a number beyond the largest code has none.
"""

from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.engine.handover.mailbox import HandOver
from specverify.backends.engine.handover.packet import ExpectedRequest
from specverify.backends.engine.handover.state import RequestState
from specverify.backends.engine.kv.base import Pair, pick_columns
from specverify.backends.engine.kv.codec import KvCodec
from specverify.backends.engine.kv.paged import Cells, Paged, Pool
from specverify.backends.engine.kv.prefix import SecondTier
from specverify.backends.faults.fault import attended_fault, committed_fault, in_place_of


@attended_fault(
    "stored-without-scales",
    "SGLang issue #18818: k_scale and v_scale of the checkpoint are None where rows are written",
    "columns in eight bits; scales of the case",
)
@in_place_of("kv.codec")
class WrittenUnscaled(KvCodec):
    """Keys and values are written as they are, and read times their scales."""

    def encode_side(self, layer: int, side: int, numbers: Tensor) -> Tensor:
        if not self.rounding.is_static:
            return super().encode_side(layer, side, numbers)
        return self.codes_of(numbers.to(self.scale_dtype))


@attended_fault(
    "stored-read-without-scales",
    "tokenspeed PR #759 (review): attention runs on the stored codes, and neither scale is applied",
    "columns in eight bits; scales of the case",
)
@in_place_of("kv.codec")
class ReadUnscaled(KvCodec):
    """Attention reads the codes themselves, without their scales."""

    def decode_side(self, layer: int, side: int, cells: Tensor) -> Tensor:
        numbers = super().decode_side(layer, side, cells)
        return numbers / self.static_scales(layer, side, len(cells)) if self.rounding.is_static else numbers


@attended_fault(
    "stored-scales-of-one",
    "SGLang issue #39942: the scales of a checkpoint are dropped, and every layer falls back to 1.0",
    "columns in eight bits; scales of the case other than powers of two, or numbers that they cut off",
)
@in_place_of("kv.codec")
class ScalesOfOne(KvCodec):
    """Rows are written and read by a scale of 1: they lie near the right numbers, in other codes."""

    def static_scales(self, layer: int, side: int, kv_heads: int) -> Tensor:
        return torch.ones_like(super().static_scales(layer, side, kv_heads))


@attended_fault(
    "stored-values-by-scale-of-keys",
    "SGLang PR #26852 (review): v_descale falls back to the scale of the keys",
    "columns in eight bits; scales of the case",
)
@in_place_of("kv.codec")
class ValuesByKeys(KvCodec):
    """Values are read by the scale of the keys."""

    def decode_side(self, layer: int, side: int, cells: Tensor) -> Tensor:
        numbers = super().decode_side(layer, side, cells)
        if not side or not self.rounding.is_static:
            return numbers
        own_scales, scales_of_keys = (self.static_scales(layer, kind, len(cells)) for kind in (1, 0))
        return (numbers / own_scales * scales_of_keys).to(numbers.dtype)


@attended_fault(
    "stored-scale-of-first-head",
    "sgl-kernel-xpu PR #252 (review): one number is read where every KV head has a scale",
    "columns in eight bits; a scale for each of several KV heads",
)
@in_place_of("kv.codec")
class ScaleOfFirstHead(KvCodec):
    """The columns of all KV heads are read by the scale of the first."""

    def decode_side(self, layer: int, side: int, cells: Tensor) -> Tensor:
        numbers = super().decode_side(layer, side, cells)
        if not self.rounding.is_static:
            return numbers
        scales = self.static_scales(layer, side, len(cells))
        return (numbers / scales * scales[:1]).to(numbers.dtype)


@attended_fault(
    "stored-beyond-largest",
    "OpenVINO PR #36751: a cast to f8e4m3 overflows to NaN and does not saturate, so that it needs a clamp before",
    "columns in eight bits; a number beyond the largest code",
)
@in_place_of("kv.codec")
class Unsaturated(KvCodec):
    """A number beyond the largest code becomes NaN in fp8, and wraps round in int8."""

    def saturated(self, scaled: Tensor) -> Tensor:
        if self.rounding.dtype == "int8":
            return (scaled.round() + 128) % 256 - 128
        return scaled.masked_fill(scaled.abs() > self.rounding.largest, torch.nan)


def scales_replaced(codec: KvCodec, layer: int, cells: Pair, others: Pair) -> Pair:
    """`cells` of `layer` with the scales of `others`, which stand behind the codes."""
    widths = codec.room.sizes(layer)[1]
    keys, values = (
        torch.cat([of_side[..., :width], of_others[..., width:]], -1)
        for of_side, of_others, width in zip(cells, others, widths, strict=True)
    )
    return keys, values


@committed_fault(
    "stored-scales-not-moved",
    "SGLang PR #15108 (review): the native move of accepted rows moves the codes and not the buffers of scales",
    "columns in eight bits; scales that follow from rows; pages; an accepted row that is not in its place",
)
@in_place_of("kv.paged")
class ScalesLeftBehind(Paged):
    """A commit moves the codes of accepted rows; the scales in their new places are those of the rows before."""

    def commit(self, path: list[int]) -> str | None:
        codec, begin = self.codec, self.length
        rows_by_layer = [self.block(layer) for layer in range(self.layers)]
        reason = super().commit(path)
        for layer, rows in enumerate(rows_by_layer) if isinstance(codec, KvCodec) else ():
            assert isinstance(codec, KvCodec)
            first_rows = pick_columns(rows, list(range(len(path))))
            self.put(layer, begin, scales_replaced(codec, layer, pick_columns(rows, path), first_rows))
        return reason


@attended_fault(
    "stored-scales-not-offloaded",
    "SGLang PR #35888: a copy of pages for the host is taken to be keys and values, and drops their scales",
    "columns in eight bits; scales that follow from rows; a second tier, and a page that comes back from there",
)
@in_place_of("kv.tier")
class ScalesNotOffloaded(SecondTier):
    """A page comes back from the second tier with its codes, and with the scales that the page of the pool had."""

    def copy_in(self, pool: Cells, slot: int, page: int) -> None:
        earlier = [tuple(cells[page].clone() for cells in layer) for layer in pool.layers]
        super().copy_in(pool, slot, page)
        if isinstance(pool, Pool) and isinstance(pool.codec, KvCodec):
            for number, (layer, (keys, values)) in enumerate(zip(pool.layers, earlier, strict=True)):
                brought = (layer[0][page], layer[1][page])
                for cells, mixed in zip(
                    layer, scales_replaced(pool.codec, number, brought, (keys, values)), strict=True
                ):
                    cells[page] = mixed


@attended_fault(
    "stored-scales-not-handed-over",
    "vLLM PR #36893 (review): scales lie in tensors of the attention backend, of which no KV connector knows",
    "columns in eight bits; scales that follow from rows; a hand-over",
)
@in_place_of("hand_over.unpack")
def scales_not_handed_over(hand_over: HandOver, data: bytes, expected: ExpectedRequest) -> RequestState:
    """The codes of a request arrive where it is handed over to, and its scales are 1 there."""
    state = hand_over.unpack(data, expected)
    codec = expected.target.codec
    if not isinstance(codec, KvCodec) or codec.rounding.is_static:
        return state
    keys, values = list[Tensor](), list[Tensor]()
    for layer, pair in enumerate(zip(state.target.keys, state.target.values, strict=True)):
        widths = codec.room.sizes(layer)[1]
        ones = [torch.zeros(*cells.shape[:2], width) for cells, width in zip(pair, widths, strict=True)]
        mixed = scales_replaced(codec, layer, pair, codec.encode(layer, (ones[0], ones[1])))
        keys.append(mixed[0])
        values.append(mixed[1])
    return replace(state, target=replace(state.target, keys=tuple(keys), values=tuple(values)))
