"""Invariants of logits processing, of log-probabilities, and of the support.

Temperature, penalties, top-k and the other processors act between logits and choice. At a tree node they must see the
prompt, the output so far and the tokens on that node's own path.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from specverify.properties.invariants.applies import is_greedy, is_sampled, plain_decode_of, step_of_token
from specverify.properties.invariants.own_laws import LANES, is_law_near_edge, law_tolerance, laws, output_before
from specverify.properties.laws.draw_by_draw import logit_bound, points
from specverify.properties.laws.worlds import is_promised
from specverify.properties.tolerance.bounds import UNIT
from specverify.properties.tolerance.closeness import chain_step, forced_logits, noise
from specverify.properties.verdict.finding import Comparisons, Finding, Reads
from specverify.properties.verdict.followed import follow
from specverify.properties.verdict.invariant import (
    AGAIN,
    Fact,
    Invariant,
    NotApplicable,
    Oracle,
    Unobserved,
    needing,
)
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.oracle import processing
from specverify.reference.sampling import Sampling
from specverify.reference.trace import Array, Stage, Step, Trace

LOGPROB = 4.0
"""Largest error of a log-probability, in limits of rule N.

It depends on its own logit and on the sum over all logits of the row. A row that amplifies roundings may have a larger
one, as its logits may (`specverify.properties.tolerance.amplification`).
"""

ROUNDINGS = 8.0
"""Unit roundoffs of a log-probability that its own computation may add.

Where a model's logits are small beside the logarithm of its vocabulary, as those of Falcon-H1 are, they outweigh the
noise of the logits. Log-probabilities are computed in float32 at least, whatever the dtype of the model.
"""


def rounding_error(value: float, dtype: str, vocabulary: int) -> float:
    """How far the computation of a log-probability of `value` among `vocabulary` tokens may be off by itself.

    A sum of positive terms is off by at most one unit roundoff for each addition (Higham, Accuracy and Stability of
    Numerical Algorithms, section 4.2): 19,000 in each of LANES sums over 151,936 tokens.
    """
    roundings = ROUNDINGS * (1.0 + abs(value)) + vocabulary / LANES
    return roundings * min(UNIT[dtype], UNIT["float32"])


def processors_per_node(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """The law used at each node is the definition's, for the node's own logits after prompt, output and path."""
    is_revealed = False
    for number, step in enumerate(subject(case).steps):
        if step.scored is None or step.scored.law is None or step.drafted is None:
            continue
        is_revealed = True
        tree = step.drafted.tree
        output = output_before(case, step)
        expected_laws = laws(case, step)
        for node, (true, used) in enumerate(zip(expected_laws, step.scored.law, strict=True)):
            away = np.abs(true - used)
            token = int(np.where(np.isnan(away), np.inf, away).argmax())
            is_close = away[token] <= law_tolerance(case)
            yield Comparisons()
            # Near an edge rounding may keep another set of tokens.
            if is_close or is_law_near_edge(
                case, step.scored.logits[node], tree.tokens_to(node)[1:], output, used.astype(np.float64)
            ):
                continue
            where: dict[str, int | str] = {"node": node, "token": token}
            measure = float(away[token] / law_tolerance(case))
            name = "lossless.processors-per-node"
            yield Finding(name, Stage.SCORED, number, where, float(true[token]), float(used[token]), measure)
            return
    if not is_revealed:
        raise Unobserved("the backend does not reveal the law it samples from")


def logprobs(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """The log-probability reported for each emitted token is the oracle's, given the tokens before it.

    The law is the one that the engine declares (`Abilities.logprobs_in`): of raw logits or of masked ones, within
    LOGPROB limits of rule N; or after processing, within the band of every law that logits within rule N can give.
    """
    yield from _prompt_logprobs(case, oracle, subject)
    trace = subject(case)
    name = "lossless.logprobs"
    if not trace.output or all(step.emitted is None or step.emitted.logprobs is None for step in trace.steps):
        raise Unobserved("the backend reports no log-probabilities")
    vocab = case.model.vocab_size
    if any(not 0 <= token < vocab for token in trace.output):
        raise NotApplicable("a token outside the vocabulary has no log-probability")
    is_processed = subject.logprobs == "processed"
    allowed = (_processed_logprobs if is_processed else _unprocessed_logprobs)(case, oracle, subject)
    error = noise(case, oracle, subject)
    rows = chain_step(case.prefix, (case.prompt[-1], *trace.output[:-1]))
    position = 0
    for number, step in enumerate(trace.steps):
        if step.emitted is None or step.emitted.logprobs is None:
            return
        tokens, reported = step.emitted.tokens, step.emitted.logprobs
        if len(reported) != len(tokens):
            yield Finding(name, Stage.EMITTED, number, {"side": "length"}, len(tokens), len(reported))
            return
        bands = allowed[position : position + len(tokens)]  # fewer where the output lacks tokens of its steps
        yield Comparisons(len(bands))
        for token, value, (true, low, high) in zip(tokens, reported, bands, strict=False):
            # Negated, since a NaN must fail.
            if not low <= value <= high:
                where: dict[str, int | str] = {"position": position, "token": token}
                limit = high - true if value > true else true - low
                away = float(abs(value - true) / limit if limit else np.inf)
                if is_processed or not error.excuses(rows, position, away):
                    reads = _logprob_reads(case, case.prefix, rows, position, token, limit)
                    yield Finding(name, Stage.EMITTED, number, where, true, value, away, reads=reads)
                    return
            position += 1


def _prompt_logprobs(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Where the request asks for them, the same of each token of its prompt but the first, by the raw logits."""
    reported = subject(case).prompt_logprobs
    able = subject.abilities is not None and subject.abilities.prompt_logprobs
    true = oracle(case).prompt_logprobs
    if true is None or (reported is None and not able):
        return
    name = "lossless.logprobs"
    reported = reported or ()
    if len(reported) != len(true):
        yield Finding(name, Stage.EMITTED, 0, {"side": "prompt length"}, len(true), len(reported))
        return
    yield Comparisons(len(true))
    error = noise(case, oracle, subject)
    rows = chain_step((), case.prompt[:-1])
    limit = LOGPROB * error.logits_limit()
    for place, (expected, value) in enumerate(zip(true, reported, strict=True), 1):
        allowed = limit + rounding_error(expected, case.dtype, case.model.vocab_size)
        if not abs(value - expected) <= allowed:
            where: dict[str, int | str] = {"side": "prompt", "position": place, "token": case.prompt[place]}
            away = float(abs(value - expected) / allowed)
            if not error.excuses(rows, place - 1, away):
                reads = _logprob_reads(case, (), rows, place - 1, case.prompt[place], limit)
                yield Finding(name, Stage.EMITTED, 0, where, expected, value, away, reads=reads)
                return


