"""Invariants of the output: the target's own tokens, stops, state and counters."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from specverify.properties.invariants.applies import (
    check_seeded,
    comparable_trace,
    divergence,
    emitting_steps,
    is_greedy,
    plain_decode_of,
    step_of_token,
)
from specverify.properties.tolerance.closeness import chain, forced_logits, noise
from specverify.properties.tolerance.ties import TIE_SIGMA, gaps, judge_tokens
from specverify.properties.verdict.finding import Comparisons, Finding, Reads
from specverify.properties.verdict.followed import follow
from specverify.properties.verdict.invariant import (
    AGAIN,
    TURNS,
    Fact,
    Invariant,
    NotApplicable,
    Oracle,
    Unobserved,
    needing,
)
from specverify.properties.verdict.judge import crash_finding
from specverify.properties.verdict.subject import Crash, NoTrace, Subject
from specverify.properties.verdict.variants import dice
from specverify.reference.case import Case
from specverify.reference.draft import most_rows
from specverify.reference.oracle.processing import scores
from specverify.reference.oracle.stopping import clip, finish_reason
from specverify.reference.trace import Accounting, Array, Stage, Step, Trace

NONE = needing()


def completes(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """A case that the backend's declaration admits runs to its end without a crash."""
    try:
        subject(case)
        yield Comparisons()
    except NoTrace as no_trace:
        if isinstance(no_trace.outcome, Crash):
            yield crash_finding("lossless.completes", no_trace.outcome)


