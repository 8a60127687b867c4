"""Processing: what stands between logits and choice sees, at every node, prompt, output and that node's path."""

from collections.abc import Iterator

import numpy as np

from properties.tolerance.closeness import UNIT, forced, noise
from properties.verdict.finding import Compared, Finding
from properties.verdict.invariant import Fact, Invariant, NotApplicable, Oracle, Unobserved, needing
from properties.verdict.subject import Subject
from reference.case import Case
from reference.oracle import processing
from reference.trace import Array, Stage, Step

CLOSE = {"float64": 1e-9, "float32": 2e-5, "bfloat16": 2e-5, "float16": 2e-5}
"""How far a probability may lie from the definition's on the same logits; engines process in float32 at least."""

LANES = 8
"""Partial sums that a softmax keeps at least: one over V numbers rounds V / LANES times."""


def close(case: Case) -> float:
    """How far a probability of `case` may lie off: CLOSE, and what the sum over a large vocabulary rounds.

    torch's float32 softmax over 49,152 tokens was seen 3e-5 off, relatively.
    """
    engine = UNIT["float64" if case.dtype == "float64" else "float32"]
    return CLOSE[case.dtype] + engine * case.model.vocab_size / LANES


EDGE = {"float64": 1e-11, "float32": 1e-4, "bfloat16": 1e-4, "float16": 1e-4}
"""Rows nearer than this, relatively, to keeping another set of tokens are not compared."""

LOGPROB = 4.0
"""Limits of rule N that a log-probability may lie off: it moves by its own logit and by the sum over the others."""


def output_before(case: Case, step: Step) -> tuple[int, ...]:
    """The tokens emitted before `step`, its pending root included."""
    assert step.drafted is not None
    return (*step.context, step.drafted.tree.token[0])[len(case.prompt) :]


def laws(case: Case, step: Step) -> Array:
    """The law after each node [nodes, vocabulary], by definition, of the backend's own logits."""
    assert step.drafted is not None
    assert step.scored is not None
    tree, output = step.drafted.tree, output_before(case, step)
    rows = [
        processing.law(row, case.sampling, case.stops, case.prompt, output + tree.tokens_to(node)[1:])
        for node, row in enumerate(step.scored.logits)
    ]
    return np.stack(rows)


def near_edge(case: Case, logits: Array, path: tuple[int, ...], output: tuple[int, ...]) -> bool:
    """Whether an engine's rounding may keep another set of tokens in this row."""
    margin = processing.margin(logits, case.sampling, case.stops, case.prompt, output + path)
    return margin < EDGE[case.dtype]


def processors_per_node(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """The law used at each node is the definition's for its own logits, with prompt, output and path before it."""
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
            if not away <= 1:
                where = {"position": position, "token": token}
                yield Finding("lossless.logprobs", Stage.EMITTED, number, where, true, value, float(away))
                return
            position += 1


def sampled(case: Case) -> bool:
    """Whether the case draws."""
    return not case.sampling.greedy


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
