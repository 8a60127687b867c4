"""Invariants of an engine beside a reference that shows tokens alone.

No oracle runs. They take the place of those invariants that read the oracle's stages. To compare laws, the engine runs
whole requests on fresh seeds; after each of its texts the reference decodes single tokens, and the two sides' tokens
are compared as draws from one law (`specverify.properties.laws.sampled.partners`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from specverify.properties.generations import DOUBT, LONGER, RUN_TESTS
from specverify.properties.invariants.applies import divergence, is_greedy, is_sampled, step_of_token
from specverify.properties.laws.sampled.gate import log_bar
from specverify.properties.laws.sampled.partners import PARTNERS, Partners
from specverify.properties.laws.worlds import is_promised
from specverify.properties.streams import stream_of
from specverify.properties.tolerance.bounds import UNIT
from specverify.properties.tolerance.closeness import PRIOR, SANITY
from specverify.properties.tolerance.ties import TIE_SIGMA
from specverify.properties.verdict.finding import Comparisons, Evidence, Finding, Tie
from specverify.properties.verdict.invariant import Fact, Invariant, NotApplicable, Oracle, needing
from specverify.properties.verdict.peer import Peer
from specverify.properties.verdict.subject import Subject
from specverify.properties.verdict.variants import dice
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.sampling import Sampling
from specverify.reference.trace import Array, Stage, Trace

REPETITIONS = (3, 4, 5)
"""The numbers under which repetitions are remembered; other invariants use 1 and 2.

An engine that repeats one output in five by chance repeats all three in one of a hundred.
"""

DEEPEST = 128
"""Layers that are assumed of a model whose layers are not known: the size of its noise grows with their root."""

EVERY = 2
"""One sampled case in this many is asked for its law: each takes about a hundred short requests."""

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
        invalid_token: A token of the engine outside the vocabulary, or None.
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


def peer_of(oracle: Oracle) -> Peer:
    """The reference that shows tokens alone.

    Raises:
        NotApplicable: The reference is an oracle.
    """
    if not isinstance(oracle, Peer):
        raise NotApplicable("an oracle is there")
    return oracle


def greedy_match(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Greedy outputs of both sides are equal up to a near tie; log-probabilities of equal tokens are equal.

    Where the outputs part, both sides are asked again. A side that does not repeat its output is nondeterministic. If
    both repeat theirs and show log-probabilities, rule T decides. Without those, the divergence is a tie only where the
    reference itself wavers between the two tokens: with the text before them in the prompt, it decodes the engine's.
    """
    name = "pair.greedy-match"
    peer = peer_of(oracle)
    engine_trace, reference_trace = subject(case), peer(case)
    if not engine_trace.output and not reference_trace.output:
        raise NotApplicable("nothing was emitted")
    # A case with a limit of steps stops early: only the common length can be compared.
    short, long = sorted((len(engine_trace.output), len(reference_trace.output)))
    compared = short if case.steps else long
    yield Comparisons(compared)
    last = max(len(engine_trace.steps) - 1, 0)
    parting = divergence(reference_trace.output, engine_trace.output, compared)
    engine_logprobs, reference_logprobs = logprobs_of(engine_trace), logprobs_of(reference_trace)
    sigma = None
    if engine_logprobs is not None and reference_logprobs is not None:
        num_equal = short if parting is None else min(parting[0], short)
        differences = np.abs(np.array(engine_logprobs[:num_equal]) - np.array(reference_logprobs[:num_equal]))
        sigma, limit = noise_of(case, np.array([*engine_logprobs, *reference_logprobs]), differences)
        yield Comparisons(num_equal)
        if (differences > TIE_SIGMA * limit).any():
            position = int(np.argmax(differences))
            where: dict[str, int | str] = {"position": position, "side": "logprobs"}
            beyond = float(differences[position] / (TIE_SIGMA * limit))
            yield Finding(
                name,
                Stage.EMITTED,
                step_of_token(engine_trace, position, last),
                where,
                reference_logprobs[position],
                engine_logprobs[position],
                beyond,
            )
            return
    if parting is None:
        return
    place, expected, observed = parting
    if any(
        peer.run_again(case, time).output[: place + 1] != reference_trace.output[: place + 1] for time in REPETITIONS
    ):
        peer.waver(case)
    outputs = [subject.run_again(case, time).output for time in REPETITIONS]
    repeated_output = next(
        (output for output in outputs if output[: place + 1] != engine_trace.output[: place + 1]), None
    )
    where = {"position": place}
    if repeated_output is not None:
        where["side"] = "asked again"
        # The repetition may part from the first output before the place where that left the reference's.
        repeated_token = next(
            (token for token, first in zip(repeated_output, engine_trace.output, strict=False) if token != first),
            "the end",
        )
        yield Finding(name, Stage.EMITTED, step_of_token(engine_trace, place, last), where, observed, repeated_token)
        return
    measure = None
    if isinstance(expected, int) and isinstance(observed, int) and 0 <= observed < case.model.vocab_size:
        if sigma is not None and engine_logprobs is not None and reference_logprobs is not None:
            gap = abs(reference_logprobs[place] - engine_logprobs[place]) / sigma
            if gap <= TIE_SIGMA:
                yield Tie(name, place, gap)
                return
            measure = gap / TIE_SIGMA
        elif not counts_from_prompt(case) and peer.token_after(case, engine_trace.output[:place]) == observed:
            yield Tie(name, place, 0.0)
            return
        else:
            where["side"] = "repeated"
    yield Finding(name, Stage.EMITTED, step_of_token(engine_trace, place, last), where, expected, observed, measure)


