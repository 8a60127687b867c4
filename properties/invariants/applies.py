"""Which cases an invariant speaks of, where several files ask the same."""

from reference.case import Case


def greedy_only(case: Case) -> bool:
    """Of a sampled case other invariants speak, by its coins or its law."""
    return case.sampling.greedy


def sampled(case: Case) -> bool:
    """Whether the case draws."""
    return not case.sampling.greedy


def drawn(case: Case) -> bool:
    """Whether the draft's tokens are drawn by coins, so that only its scores can be compared with the oracle's."""
    sampling = case.sampling
    return case.draft.has_law and not sampling.greedy and sampling.draws != "top-k"
