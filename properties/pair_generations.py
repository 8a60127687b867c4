"""Generations of an engine beside a reference that shows tokens alone.

The engine runs whole requests on fresh seeds. After each of its texts the reference decodes single tokens, and the two
sides' tokens are compared as draws from one law (`specverify.properties.laws.sampled.partners`).
"""

from dataclasses import dataclass, field, replace

from specverify.properties.generations import DOUBT, LONGER, RUN_TESTS
from specverify.properties.laws.sampled.gate import log_bar
from specverify.properties.laws.sampled.partners import PARTNERS, Partners
from specverify.properties.laws.worlds import is_promised
from specverify.properties.verdict.invariant import NotApplicable
from specverify.properties.verdict.peer import Peer
from specverify.properties.verdict.subject import Subject
from specverify.properties.verdict.variants import dice
from specverify.reference.case import Case
from specverify.reference.sampling import Sampling

TOKENS = 40
"""Tokens of the engine's generations after which no other generation of a case begins."""

RUNS = 24
"""Most generations of a case."""

BY_OUTPUT = ("repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words", "min_tokens", "processors")
"""Settings whose effect depends on where the prompt ends: text that moves into the prompt has another law then."""


@dataclass
class PairEvidence:
    """The evidence of one case.

    Attributes:
        tokens: Number of the engine's tokens.
        beyond: A token of the engine outside the vocabulary, or None.
        partners: The e-process over the tokens of both sides.
    """

    tokens: int = 0
    invalid_token: int | None = None
    partners: Partners = field(default_factory=Partners)


def counts_from_prompt(case: Case) -> bool:
    """Whether a setting of the case has an effect that depends on where the prompt ends."""
    defaults = Sampling()
    return any(getattr(case.sampling, name) != getattr(defaults, name) for name in BY_OUTPUT)


def pair_evidence(case: Case, peer: Peer, subject: Subject) -> PairEvidence:
    """Run the case on fresh seeds until TOKENS are spent, or LONGER times as many where the evidence is beyond DOUBT.

    Raises:
        NotApplicable: The rule does not promise the target's law, or the settings depend on where the prompt ends.
        NoReference: The reference declines a request or breaks on it.
    """
    if not is_promised(case):
        raise NotApplicable("the rule does not promise the target's law here")
    if counts_from_prompt(case):
        raise NotApplicable("penalties, bans and processors count from the end of the prompt")
    evidence = PairEvidence()
    sampling = case.sampling
    coins = dice(case, "pair")
    best: dict[tuple[int, ...], int] = {}
    for run_number in range(1, LONGER * RUNS + 1):
        # Every request has a seed of its own: two sides on one seed would not be independent.
        seed, *seeds = coins.integers(0, 2**62, size=1 + PARTNERS * case.stops.max_new_tokens).tolist()
        output = subject(replace(case, sampling=replace(sampling, tape=(), seed=seed))).output
        for position, token in enumerate(output):
            if not 0 <= token < case.model.vocab_size:
                evidence.invalid_token = token
                return evidence
            peer_seeds = seeds[PARTNERS * position : PARTNERS * (position + 1)]
            peer_tokens = tuple(peer.token_after(case, output[:position], peer_seed) for peer_seed in peer_seeds)
            if output[:position] not in best:
                best[output[:position]] = peer.token_after(case, output[:position])
            evidence.partners.add(output[:position], token, peer_tokens, best[output[:position]])
        evidence.tokens += len(output)
        factor = LONGER if evidence.partners.log_e > DOUBT else 1
        if (
            evidence.partners.log_e >= log_bar(RUN_TESTS)
            or evidence.tokens >= factor * TOKENS
            or run_number >= factor * RUNS
        ):
            break
    return evidence