def logprobs_of(trace: Trace) -> tuple[float, ...] | None:
    """The log-probability of each token of the output, or None where the trace does not hold all of them."""
    logprobs: list[float] = []
    for step in trace.steps:
        if step.emitted is None or step.emitted.logprobs is None:
            return None
        logprobs += step.emitted.logprobs
    return tuple(logprobs) if len(logprobs) == len(trace.output) else None


def noise_of(case: Case, numbers: Array, differences: Array) -> tuple[float, float]:
    """The sigma of a log-probability, and the largest that it may have.

    It is the rms of `differences`, those on equal tokens, within its a-priori size in the case's dtype (rule N).
    """
    layers = case.model.architecture.layers if isinstance(case.model, Seeded) else DEEPEST
    scale = max(1.0, float(np.sqrt(np.mean(np.square(numbers)))))
    low, high = (factor * UNIT[case.dtype] * scale for factor in PRIOR[case.dtype])
    limit = SANITY * high * float(np.sqrt(layers))
    measured = float(np.sqrt(np.mean(np.square(differences)))) if differences.size else 0.0
    return min(max(measured, low), limit), limit


def same_law(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Sampled tokens of both sides come from one law, whatever it is (`specverify.properties.invariants.pair`)."""
    name = "pair.same-law"
    peer = peer_of(oracle)
    evidence = pair_evidence(case, peer, subject)
    partners = evidence.partners
    where: dict[str, int | str] = {"draws": partners.rounds, "tokens": evidence.tokens}
    if evidence.invalid_token is not None:
        yield Comparisons()
        yield Finding(name, Stage.EMITTED, 0, where, f"an id below {case.model.vocab_size}", evidence.invalid_token)
        return
    yield Evidence(
        name,
        partners.log_e,
        partners.rounds,
        stream=stream_of(name, case),
        parts=partners.parts,
        resolution=partners.resolution,
    )
    yield Comparisons(partners.rounds)
    if partners.log_e >= log_bar(RUN_TESTS):
        yield Finding(name, Stage.EMITTED, 0, where, "evidence below e^23", round(min(partners.log_e, 1e6), 1))


INVARIANTS = (
    Invariant(
        "pair.greedy-match",
        "Greedy outputs are those of the reference up to a near tie, and so are log-probabilities, where both are.",
        needing(Stage.EMITTED),
        greedy_match,
        is_greedy,
    ),
    Invariant(
        "pair.same-law",
        "Sampled tokens come from the law of the reference's tokens, by a sequential two-sample test.",
        needing(Stage.EMITTED),
        same_law,
        is_sampled,
        every=EVERY,
    ),
)
