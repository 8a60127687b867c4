"""Generations of an engine beside a reference that shows tokens alone.

The engine runs whole requests on fresh seeds. After each of its texts the reference decodes single tokens, and the two
sides' tokens are compared as draws from one law (`properties.laws.sampled.partners`).
"""

from dataclasses import dataclass, field, replace

from properties.generations import DOUBT, LONGER, RUN_TESTS
from properties.laws.sampled.gate import log_bar
from properties.laws.sampled.partners import PARTNERS, Partners
from properties.laws.worlds import promised
from properties.verdict.invariant import NotApplicable
from properties.verdict.peer import Peer
from properties.verdict.subject import Subject
from properties.verdict.variants import dice
from reference.case import Case
from reference.sampling import Sampling

TOKENS = 40
"""Tokens of the engine's generations after which no other generation of a case begins."""

RUNS = 24
"""Most generations of a case."""

BY_OUTPUT = ("repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words", "min_tokens", "processors")
"""Settings whose effect depends on where the prompt ends: text that moves into the prompt has another law then."""


@dataclass
class Paired:
    """The evidence of one case.

    Attributes:
        tokens: Number of the engine's tokens.
        beyond: A token of the engine outside the vocabulary, or None.
        partners: The e-process over the tokens of both sides.
    """

    tokens: int = 0
    beyond: int | None = None
    partners: Partners = field(default_factory=Partners)


def counts_from_prompt(case: Case) -> bool:
    """Whether a setting of the case has an effect that depends on where the prompt ends."""
    plain = Sampling()
    return any(getattr(case.sampling, name) != getattr(plain, name) for name in BY_OUTPUT)


def listen_to_both(case: Case, peer: Peer, subject: Subject) -> Paired:
    """Run the case on fresh seeds until TOKENS are spent, or LONGER times as many where the evidence is beyond DOUBT.

    Raises:
        NotApplicable: The rule does not promise the target's law, or the settings depend on where the prompt ends.
        NoReference: The reference declines a request or breaks on it.
    """
    if not promised(case):
        raise NotApplicable("the rule does not promise the target's law here")
    if counts_from_prompt(case):
        raise NotApplicable("penalties, bans and processors count from the end of the prompt")
    heard, sampling, coins = Paired(), case.sampling, dice(case, "pair")
    best: dict[tuple[int, ...], int] = {}
    for ran in range(1, LONGER * RUNS + 1):
        # Every request has a seed of its own: two sides on one seed would not be independent.
        seed, *seeds = coins.integers(0, 2**62, size=1 + PARTNERS * case.stops.max_new_tokens).tolist()
        output = subject(replace(case, sampling=replace(sampling, tape=(), seed=seed))).output
        for at, token in enumerate(output):
            if not 0 <= token < case.model.vocab_size:
                heard.beyond = token
                return heard
            own = seeds[PARTNERS * at : PARTNERS * (at + 1)]
            drawn = tuple(peer.token_after(case, output[:at], one) for one in own)
            if output[:at] not in best:
                best[output[:at]] = peer.token_after(case, output[:at])
            heard.partners.add(output[:at], token, drawn, best[output[:at]])
        heard.tokens += len(output)
        more = LONGER if heard.partners.log_e > DOUBT else 1
        if heard.partners.log_e >= log_bar(RUN_TESTS) or heard.tokens >= more * TOKENS or ran >= more * RUNS:
            break
    return heard
