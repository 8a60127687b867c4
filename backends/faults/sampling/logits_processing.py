"""Faults of logits processing for the target's law and the draft's proposal.

Temperature, top-k, top-p, min-p, penalties or processors are skipped, misplaced or imprecise.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.engine.sampling.processing import History
from specverify.backends.engine.sampling.seams import SamplingSeams
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import Fault, Plant, in_place_of
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Stage

DETERMINISTIC = "a proposal that is certain of its token has no other probabilities"
"""The proof that a fault of the proposal is harmless for a draft that names its best tokens."""


@in_place_of("sampling.certain")
def soft_for_certain(seams: SamplingSeams, token: Tensor, law: Tensor) -> Tensor:
    """Tokens that were only ranked are handed over with the draft's soft law, as if they had been drawn from it."""
    return law


Settings = Callable[[Sampling], Sampling]
"""A change of a request's sampling settings."""


def law_handed_over(law: Callable[[Tensor, Sampling], Tensor]) -> Plant:
    """A fault that hands over `law` of the draft's logits, whatever law the token was drawn from."""
    return in_place_of("sampling.hand_over")(lambda seams, drawn_from, logits, sampling: law(logits, sampling))


def judged_under(settings: Settings) -> Plant:
    """A fault that judges drafted tokens by the target's law under other settings; the bonus keeps the request's."""
    return in_place_of("sampling.target_law")(
        lambda seams, logits, sampling, stops, past: seams.target_law(logits, settings(sampling), stops, past)
    )


def bonus_under(settings: Settings) -> Plant:
    """A fault that draws the bonus from the target's law under other settings; drafted tokens keep the request's."""
    return in_place_of("sampling.bonus_law")(
        lambda seams, logits, sampling, stops, past: seams.bonus_law(logits, settings(sampling), stops, past)
    )


def plain(sampling: Sampling) -> Sampling:
    """Temperature 1 and no processing, so that the law is the softmax alone."""
    return Sampling(1.0)


def tepid(sampling: Sampling) -> Sampling:
    """Temperature 1, with all other settings unchanged."""
    return replace(sampling, temperature=1.0)


def coarse(sampling: Sampling) -> Sampling:
    """The settings with top_p rounded to bfloat16."""
    return replace(sampling, top_p=float(torch.tensor(sampling.top_p).bfloat16()))


def without_min_p(sampling: Sampling) -> Sampling:
    """The settings without min_p, whose omission never changes an arg-max."""
    return replace(sampling, min_p=0.0)


@in_place_of("sampling.target_law")
def path_one_late(
    seams: SamplingSeams, logits: Tensor, sampling: Sampling, stops: Stops, past: History | None
) -> Tensor:
    """Processors at a node see the path of the row before the node."""
    if past is None:
        return seams.target_law(logits, sampling, stops, past)
    late = torch.cat([past.tail[..., :1], past.tail[..., :-1]], -1)
    # Row 0 has no row before it and keeps its own history.
    shifted_history = [torch.cat([rows[:, :1], rows[:, :-1]], 1) for rows in (past.seen_tokens, past.counts)]
    # The node's history is the one before it: seen tokens, counts, the tail and the whole sequence.
    history = replace(
        past,
        seen_tokens=shifted_history[0],
        counts=shifted_history[1],
        tail=late,
        sequence=lambda request, node: past.sequence(request, max(node - 1, 0)),
    )
    return seams.target_law(logits, sampling, stops, history)


@in_place_of("sampling.target_law")
def last_id_lost(
    seams: SamplingSeams, logits: Tensor, sampling: Sampling, stops: Stops, past: History | None
) -> Tensor:
    """The last entry of the vocabulary is cut off before sampling."""
    law = seams.target_law(logits, sampling, stops, past)
    law_without_last = law * (torch.arange(law.shape[-1], device=law.device) < law.shape[-1] - 1)
    total = law_without_last.sum(-1, keepdim=True)
    # A law with all its mass on the last id has nothing else to offer, and stays.
    return torch.where(total > 0, law_without_last / total, law)


