"""Faults of acceptance rules other than rejection: mixtures, windows, rates, draws of the target."""

import torch
from torch import Tensor

from specverify.backends.engine.sampling.seams import SamplingSeams
from specverify.backends.faults.fault import accepted_fault, in_place_of


@accepted_fault(
    "token-outside-the-support-accepted",
    "family of sgl-project/sglang issue #35771: a token with zero target probability must never be accepted",
    "rule ensemble or synthetic, and a drafted token that top-k, top-p or a ban leaves out of p",
)
@in_place_of("sampling.possible")
def support_not_asked(seams: SamplingSeams, threshold: Tensor, share: Tensor) -> Tensor:
    """A lossy rule accepts tokens that the target cannot say."""
    return threshold


@accepted_fault(
    "weights-of-the-mixture-swapped",
    "family of huggingface/transformers PR #45979: w is the share of the target in the verified mixture",
    "rule ensemble, and a drafted token whose p is below its q",
)
@in_place_of("sampling.mixed_ratio")
def mixture_swapped(seams: SamplingSeams, ratio: Tensor, weight: float) -> Tensor:
    """The mixture that verifies takes the target's weight for the draft's."""
    return seams.mixed_ratio(ratio, 1.0 - weight)


@accepted_fault(
    "rejection-lifted-by-a-part-of-the-window",
    "vllm-project/vllm PR #50808: a rejection is overridden only where a full window fits in the remaining draft",
    "rule fly, and a rejected node with fewer nodes behind it than the window has, all accepted",
)
@in_place_of("sampling.window_accepted")
def window_cut_off(seams: SamplingSeams, following: list[Tensor], decision: Tensor, window: int) -> Tensor:
    """A rejection near the end of the draft is lifted by the nodes that are left, though the window is longer."""
    return torch.stack([torch.ones_like(decision), *following]).all(0)


@accepted_fault(
    "mismatch-drawn-anew",
    "family of antonellof/ferrox PR #307: the emitted token is the draw that the draft was compared with",
    "rule sample-and-match, and a drawn token that no child carries",
)
@in_place_of("sampling.emitted")
def mismatch_drawn_anew(seams: SamplingSeams, token: Tensor, row: Tensor) -> Tensor:
    """A token that no drafted node carries is thrown away, and another drawn from the target in its place."""
    return row