def _logprob_reads(
    case: Case, context: tuple[int, ...], rows: Step, node: int, token: int, limit: float
) -> Reads | None:
    """Reads of the log-probability of `token` at row `node` of the chain `rows`."""
    assert rows.drafted is not None
    tree = rows.drafted.tree
    scored = replace(case.plain_decode(), sampling=Sampling()).rebased(context, tree)

    def row(oracle: Oracle) -> Array | None:
        true = oracle(scored).steps[0].scored
        return None if true is None else np.array([processing.logprob(true.logits[node], token)])

    return Reads(case, context, tree, node, None, limit, row)


def _unprocessed_logprobs(case: Case, oracle: Oracle, subject: Subject) -> list[tuple[float, float, float]]:
    """The log-probability of each output token by raw or masked logits, with its least and its greatest value."""
    output = subject(case).output
    limit = LOGPROB * noise(case, oracle, subject).logits_limit()
    rows = forced_logits(case, oracle, output)
    if subject.logprobs == "masked":
        # The grammar alone of all that changes logits.
        settings = Sampling(grammar=case.sampling.grammar)
        rows = np.array(
            [processing.scores(row, settings, case.stops, case.prompt, output[:i]) for i, row in enumerate(rows)]
        )
    exact_values = (processing.logprob(row, token) for row, token in zip(rows, output, strict=True))
    bands = [(true, limit + rounding_error(true, case.dtype, case.model.vocab_size)) for true in exact_values]
    return [(true, true - width, true + width) for true, width in bands]


