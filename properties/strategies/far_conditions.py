"""Conditions on cases with long prompts, or with pages shared across draft models.

Attention kernels split a long prefix into parts (split-K), which only long prompts can test. Requests with unlike
draft models may share pages of the target, but not pages of their drafts.
"""

from collections.abc import Iterator

from specverify.properties.strategies.case_run import CaseRun, Condition
from specverify.reference.session import Action

SPLIT = {"float32": 512, "float64": 512, "bfloat16": 1024, "float16": 1024}
"""Least columns of a prefix that our kernel splits on a GPU, by working dtype (`triton_launch.plan_for_gpu`).

No kernel takes float64; such a case counts as one in float32.
"""

INTERPRETED = 128
"""Least columns of a prefix that our kernel splits under Triton's interpreter (`triton_launch.plan_for_cpu`)."""


def _columns(run: CaseRun) -> int:
    """Columns of the longest prompt of any request, without the pending root."""
    return max(len(request.prefix) for request in run.requests)


def _lanes(run: CaseRun) -> Iterator[tuple[int, int]]:
    """For each step of several requests: how many have a prefix that a GPU splits, how many a shorter one."""
    least = SPLIT[run.case.dtype]
    far = {number for number, request in enumerate(run.requests) if len(request.prefix) >= least}
    return ((len(far.intersection(batch)), len(set(batch) - far)) for batch in run.batches)


def _drafts_unlike(run: CaseRun, first: int, second: int) -> bool:
    """Whether both requests have a model draft, and the draft models differ."""
    first_draft, second_draft = run.requests[first].draft, run.requests[second].draft
    return first_draft.model is not None and second_draft.model is not None and first_draft.model != second_draft.model


def _steps(later: tuple[Action, ...], request: int) -> bool:
    """Whether `request` takes a step among the actions."""
    return any(action.kind == "step" and request in action.requests for action in later)


def _forks(run: CaseRun) -> Iterator[int]:
    """Requests over pages that are forked from a request with another draft model, and step later."""
    entered: set[int] = set()
    for index, action in enumerate(run.actions if run.case.layout.traits.pages else ()):
        if action.kind == "add":
            entered |= set(action.requests)
        elif action.kind == "fork" and action.requests[0] in entered and action.requests[1] not in entered:
            source, twin = action.requests
            entered.add(twin)
            if _drafts_unlike(run, source, twin) and _steps(run.actions[index + 1 :], twin):
                yield twin


def _meets(run: CaseRun) -> Iterator[int]:
    """Requests that share the first page with a cancelled one of another draft model, and step later."""
    entered: set[int] = set()
    departed: list[int] = []
    size = run.case.layout.page_size
    for index, action in enumerate(run.actions if run.case.layout.traits.keeps_prefixes else ()):
        request = action.requests[0]
        if action.kind == "cancel" and request in entered:
            departed.append(request)
        elif action.kind == "add" and request not in entered:
            entered.add(request)
            first_page = run.requests[request].prefix[:size]
            alike = [
                earlier
                for earlier in departed
                if len(first_page) == size and run.requests[earlier].prefix[:size] == first_page
            ]
            # Wrong pages of the draft show only in a later step.
            if any(_drafts_unlike(run, request, earlier) for earlier in alike) and _steps(
                run.actions[index + 1 :], request
            ):
                yield request


FAR = (
    *(
        Condition(f"prefix of {least} columns", f"A prompt's prefix has {least} columns or more.",
                  lambda run, least=least: _columns(run) >= least)  # type: ignore[misc]
        for least in (512, 1024, 2048)
    ),
    Condition("split-K under the interpreter", "A prefix so long that the interpreted kernel splits it.",
              lambda run: _columns(run) >= INTERPRETED),
    Condition("split-K on a GPU", "A prefix so long that the kernel on a GPU splits it in the case's dtype.",
              lambda run: _columns(run) >= SPLIT[run.case.dtype]),
    Condition("two lanes split", "One step of two requests whose prefixes are all split on a GPU.",
              lambda run: any(split > 1 for split, _ in _lanes(run))),
    Condition("two lanes split beside a short one", "The same, and a request in that step whose prefix is shorter.",
              lambda run: any(split > 1 and short for split, short in _lanes(run))),
    Condition("fork across draft models", "On pages, a fork that another model drafts for takes a step.",
              lambda run: any(_forks(run))),
    Condition("prefix hit across draft models", "Over a prefix cache, a request begins like one that left and that "
              "another model drafted for, and takes a step.", lambda run: any(_meets(run))),
)  # fmt: skip
"""The conditions that need long prompts or unlike draft models; `python -m tests.measure search` counts the cases."""
