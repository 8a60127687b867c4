"""Excerpts of a recorded run: each stretch of steps that a share chooses, as a run of its own.

What was emitted before an excerpt stands in its prompt, so that a model judges the chosen steps and no other.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from specverify.properties.verdict.finding import Outcome, Verdict
from specverify.reference.recorded.lines import FileRun

OUTCOMES: tuple[Outcome, ...] = ("failed", "internal", "checked")
"""The outcomes of an excerpt that stand in the place of the whole run's, the first before the others."""


@dataclass(frozen=True)
class Excerpt:
    """Steps of a run that follow each other.

    Attributes:
        first: The number of the first of them in the run.
        run: The steps as a run of their own.
    """

    first: int
    run: FileRun


def chosen_steps(run: FileRun, number: int, share: float, seed: int) -> tuple[int, ...]:
    """The steps of run `number` of a file that a share chooses; all or none of a run that can only be judged whole.

    Each step is chosen by seed, run and step and not by what it holds, so that the chosen ones are a fair sample.
    """
    steps = range(size_of(run))
    if share < 1.0 and not is_divisible(run):
        return tuple(steps) if _coin(seed, number, -1) < share else ()
    return tuple(step for step in steps if _coin(seed, number, step) < share)


def size_of(run: FileRun) -> int:
    """The number of steps; a run that tells its tokens alone counts as one."""
    return max(1, len(run.steps))


def is_divisible(run: FileRun) -> bool:
    """Whether a step can be judged behind its text: every step tells its tokens, and no setting counts the output's."""
    request = run.request
    if request is None or not run.steps or not all(step.get("emitted") for step in run.steps):
        return False
    sampling = request.sampling
    counts_output = sampling.presence_penalty or sampling.frequency_penalty or sampling.min_tokens
    return not (counts_output or sampling.bad_words or sampling.grammar or request.stops.stop_strings)


def excerpts(run: FileRun, chosen: Sequence[int]) -> Iterator[Excerpt]:
    """Each longest stretch of chosen steps of a divisible run, in order."""
    request = run.request
    assert request is not None
    counts = [len(step["emitted"]["tokens"]) for step in run.steps]
    before = [0, *accumulate(counts)]
    text = [*request.prompt, *(token for step in run.steps for token in step["emitted"]["tokens"])]
    for first, last in _stretches(chosen):
        ends = last + 1 == len(run.steps)
        left = request.stops.max_new_tokens - before[first]
        if left < 1:
            continue  # tokens beyond the limit, which the run as a whole is judged for
        finish = {"finish": run.end["finish"]} if run.end is not None and "finish" in run.end else {}
        part = replace(
            run,
            request=replace(
                request,
                prompt=tuple(text[: len(request.prompt) + before[first]]),
                stops=replace(request.stops, max_new_tokens=left),
            ),
            steps=run.steps[first : last + 1],
            lines=run.lines[first : last + 1],
            end=finish if ends and run.end is not None else None,
            end_line=run.end_line if ends else 0,
        )
        yield Excerpt(first, part)


def with_excerpts(whole: Verdict, parts: Sequence[tuple[int, Verdict]]) -> Verdict:
    """The verdict on a run that was judged without its model, with those on its excerpts, each with its first step."""
    outcomes, compared, ties = dict(whole.outcomes), dict(whole.compared), dict(whole.predicted_ties)
    result = whole
    for first, part in parts:
        own = {name for name, outcome in whole.outcomes.items() if outcome != "failed"}
        for name in own & set(part.outcomes):
            if part.outcomes[name] in OUTCOMES:
                outcomes[name] = min(
                    (outcome for outcome in (outcomes[name], part.outcomes[name]) if outcome in OUTCOMES),
                    key=OUTCOMES.index,
                )
                # Without the model some compared all of the run already.
                if whole.outcomes[name] != "checked":
                    compared[name] = compared.get(name, 0) + part.compared.get(name, 0)
        for name, expected in part.predicted_ties.items():
            ties[name] = ties.get(name, 0.0) + expected
        moved = (replace(finding, step=finding.step + first) for finding in part.findings if finding.invariant in own)
        result = replace(
            result,
            findings=(*result.findings, *moved),
            ties=result.ties + part.ties,
            routing_ties=result.routing_ties + part.routing_ties,
            routed=result.routed + part.routed,
            indexed=result.indexed + part.indexed,
            positions=result.positions + part.positions,
            evidence=result.evidence + part.evidence,
            control_errors=result.control_errors + part.control_errors,
            internal=result.internal + part.internal,
            reference_rows=result.reference_rows + part.reference_rows,
        )
    return replace(result, outcomes=outcomes, compared=compared, predicted_ties=ties)


def _stretches(steps: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first and the last number of each stretch without a gap."""
    first = None
    for place, step in enumerate(steps):
        first = step if first is None else first
        if place + 1 == len(steps) or steps[place + 1] != step + 1:
            yield first, step
            first = None


def _coin(seed: int, run: int, step: int) -> float:
    """A number in [0, 1) of a step; step -1 is the run as a whole."""
    return random.Random(f"{seed}/{run}/{step}").random()
