"""Faults of MTP modules: their inputs, the output that is fed back, and their experts."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from specverify.backends.engine.columns import Attend
from specverify.backends.engine.draft.mtp import MtpHead, TargetLayerHead
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.model.head import HeadModel
from specverify.backends.engine.model.target_layers import TargetLayers
from specverify.backends.faults.fault import drafted_fault, in_place_of_head


def _is_module(head: HeadModel) -> bool:
    return isinstance(head, MtpHead)


@drafted_fault(
    "mtp-state-before-embedding",
    "ml-explore/mlx-lm PR #1469: the projection's input was [state, embedding] where its weights expect the embedding",
    "an MTP module",
)
@in_place_of_head(_is_module)
class StateFirst(MtpHead):
    """The projection of an MTP module takes embedding and state in the other order than its weights expect."""

    def mix(self, embedded: Tensor, state: Tensor, module: int) -> Tensor:
        name = self.names[module]
        pair = [self.norm(embedded, f"{name}.enorm"), self.norm(state, f"{name}.hnorm")]
        return self.linear(torch.cat(pair if self.settings.state_first else pair[::-1], -1), f"{name}.eh_proj")


@drafted_fault(
    "mtp-output-fed-back-before-norm",
    "vllm-project/vllm PR #46075, ROCm/ATOM PR #1764: later draft steps were fed the output before shared_head.norm",
    "MTP modules whose output is fed back after its norm, and a tree with an inner node below the root",
)
@in_place_of_head(_is_module)
class FedBackBeforeNorm(MtpHead):
    """The output of an MTP module is fed back without the norm that its weights expect there."""

    def feed_back(self, outputs: Tensor, module: int = 0) -> Tensor:
        return outputs


@drafted_fault(
    "mtp-first-embedding-kept",
    "vllm-project/vllm, deepseek_mtp.py: the embedding at position 0 is masked, since no module was trained on it",
    "MTP modules with the convention `zero_first`",
)
@in_place_of_head(_is_module)
class FirstEmbedding(MtpHead):
    """The row at position 0 keeps the embedding of its token, which these modules expect as zero."""

    def embed(self, tokens: Tensor, positions: Tensor, module: int = 0) -> Tensor:
        return super().embed(tokens, positions.clamp(min=1), module)


@drafted_fault(
    "mtp-own-head-overwritten",
    "vllm-project/vllm PR #38493: the trained shared_head of Step-3.5-Flash was overwritten with the target's lm_head",
    "MTP modules with heads of their own",
)
@in_place_of_head(_is_module)
class TargetsHead(MtpHead):
    """The target's head scores the output of an MTP module that has a head of its own."""

    def head_of(self, module: int) -> Tensor:
        return self.target_head


@drafted_fault(
    "mtp-head-of-first-module",
    "ROCm/ATOM PR #643: the wrapper's lm_head is shared_head.head of the first MTP layer, for every layer",
    "two MTP modules or more with heads of their own, and a tree with an inner node below the root",
)
@in_place_of_head(_is_module)
class FirstModulesHead(MtpHead):
    """The head of the first MTP module scores the outputs of all modules."""

    def head_of(self, module: int) -> Tensor:
        return super().head_of(0)


@drafted_fault(
    "mtp-own-embedding-dropped",
    "family of vllm-project/vllm PR #20022: the embedding of an MTP layer is left to a loader that takes the target's",
    "MTP modules with embeddings of their own",
)
@in_place_of_head(_is_module)
class TargetsEmbedding(MtpHead):
    """An MTP module that has an embedding of its own reads that of the target."""

    def embedding_of(self, module: int) -> Tensor:
        return self.embedding


@drafted_fault(
    "mtp-correction-bias-dropped",
    "vllm-project/vllm PR #22100: the loading of e_score_correction_bias was lost; "
    "sgl-project/sglang PR #37133: the bias was rounded, and other experts were chosen",
    "MTP modules with experts that a correction bias chooses",
)
@in_place_of_head(lambda head: isinstance(head, TargetLayerHead))
class WithoutCorrection(TargetLayerHead):
    """The experts of an MTP module are chosen without the correction bias, though the target's are chosen with it."""

    def run_layer(
        self,
        module: int,
        x: Tensor,
        residual: Tensor,
        tables: tuple[Tensor, Tensor],
        mask: Tensor,
        batch: BatchCache,
        attend: Attend,
    ) -> Tensor:
        with without_correction(self.target_layers):
            return super().run_layer(module, x, residual, tables, mask, batch, attend)


BIASES = ("e_score_correction_bias", "gate.bias")
"""The ends of the names of correction biases: transformers', and those of routers in float64."""


@contextmanager
def without_correction(layers: TargetLayers) -> Iterator[None]:
    """Inside the `with`, the correction biases of `layers` are zero; other runs share the layers."""
    biases = [tensor for name, tensor in layers.state_dict().items() if name.endswith(BIASES)]
    values = [bias.clone() for bias in biases]
    try:
        for bias in biases:
            bias.zero_()
        yield
    finally:
        for bias, value in zip(biases, values, strict=True):
            bias.copy_(value)
