"""The price of a case: about how long it takes to judge, told from the case and not from a clock."""

from specverify.reference.architecture import Seeded
from specverify.reference.case import Case

CASE_MS, LAYER_MS, PROPOSAL_MS, ID_MS, PROMPT_LAYER_MS, PROMPT_DRAFT_MS = 100.0, 1.7, 7.3, 0.003, 0.34, 0.43
"""Milliseconds of a case; in each step, of a layer of the target, of a draft's proposal and of an id of the vocabulary;
and of a token of a prompt, in a layer of the target and in a draft with weights.

They are fitted to the logarithms of what 300 default cases took on one core; for one case in three the price is wrong
by a factor above 2.
"""

USUAL_MS = 100.0
"""The price of a usual case. One default case in four costs less than half as much again, and has all its turns."""


def price_ms(case: Case) -> float:
    """About how many milliseconds it takes to judge `case` with its usual variants, on the engine of this project."""
    if not isinstance(case.model, Seeded):
        raise TypeError("only a case on a built-in model has a price")
    session = case.session
    layers, drafts = case.model.architecture.layers, int(case.draft.has_weights)
    limit = case.stops.max_new_tokens
    steps = len(session.actions) if session is not None else min(case.steps or limit, limit)
    prompts = len(case.prompt) + sum(len(mate.prompt) for mate in (session.mates if session is not None else ()))
    by_step = LAYER_MS * layers + PROPOSAL_MS * drafts + ID_MS * case.model.vocab_size
    by_token = PROMPT_LAYER_MS * layers + PROMPT_DRAFT_MS * drafts
    # Every rank runs its part of each layer.
    return CASE_MS + case.ranks * (steps * by_step + prompts * by_token)


def times_usual(case: Case) -> int:
    """How many times as dear as a usual case it is, at least 1; 1 for a case on a checkpoint."""
    if not isinstance(case.model, Seeded):
        return 1
    return max(1, round(price_ms(case) / USUAL_MS))
