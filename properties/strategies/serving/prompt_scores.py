"""Strategy for requests that ask for the log-probabilities of their prompts."""

from dataclasses import replace

from hypothesis import strategies as st

from specverify.properties.strategies.prompts import LONGEST
from specverify.reference.abilities import Abilities
from specverify.reference.case import Case

SCORE_INTERVAL = 16
"""One case in this many asks."""

TOGETHER = 3
"""The same for a session in a layout with a prefix cache, whose pages hold no logits."""


def takes_scores(case: Case, within: Abilities | None) -> bool:
    """Whether the engine tells the log-probabilities of the prompt of `case`; long prompts go without."""
    admits = case.ranks == 1 and len(case.prompt) <= LONGEST
    return admits and (within is None or within.prompt_logprobs)


def score_interval(case: Case) -> int:
    """One case like this one in so many asks."""
    return TOGETHER if case.session is not None and case.layout.traits.keeps_prefixes else SCORE_INTERVAL


@st.composite
def with_scores(draw: st.DrawFn, case: Case) -> Case:
    """`case` with the question asked by its own request, or by some requests of its session."""
    if case.session is None:
        return replace(case, sampling=replace(case.sampling, prompt_logprobs=True))
    scores_own_prompt = draw(st.sampled_from((True, True, False)))
    mates = tuple(
        replace(mate, sampling=replace(mate.sampling, prompt_logprobs=True))
        if draw(st.booleans()) or not scores_own_prompt
        else mate
        for mate in case.session.mates
    )
    sampling = replace(case.sampling, prompt_logprobs=scores_own_prompt)
    return replace(case, sampling=sampling, session=replace(case.session, mates=mates))
