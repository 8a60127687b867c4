"""Conditions on cases that invariants in several files share."""

from properties.verdict.invariant import NotApplicable
from properties.verdict.subject import Subject
from reference.case import Case


def greedy_only(case: Case) -> bool:
    """Whether the case decodes greedily; sampled cases have invariants on coins and laws instead."""
    return case.sampling.greedy


def sampled(case: Case) -> bool:
    """Whether the case samples its tokens."""
    return not case.sampling.greedy


def drawn(case: Case) -> bool:
    """Whether coins draw the draft's tokens, so that only the draft's scores can be compared with the oracle's."""
    sampling = case.sampling
    # "top-k" takes the best tokens of each row and tosses no coin.
    return case.draft.has_law and not sampling.greedy and sampling.draws != "top-k"


def check_seeded(case: Case, subject: Subject) -> None:
    """Raise NotApplicable where the engine draws on random numbers that no request decides."""
    if not case.sampling.greedy and subject.abilities is not None and not subject.abilities.seeded:
        raise NotApplicable("what the engine draws does not follow the seed")