def _processed_logprobs(case: Case, oracle: Oracle, subject: Subject) -> list[tuple[float, float, float]]:
    """The same after penalties, grammar, temperature and truncation.

    At temperature 0 scores are taken at temperature 1, and nothing is truncated: no engine does for an arg-max.
    """
    sampling = case.sampling
    if sampling.greedy:
        sampling = replace(sampling, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    tempered = replace(case, sampling=sampling)
    trace = subject(case)
    law_points = points(tempered, oracle, trace, logit_bound(case, noise(case, oracle, subject)))
    with np.errstate(divide="ignore"):
        log_bands = [
            np.log([point.p[token], point.low[token], point.high[token]])
            for token, point in zip(trace.output, law_points, strict=True)
        ]
    bands: list[tuple[float, float, float]] = []
    for true, low, high in log_bands:
        error = rounding_error(float(true), case.dtype, case.model.vocab_size)
        bands.append((float(true), float(low) - error, float(high) + error))
    return bands


def logprobs_without_draft(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """As long as the tokens are the same, their log-probabilities are those of the same request without a draft.

    Both runs may lie LOGPROB limits of rule N from the oracle, so that twice as much lies between them.
    """
    if case.plain_decode() == case:
        raise NotApplicable("the case is plain decoding itself")
    if subject.abilities is not None and subject.logprobs != subject.abilities.logprobs:
        raise NotApplicable("the request without a draft runs in another setting, with log-probabilities of its own")
    plain_case = plain_decode_of(case, subject(case).output)
    own_logprobs, plain_logprobs = (_reported_logprobs(subject(variant)) for variant in (case, plain_case))
    if not own_logprobs or not plain_logprobs:
        raise Unobserved("the backend reports no log-probabilities")
    error = noise(case, oracle, subject)
    rows = chain_step(case.prefix, (case.prompt[-1], *(token for token, *_ in own_logprobs[:-1])))
    limit = 2 * LOGPROB * error.logits_limit()
    if subject.logprobs == "processed":
        # A repetition penalty stretches the noise of logits.
        limit *= max(case.sampling.repetition_penalty, 1.0 / case.sampling.repetition_penalty)
    for position, ((token, value, step), (twin, plain, _)) in enumerate(
        zip(own_logprobs, plain_logprobs, strict=False)
    ):
        if token != twin:
            return
        yield Comparisons()
        allowed = limit + 2 * rounding_error(plain, case.dtype, case.model.vocab_size)
        if not abs(value - plain) <= allowed:
            plain += _gain_by_experts(case, oracle, subject, own_logprobs, position)
        if not abs(value - plain) <= allowed:
            where: dict[str, int | str] = {"position": position, "token": token}
            away = float(abs(value - plain) / allowed)
            if not error.excuses(rows, position, away):
                reads = _logprob_reads(case, case.prefix, rows, position, token, limit)
                name = "lossless.logprobs-draft-independent"
                yield Finding(name, Stage.EMITTED, step, where, plain, value, away, reads=reads)
                return


def _gain_by_experts(
    case: Case, oracle: Oracle, subject: Subject, reported: list[tuple[int, float, int]], position: int
) -> float:
    """How much the oracle's log-probability of a token gains by the experts of the run over those of plain decode."""
    output = tuple(token for token, *_ in reported[: position + 1])
    with_draft, without = (
        processing.logprob(forced_logits(case, follow(case, oracle, run.steps), output)[position], output[position])
        for run in (subject(case), subject(plain_decode_of(case, subject(case).output)))
    )
    return with_draft - without


def _reported_logprobs(trace: Trace) -> list[tuple[int, float, int]]:
    """Each output token with its log-probability and the number of its step, up to the first that has none."""
    reported: list[tuple[int, float, int]] = []
    for number, step in enumerate(trace.steps):
        if step.emitted is None or step.emitted.logprobs is None:
            break
        pairs = zip(step.emitted.tokens, step.emitted.logprobs, strict=False)
        reported += [(token, value, number) for token, value in pairs]
    return reported


def support(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Each token of the output is one that the processed law allows, given the tokens before it.

    A token counts as allowed if any logits within rule N of the oracle's allow it, so that near ties at the k-th place,
    or at the edge of top-p or min-p, are no finding.

    Raises:
        NotApplicable: The rule does not promise the target's law, or no token is excluded anywhere.
    """
    if not is_promised(case):
        raise NotApplicable("the rule does not promise the target's law here")
    trace = subject(case)
    law_points = points(case, oracle, trace, logit_bound(case, noise(case, oracle, subject)))
    for position, (token, point) in enumerate(zip(trace.output, law_points, strict=True)):
        excluded = int((point.high == 0.0).sum())
        yield Comparisons(min(excluded, 1))
        if point.high[token] == 0.0:
            where: dict[str, int | str] = {"position": position}
            allowed = tuple(np.flatnonzero(point.high > 0.0).tolist())
            yield Finding("lossless.support", Stage.EMITTED, step_of_token(trace, position), where, allowed, token)
            return


INVARIANTS = (
    Invariant(
        "lossless.processors-per-node",
        "At every node, temperature and processors act on that node's logits with prompt, output and path before it.",
        needing(Stage.DRAFTED, Stage.SCORED),
        processors_per_node,
        is_sampled,
    ),
    Invariant(
        "lossless.logprobs",
        "Each reported log-probability is the oracle's for that token after the tokens before it.",
        needing(Stage.EMITTED),
        logprobs,
    ),
    Invariant(
        "lossless.logprobs-draft-independent",
        "Reported log-probabilities are those of the same request without a draft.",
        needing(Stage.EMITTED),
        logprobs_without_draft,
        is_greedy,
        every_again=AGAIN,
    ),
    Invariant(
        "lossless.support",
        "No output token is one that temperature, bans, top-k, top-p and min-p exclude after the tokens before it.",
        needing(Stage.EMITTED),
        support,
        is_sampled,
    ),
)
