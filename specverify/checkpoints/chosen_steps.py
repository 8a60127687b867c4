"""Chosen steps: single steps of each prompt's text, picked by the seed of the run (`--steps`).

A step is a case of its own, which begins behind as many tokens of the engine's own plain text as the seed says. So what
earlier steps left in a cache is judged as a prefill leaves it. All other steps are left out.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from specverify.plan import Plan
from specverify.properties.verdict.subject import NoTrace, Subject
from specverify.reference.case import Case
from specverify.reference.trace import Stage, Trace
from specverify.setup.errors import UnusableInput


def check_steps(plan: Plan, subject: Subject) -> None:
    """Refuse `--steps` for an engine that runs no single step, and for an output whose language its beginning decides.

    Raises:
        UnusableInput: with the reason.
    """
    if Stage.ACCEPTED not in subject.reveals:
        raise UnusableInput(f"--steps {plan.steps}: {plan.backend} shows tokens alone, and runs no single step")
    if plan.grammar is not None:
        raise UnusableInput(f"--steps {plan.steps}: a grammar holds from the first token of the output on")


def left_out(plan: Plan) -> tuple[str, ...]:
    """What a run of chosen steps leaves out, as a sentence of `Declaration.excluded`; none for a run of all steps."""
    if not plan.steps:
        return ()
    judged = f"--steps {plan.steps} judges {plan.steps} of each prompt's up to {plan.new_tokens}, by the seed"
    return (f"steps of prompts: {judged}; the others were not judged",)


def step_cases(
    base: Case, plan: Plan, number: int, subject: Subject, draft_at: Callable[[Case, Trace, int], Case]
) -> Iterator[Case]:
    """The chosen steps of prompt `number`, whose greedy case is `base`.

    Args:
        base: The case of the whole prompt.
        plan: The plan.
        number: The number of the prompt.
        subject: The engine, which decodes the text plainly.
        draft_at: From a case that begins at a step, the rest of the plain run, and the step's number, to the case with
            its draft.
    """
    try:
        plain = subject(base.plain_decode())
    except NoTrace:
        yield replace(base, steps=1)  # the judge reports the crash, or the reason why the case is declined
        return
    length = max(1, len(plain.output))
    order = np.random.default_rng([plan.seed, number]).permutation(length).tolist()
    for turn in range(plan.steps):
        # A text that ends early has fewer steps: they are then judged with further drafts.
        start = order[turn % length]
        room = max(1, base.stops.max_new_tokens - start)
        begun = replace(base, prompt=base.prompt + plain.output[:start], stops=replace(base.stops, max_new_tokens=room))
        rest = replace(plain, steps=plain.steps[start:], output=plain.output[start:])
        yield replace(draft_at(begun, rest, turn), steps=1)
