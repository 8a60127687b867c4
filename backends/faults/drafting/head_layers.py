"""Faults of heads with several layers, layers without rotary embedding, and experts."""

import torch
from torch import Tensor

from specverify.backends.engine.draft.eagle1 import Eagle1Head
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.model.head import HeadModel
from specverify.backends.faults.fault import drafted_fault, in_place_of_head


def _is_deep(head: HeadModel) -> bool:
    return head.layers > 1


def _has_experts(head: HeadModel) -> bool:
    return isinstance(head, Eagle1Head) and head.settings.experts > 0


def _is_deep_with_experts(head: HeadModel) -> bool:
    return _is_deep(head) and _has_experts(head)


def _has_unrotated(head: HeadModel) -> bool:
    return isinstance(head, Eagle1Head) and bool(head.settings.unrotated)


@drafted_fault(
    "head-layers-share-kv",
    "LMCache/LMCache PR #1668: an EAGLE head is counted as one layer of KV, however many it has",
    "a head of several layers",
)
@in_place_of_head(_is_deep)
class OneKvLayer(HeadModel):
    """Every layer of a head sees the keys and values of the first one, the only layer of its cache."""

    first_layer: tuple[Tensor, Tensor]

    def keep_rows(self, batch: BatchCache, keys: Tensor, values: Tensor, module: int) -> tuple[Tensor, Tensor]:
        rows = super().keep_rows(batch, keys, values, module)
        if module == 0:
            self.first_layer = rows
        return self.first_layer


@drafted_fault(
    "further-layer-without-input-norm",
    "vllm-project/vllm, models/llama_eagle.py: the norm before attention is left out in the first layer alone",
    "an EAGLE-1 head of several layers",
)
@in_place_of_head(lambda head: _is_deep(head) and isinstance(head, Eagle1Head))
class WithoutInputNorm(Eagle1Head):
    """Later layers of an EAGLE-1 head read the output of the layer before without a norm, as the first layer does."""

    def fuse(self, embedded: Tensor, state: Tensor, module: int = 0) -> tuple[Tensor, Tensor]:
        return (state, state) if module else super().fuse(embedded, state, module)


@drafted_fault(
    "further-layer-at-first-positions",
    "family of catalogue BZ-059, and vllm-project/vllm PR #18030: all layers of a draft share one layer's metadata",
    "a head of several layers, and a row that is not the first of its forward",
)
@in_place_of_head(_is_deep)
class FirstPositions(HeadModel):
    """Later layers of a head rotate every row of a forward at the position of its first row."""

    def rotary(self, heads: Tensor, cos: Tensor, sin: Tensor, module: int) -> Tensor:
        if module:
            cos, sin = (table[:, :, :1].expand_as(table) for table in (cos, sin))
        return super().rotary(heads, cos, sin, module)


@drafted_fault(
    "nope-layer-of-head-rotated",
    "timtoole02/Camelid PR #535, airockchip/rknn-llm issue #501: layers without rotary embedding are rotated",
    "a head with a layer without rotary embedding, and a row that sees another",
)
@in_place_of_head(_has_unrotated)
class RotatedEverywhere(Eagle1Head):
    """Every layer of a head has rotary embedding, those too that its weights have without."""

    def rotates(self, module: int) -> bool:
        return True


@drafted_fault(
    "rope-flags-of-head-inverted",
    "huggingface/transformers PR #37359: no_rope_layers read as the list of layers without rotary embedding",
    "a head with a layer without rotary embedding, and a row that sees another",
)
@in_place_of_head(_has_unrotated)
class InvertedFlags(Eagle1Head):
    """The flags of a head's layers are read the other way round: a layer with 1, which is rotated, is left as it is."""

    def rotates(self, module: int) -> bool:
        return not super().rotates(module)


@drafted_fault(
    "rope-flags-of-head-counted-from-target",
    "vllm-project/vllm PR #20591: a head's flags are padded by the target's layers, from which its layers are numbered",
    "a head of several layers with and without rotary embedding, on a target whose number of layers shifts them",
)
@in_place_of_head(lambda head: _is_deep(head) and _has_unrotated(head))
class ShiftedFlags(Eagle1Head):
    """A layer of a head finds its flag of rotary embedding at the place of the layer after it.

    The layers are numbered on from the target's, and the padding of the flags is one too short.
    """

    def rotates(self, module: int) -> bool:
        return super().rotates((module + 1) % self.layers)


@drafted_fault(
    "head-rows-to-last-expert",
    "sgl-project/sglang issue #40156: the experts of draft rows are masked to -1, which wraps to the last one",
    "a head with experts, and a row whose expert is not the last",
)
@in_place_of_head(_has_experts)
class LastExpert(Eagle1Head):
    """Every row of a head goes through the last expert, with the factor of the expert that the router chose."""

    def route(self, x: Tensor, module: int) -> tuple[Tensor, Tensor]:
        factors, experts = super().route(x, module)
        last = torch.full_like(experts, -1)
        last[:, 0] = self.settings.experts - 1
        return factors, last


@drafted_fault(
    "head-expert-factor-on-output",
    "sgl-project/sglang PR #7889, vllm-project/llm-compressor PR #1907: Llama 4 applies router scores before experts",
    "a head with experts",
)
@in_place_of_head(_has_experts)
class FactorOnOutput(Eagle1Head):
    """The factor of a head's expert multiplies what the expert puts out, and not the row that goes in."""

    def weighted_expert(self, x: Tensor, factor: Tensor, module: int, number: int) -> Tensor:
        return factor * self.expert(x, module, f"experts.{number}")


@drafted_fault(
    "head-experts-of-layer-0",
    "family of vllm-project/vllm PR #48622, sgl-project/sglang PR #26980: layers with one id share a place for experts",
    "a head of several layers with experts, and a row whose choices in them differ",
)
@in_place_of_head(_is_deep_with_experts)
class RouterOfLayer0(Eagle1Head):
    """Later layers of a head take the experts that its first layer chose for the row; their factors are their own."""

    chosen: Tensor

    def route(self, x: Tensor, module: int) -> tuple[Tensor, Tensor]:
        factors, experts = super().route(x, module)
        if module == 0:
            self.chosen = experts
        return factors, self.chosen
