"""Invariants of logits processing at each node, and of log-probabilities.

Temperature, penalties, top-k and the other processors act between logits and choice. At a tree node they must see the
prompt, the output so far and the tokens on that node's own path.
"""

from collections.abc import Iterator

import numpy as np

from properties.invariants.applies import sampled
from properties.invariants.own_laws import close, laws, near_edge, output_before
from properties.tolerance.closeness import forced, noise
from properties.verdict.finding import Compared, Finding
from properties.verdict.invariant import Fact, Invariant, NotApplicable, Oracle, Unobserved, needing
from properties.verdict.subject import Subject
from reference.case import Case
from reference.oracle import processing
from reference.trace import Stage

LOGPROB = 4.0
"""Largest error of a log-probability, in limits of rule N.

It depends on its own logit and on the sum over all logits of the row.
"""


def processors_per_node(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """The law used at each node is the definition's, for the node's own logits after prompt, output and path."""
    seen = False
    for number, step in enumerate(subject(case).steps):
        if step.scored is None or step.scored.law is None or step.drafted is None:
            continue
        seen = True
        tree, output = step.drafted.tree, output_before(case, step)
        wanted = laws(case, step)
        for node, (true, used) in enumerate(zip(wanted, step.scored.law, strict=True)):
            away = np.abs(true - used)
            token = int(np.where(np.isnan(away), np.inf, away).argmax())
            holds = away[token] <= close(case)
            edge = not holds and near_edge(case, step.scored.logits[node], tree.tokens_to(node)[1:], output)
            # Near an edge rounding may keep another set of tokens, so that a different law proves nothing.
            yield Compared(0 if edge else 1)
            if holds or edge:
                continue
            where: dict[str, int | str] = {"node": node, "token": token}
            measure = float(away[token] / close(case))
            name = "lossless.processors-per-node"
            yield Finding(name, Stage.SCORED, number, where, float(true[token]), float(used[token]), measure)
            return
    if not seen:
        raise Unobserved("the backend does not reveal the law it samples from")


def logprobs(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """The log-probability reported for each emitted token is the oracle's, given the tokens before it."""
    trace = subject(case)
    told = [step.emitted for step in trace.steps if step.emitted is not None and step.emitted.logprobs is not None]
    if not told or not trace.output:
        raise Unobserved("the backend reports no log-probabilities")
    vocab = case.model.vocab_size
    if any(not 0 <= token < vocab for token in trace.output):
        raise NotApplicable("a token outside the vocabulary has no log-probability")
    rows = forced(case, oracle, trace.output)
    limit = LOGPROB * noise(case, oracle, subject).of_logits()
    position = 0
    for number, step in enumerate(trace.steps):
        if step.emitted is None or step.emitted.logprobs is None:
            return
        tokens, reported = step.emitted.tokens, step.emitted.logprobs
        if len(reported) != len(tokens):
            where: dict[str, int | str] = {"side": "length"}
            yield Finding("lossless.logprobs", Stage.EMITTED, number, where, len(tokens), len(reported))
            return
        yield Compared(len(tokens))
        for token, value in zip(tokens, reported, strict=True):
            true = processing.logprob(rows[position], token)
            away = abs(value - true) / limit if limit else float(value != true)
            # `not <=`, since a NaN must fail.
            if not away <= 1:
                where = {"position": position, "token": token}
                yield Finding("lossless.logprobs", Stage.EMITTED, number, where, true, value, float(away))
                return
            position += 1


INVARIANTS = (
    Invariant(
        "lossless.processors-per-node",
        "At every node, temperature and processors act on that node's logits with prompt, output and path before it.",
        needing(Stage.DRAFTED, Stage.SCORED),
        processors_per_node,
        sampled,
    ),
    Invariant(
        "lossless.logprobs",
        "Each reported log-probability is the oracle's for that token after the tokens before it.",
        needing(Stage.EMITTED),
        logprobs,
    ),
)