@in_place_of("logprobs")
def logprobs_over_tree(seams: Seams, logits: Tensor) -> Tensor:
    """Log-probabilities are normalised over all rows of the tree together."""
    return seams.logprobs(logits.flatten()[None]).view_as(logits)


FAULTS = (
    Fault(
        "soft-law-for-ranked-tokens",
        Stage.DRAFTED,
        "The draft names its best tokens but hands over its soft law, as if they had been drawn.",
        "transformers #32867: argmax draft with soft q",
        "a model draft whose tokens are its best, at a temperature",
        soft_for_certain,
        {
            "without-replacement": "no token is merely ranked: every proposal is the law drawn from",
            "with-replacement": "no token is merely ranked: every proposal is the law drawn from",
        },
    ),
    Fault(
        "proposal-before-truncation",
        Stage.DRAFTED,
        "The proposal handed over is the law before top-k and top-p; the token was drawn after them.",
        "catalogue BZ-102: candidate generators return a q they did not sample from",
        "a drawn draft under top-k, top-p or min-p",
        law_handed_over(lambda logits, sampling: (logits / sampling.temperature).softmax(-1)),
        {"top-k": DETERMINISTIC},
    ),
    Fault(
        "proposal-without-temperature",
        Stage.DRAFTED,
        "The proposal handed over ignores the temperature at which the token was drawn.",
        "q is the law that tokens were drawn from, after temperature (arXiv 2302.01318)",
        "a drawn draft at a temperature other than 1",
        law_handed_over(lambda logits, sampling: logits.softmax(-1)),
        {"top-k": DETERMINISTIC},
    ),
    Fault(
        "target-law-under-default-settings",
        Stage.SCORED,
        "Drafted tokens are judged by the target's law under default settings.",
        "catalogue BZ-010: target probabilities computed with default sampling parameters during scoring",
        "a temperature other than 1, or any processing",
        judged_under(plain),
    ),
    Fault(
        "bonus-row-unprocessed",
        Stage.ACCEPTED,
        "The bonus token is sampled without temperature, top-p, top-k and processors.",
        "catalogue BZ-005: bonus token sampled without temperature/top-p/top-k",
        "full acceptance at a temperature other than 1, or under processing",
        bonus_under(plain),
    ),
    Fault(
        "bonus-without-temperature",
        Stage.ACCEPTED,
        "The bonus after full acceptance is sampled at temperature 1.",
        "catalogue BZ-005: bonus sampled without temperature",
        "full acceptance at a temperature other than 1",
        bonus_under(tepid),
    ),
    Fault(
        "top-p-in-bfloat16",
        Stage.SCORED,
        "top_p is rounded to bfloat16 in the verifier, so that its nucleus is another.",
        "catalogue BZ-055: top_p cast to bfloat16 in the verification sampler",
        "top-p below 1",
        judged_under(coarse),
    ),
    Fault(
        "min-p-for-bonus-only",
        Stage.SCORED,
        "min_p is skipped for verified tokens.",
        "catalogue BZ-016: min_p (argmax-invariant processors) skipped for verified tokens",
        "min-p above 0",
        judged_under(without_min_p),
    ),
    Fault(
        "processors-see-path-one-late",
        Stage.SCORED,
        "Processors at a node see the tokens of the row before it instead of the node's own path.",
        "catalogue BZ-014: bad-words prefix matching reads draft tokens shifted by one",
        "penalties, bad words or a custom processor on a tree",
        path_one_late,
    ),
    Fault(
        "last-vocabulary-entry-lost",
        Stage.SCORED,
        "The last vocabulary entry is removed before sampling.",
        "catalogue BZ-176: last vocabulary entry removed in nucleus/typical sampling",
        "a law that gives the last id any mass",
        last_id_lost,
    ),
    Fault(
        "logprobs-over-whole-tree",
        Stage.EMITTED,
        "Log-probabilities are normalised over all rows of the tree.",
        "catalogue BZ-119: logprobs normalised over all positions",
        "a tree with a drafted node",
        logprobs_over_tree,
    ),
)