def greedy_match(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Each token is the oracle's greedy choice given the tokens before it, by rule T."""
    trace = subject(case)
    if not trace.output:
        raise NotApplicable("nothing was emitted")
    error = noise(case, oracle, subject)
    vocab = case.model.vocab_size
    for position, token in enumerate(trace.output):
        if not 0 <= token < vocab:
            where: dict[str, int | str] = {"position": position}
            yield Finding("lossless.greedy-match", Stage.EMITTED, 0, where, f"an id below {vocab}", token)
            return
    logits = choices(case, forced_logits(case, oracle, trace.output), trace.output)
    yield Comparisons(len(trace.output))
    steps = emitting_steps(trace)
    for fact in judge_tokens("lossless.greedy-match", logits, trace.output, error.logits, steps, error.control_ties):
        yield _with_reads(fact, case, trace.output, TIE_SIGMA * error.logits) if isinstance(fact, Finding) else fact


def _with_reads(finding: Finding, case: Case, output: tuple[int, ...], limit: float) -> Finding:
    """`finding` with what it reads: how far its token's score lies below the best."""
    position = int(finding.where["position"])
    tree = chain((case.prompt[-1], *output[:-1]))

    def row(oracle: Oracle) -> Array:
        scored = choices(case, forced_logits(case, oracle, output), output)
        return gaps(scored, output)[position : position + 1]

    return replace(finding, reads=Reads(case, case.prefix, tree, position, None, limit, row))


def choices(case: Case, rows: Array, output: tuple[int, ...]) -> Array:
    """The processed `rows` [len(output), V]: the scores that greedy decoding compares before each output token."""
    if not case.sampling.processes:
        return rows
    processed_rows = [
        scores(row, case.sampling, case.stops, case.prompt, output[:position]) for position, row in enumerate(rows)
    ]
    return np.stack(processed_rows)


def draft_independent(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """The output is that of plain decoding by the same backend, whatever was drafted."""
    if case.plain_decode() == case:
        raise NotApplicable("the case is plain decoding itself")
    trace = subject(case)
    plain = subject(plain_decode_of(case, trace.output))
    # A case with a limit of steps stops early: only the common length can be compared.
    compared = min(len(trace.output), len(plain.output)) if case.steps else max(len(trace.output), len(plain.output))
    yield Comparisons(compared)
    parting = divergence(plain.output, trace.output, compared)
    if parting is not None:
        position, expected, observed = parting
        if isinstance(expected, int) and isinstance(observed, int):
            sigma = noise(case, oracle, subject).logits
            text = (*trace.output[:position], observed)
            # Each token by the experts of its own run.
            sides = ((oracle, observed), (follow(case, oracle, plain.steps), expected))
            rows = [
                choices(case, forced_logits(case, side_oracle, text), text)[position : position + 1]
                for side_oracle, _ in sides
            ]
            if max(gaps(row, (token,))[0] for row, (_, token) in zip(rows, sides, strict=True)) <= TIE_SIGMA * sigma:
                return  # both tokens are in the tie zone: greedy-match counts the tie, and later tokens may differ
        step = step_of_token(trace, position, max(len(trace.steps) - 1, 0))
        yield Finding("lossless.draft-independent", Stage.EMITTED, step, {"position": position}, expected, observed)
        return
    if not case.steps and plain.finish != trace.finish:
        last = max(len(trace.steps) - 1, 0)
        yield Finding("lossless.draft-independent", Stage.EMITTED, last, {"side": "finish"}, plain.finish, trace.finish)


def stops(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Each block is cut where the output ends: no token after the end is emitted or cached, and no step follows."""
    trace = subject(case)
    prompt = len(case.prompt)
    least = case.sampling.min_tokens
    grammar = case.sampling.grammar
    text: tuple[int, ...] = ()
    for number, step in enumerate(trace.steps):
        if step.emitted is None:
            text = ()  # where the blocks of later steps begin is not known
            break
        if step.accepted is None or step.drafted is None:
            text += step.emitted.tokens
            continue
        block = (*(step.drafted.tree.token[node] for node in step.accepted.path[1:]), step.accepted.bonus)
        expected_tokens, expected_finish = clip(block, text, case.stops, prompt, least, grammar)
        yield Comparisons(len(block))
        if (step.emitted.tokens, step.emitted.finish) != (expected_tokens, expected_finish):
            yield _stops_finding(number, (expected_tokens, expected_finish), (step.emitted.tokens, step.emitted.finish))
            return
        if len(expected_tokens) < len(block):
            yield from _leftovers(number, step, len(expected_tokens))
        text += step.emitted.tokens
        if expected_finish is not None and number + 1 < len(trace.steps):
            yield _stops_finding(number + 1, f"no step after {expected_finish}", "another step")
            return
    yield Comparisons(len(trace.output))
    last = max(len(trace.steps) - 1, 0)
    if text and text != trace.output:
        yield _stops_finding(last, text, trace.output)
    out = trace.output
    end = next(
        (length for length in range(1, len(out)) if finish_reason(out[:length], case.stops, prompt, least, grammar)),
        None,
    )
    if end is not None:
        yield _stops_finding(last, f"an end after {end} tokens", f"{len(trace.output)} tokens")
    finish = finish_reason(trace.output, case.stops, prompt, least, grammar)
    if trace.finish is None and finish is None and not case.steps:
        yield _stops_finding(last, "an end by a stop or a length", f"an end after {len(trace.output)} tokens without")
    elif finish != trace.finish and not (case.steps and trace.finish is None and finish is None):
        yield _stops_finding(last, f"finish {finish}", f"finish {trace.finish}")


def _leftovers(number: int, step: Step, emitted: int) -> Iterator[Finding]:
    """Findings where tokens after a block's cut left log-probabilities, or KV of target or draft."""
    logprobs = step.emitted.logprobs if step.emitted is not None else None
    if logprobs is not None and len(logprobs) != emitted:
        yield Finding("lossless.stops", Stage.EMITTED, number, {"side": "logprobs"}, emitted, len(logprobs))
    if step.committed is None:
        return
    length = len(step.context) + emitted
    record = step.committed
    lengths = {"target": record.length, "draft": record.draft.length if record.draft is not None else 0}
    if record.after is not None:
        lengths["target"] = max(record.length, record.after.length)
    for cache, held_length in lengths.items():
        if held_length > length:
            where: dict[str, int | str] = {"cache": cache, "side": "length"}
            yield Finding(
                "lossless.stops", Stage.COMMITTED, number, where, f"at most {length} slots", f"{held_length} slots"
            )


def _stops_finding(step: int, expected: object, observed: object) -> Finding:
    return Finding("lossless.stops", Stage.EMITTED, step, {"side": "tokens and finish"}, expected, observed)


def state_isolated(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """The case, run again after another request, gives a bit-identical trace."""
    check_seeded(case, subject)
    first_trace, other_request = subject(case), _other_request(case)
    if other_request == case:
        raise NotApplicable("the other request is the case itself")
    subject.run_again(other_request)  # a run of its own, remembered apart from the first
    after = subject.run_again(case, 2)
    yield from _same_run(
        "lossless.state-isolated", comparable_trace(first_trace, subject), comparable_trace(after, subject)
    )


def _other_request(case: Case) -> Case:
    """A different request on the same models: other tokens, another length, trees in another order."""
    rng = dice(case, "other")
    prompt = tuple(int(token) for token in rng.integers(0, case.model.vocab_size, size=1 + len(case.prompt) // 2))
    if case.draft.trees is None:
        return replace(case, prompt=prompt, steps=1)
    trees = tuple(tree.with_root(prompt[-1]) for tree in reversed(case.draft.trees))
    return replace(case, prompt=prompt, draft=case.draft.with_shapes(trees), steps=1)


def deterministic(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """The same case twice gives bit-identical traces."""
    check_seeded(case, subject)
    first = comparable_trace(subject(case), subject)
    second = comparable_trace(subject.run_again(case), subject)
    yield from _same_run("lossless.deterministic", first, second)


def _same_run(name: str, first: Trace, second: Trace) -> Iterator[Finding | Comparisons]:
    """A finding at the first step and stage where two runs are not identical, or at their outputs."""
    num_stages = sum(getattr(step, stage.word) is not None for step in first.steps for stage in Stage)
    yield Comparisons(num_stages + len(first.output))
    for number, (step, twin) in enumerate(zip(first.steps, second.steps, strict=False)):
        stage = _first_difference(step, twin)
        if stage is not None:
            yield Finding(name, stage, number, {}, "the first run's, bit for bit", "another")
            return
    if (first.output, first.finish) != (second.output, second.finish):
        last = max(len(first.steps) - 1, 0)
        yield Finding(name, Stage.EMITTED, last, {"side": "output"}, first.output, second.output)


def _first_difference(step: Step, twin: Step) -> Stage | None:
    """The first stage whose records are not identical."""
    if step.context != twin.context:
        return Stage.COMMITTED
    return next(
        (stage for stage in Stage if not _identical(getattr(step, stage.word), getattr(twin, stage.word))), None
    )


def _identical(first: object, second: object) -> bool:
    if type(first) is not type(second):
        return False
    if isinstance(first, float) and isinstance(second, float):
        return first == second or (first != first and second != second)  # what is no number is judged elsewhere
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return bool(np.array_equal(first, second, equal_nan=first.dtype.kind == "f"))
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(_identical, first, second))
    fields = getattr(type(first), "__dataclass_fields__", None)
    if fields is not None:
        return all(_identical(getattr(first, name), getattr(second, name)) for name in fields)
    return first == second


def accounting(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """The counters agree with the steps: calls, proposed, accepted, rejected, accept lengths, tokens.

    Where steps show trees or paths alone, the counters of those are compared, and the statement is unobserved.

    Where forwards of the target are counted by kind, each step that counted has one whose logits decided it, and no
    more than the pieces of the prompt come beside them: an extra one costs as much as a step. Actions of a session may
    need more.

    Slower attention paths count at most as many layers as ran. A draft model counts at least one forward for each
    level of its trees that it ranked, since a level can be fed only after the level above has its tokens.
    """
    trace = subject(case)
    for why, count in sorted(trace.fallbacks.items()):
        if trace.attention_calls and not 0 < count <= trace.attention_calls:
            expected = f"1 to {trace.attention_calls} layers"
            yield Finding("lossless.accounting", Stage.COMMITTED, 0, {"side": f"fallback: {why}"}, expected, count)
    if trace.accounting is None:
        raise Unobserved("the backend keeps no counters")
    counters = trace.accounting
    expected_counts = _counts_of(trace.steps) or _sums(counters)
    yield Comparisons(len(expected_counts))
    for name, value in expected_counts.items():
        if getattr(counters, name) != value:
            yield Finding("lossless.accounting", Stage.COMMITTED, 0, {"side": name}, value, getattr(counters, name))
    yield from _target_call_findings(case, trace, counters)
    shown_steps = [step for step in trace.steps if step.drafted is not None and step.accepted is not None]
    if len(shown_steps) < len(trace.steps):
        raise Unobserved("not every step reveals its tree and its acceptance")
    num_levels = sum(step.drafted.tree.height for step in shown_steps if step.drafted)
    if case.draft.model is not None and counters.draft_calls < num_levels:
        expected = f"at least {num_levels}"
        yield Finding(
            "lossless.accounting", Stage.COMMITTED, 0, {"side": "draft_calls"}, expected, counters.draft_calls
        )
    for number, step in enumerate(shown_steps):
        assert step.accepted is not None
        if step.emitted is not None and len(step.emitted.tokens) > len(step.accepted.path):
            expected = f"at most {len(step.accepted.path)} tokens"
            yield Finding(
                "lossless.accounting", Stage.EMITTED, number, {"side": "tokens"}, expected, len(step.emitted.tokens)
            )


def _target_call_findings(case: Case, trace: Trace, counters: Accounting) -> Iterator[Fact]:
    """Forwards of the target beyond those that a request needs, or fewer than its steps."""
    calls = counters.target_calls
    if calls is None or case.session is not None:
        return
    steps, pieces = len(trace.steps), _prefill_pieces(case)
    total = calls.prefill + calls.decode + calls.verify
    # A step is decided by a verification, by the decode of a bare root, or by a prefill that ends with the root.
    sides: dict[str, tuple[bool, object, int]] = {
        "verify": (calls.verify <= steps, f"at most {steps}", calls.verify),
        "all": (steps <= total <= steps + pieces, f"{steps} to {steps + pieces}", total),
    }
    yield Comparisons(len(sides))
    for kind, (agrees, expected, observed) in sides.items():
        if not agrees:
            where: dict[str, int | str] = {"side": f"target_calls.{kind}"}
            yield Finding("lossless.accounting", Stage.COMMITTED, 0, where, expected, observed)


def _prefill_pieces(case: Case) -> int:
    """The most forwards that commit the prompt, but for its last token; a ring takes blocks of a tree's size."""
    tokens = len(case.prefix)
    width = case.layout.prefill_chunk or tokens
    if case.layout.traits.ring:
        width = min(width, max(case.layout.padded_nodes, most_rows(case.draft)) + 1)
    return -(-tokens // width) if tokens else 0


def _counts_of(steps: tuple[Step, ...]) -> dict[str, object]:
    """The counters that the steps themselves give: of trees if all show theirs, of paths if all show theirs."""
    trees = [step.drafted.tree for step in steps if step.drafted is not None]
    paths = [step.accepted.path for step in steps if step.accepted is not None]
    counts: dict[str, object] = {}
    proposed, lengths = sum(len(tree) - 1 for tree in trees), tuple(len(path) - 1 for path in paths)
    if len(steps) in (len(trees), len(paths)):
        counts["verify_calls"] = len(steps)
    if len(trees) == len(steps):
        counts["proposed"] = proposed
    if len(paths) == len(steps):
        counts |= {"accepted": sum(lengths), "accept_lengths": lengths}
        if len(trees) == len(steps):
            counts["rejected"] = proposed - sum(lengths)
    return counts


def _sums(counters: Accounting) -> dict[str, object]:
    """The counters that follow from the others, where no step gives any."""
    return {
        "accepted": sum(counters.accept_lengths),
        "rejected": counters.proposed - sum(counters.accept_lengths),
        "verify_calls": len(counters.accept_lengths),
    }


INVARIANTS = (
    Invariant(
        "lossless.completes", "A case within the declaration runs to its end.", NONE, completes, speaks_of="both"
    ),
    Invariant(
        "lossless.greedy-match",
        "Every output token is the oracle's greedy choice given the tokens before it (rule T).",
        needing(Stage.EMITTED),
        greedy_match,
        is_greedy,
    ),
    Invariant(
        "lossless.draft-independent",
        "The output is that of plain decoding, whatever was drafted.",
        needing(Stage.EMITTED),
        draft_independent,
        is_greedy,
        every_again=AGAIN,
    ),
    Invariant(
        "lossless.stops",
        "Ends of text, stop tokens and strings, limits of length and min_tokens hold inside an accepted block.",
        needing(Stage.EMITTED),
        stops,
    ),
    Invariant(
        "lossless.state-isolated",
        "A request leaves nothing behind that the next could notice.",
        NONE,
        state_isolated,
        every=TURNS,
    ),
    Invariant(
        "lossless.accounting",
        "The backend's counters are those of its steps.",
        NONE,
        accounting,
    ),
    Invariant(
        "lossless.deterministic", "The same case twice gives bit-identical traces.", NONE, deterministic, every=TURNS
    ),
)
