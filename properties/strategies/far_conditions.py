"""Conditions on cases with long prompts, or with pages shared across draft models.

Attention kernels split a long prefix into parts (split-K), which only long prompts can test. Requests with unlike
draft models may share pages of the target, but not pages of their drafts.
"""

from collections.abc import Iterator

from properties.strategies.seen import Condition, Seen
from reference.session import Action

SPLIT = {"float32": 512, "float64": 512, "bfloat16": 1024, "float16": 1024}
"""Least columns of a prefix that our kernel splits on a GPU, by working dtype (`triton_launch.plan_for_gpu`).

No kernel takes float64; such a case counts as one in float32.
"""

INTERPRETED = 128
"""Least columns of a prefix that our kernel splits under Triton's interpreter (`triton_launch.plan_for_cpu`)."""


def _columns(of: Seen) -> int:
    """Columns of the longest prompt of any request, without the pending root."""
    return max(len(one.prefix) for one in of.requests)


def _lanes(of: Seen) -> Iterator[tuple[int, int]]:
    """For each step of several requests: how many have a prefix that a GPU splits, how many a shorter one."""
    least = SPLIT[of.case.dtype]
    far = {number for number, one in enumerate(of.requests) if len(one.prefix) >= least}
    return ((len(far.intersection(batch)), len(set(batch) - far)) for batch in of.batches)


def _drafts_unlike(of: Seen, one: int, other: int) -> bool:
    """Whether both requests have a model draft, and the draft models differ."""
    mine, theirs = of.requests[one].draft, of.requests[other].draft
    return mine.model is not None and theirs.model is not None and mine.model != theirs.model


def _steps(later: tuple[Action, ...], request: int) -> bool:
    """Whether `request` takes a step among the actions."""
    return any(action.kind == "step" and request in action.requests for action in later)


def _forks(of: Seen) -> Iterator[int]:
    """Requests over pages that are forked from a request with another draft model, and step later."""
    entered: set[int] = set()
    for at, action in enumerate(of.actions if of.case.layout.traits.pages else ()):
        if action.kind == "add":
            entered |= set(action.requests)
        elif action.kind == "fork" and action.requests[0] in entered and action.requests[1] not in entered:
            source, twin = action.requests
            entered.add(twin)
            if _drafts_unlike(of, source, twin) and _steps(of.actions[at + 1 :], twin):
                yield twin


def _meets(of: Seen) -> Iterator[int]:
    """Requests that share the first page with a cancelled one of another draft model, and step later."""
    entered: set[int] = set()
    left: list[int] = []
    size = of.case.layout.page_size
    for at, action in enumerate(of.actions if of.case.layout.traits.keeps_prefixes else ()):
        who = action.requests[0]
        if action.kind == "cancel" and who in entered:
            left.append(who)
        elif action.kind == "add" and who not in entered:
            entered.add(who)
            mine = of.requests[who].prefix[:size]
            alike = [one for one in left if len(mine) == size and of.requests[one].prefix[:size] == mine]
            # Wrong pages of the draft show only in a later step.
            if any(_drafts_unlike(of, who, one) for one in alike) and _steps(of.actions[at + 1 :], who):
                yield who


FAR = (
    *(
        Condition(f"prefix of {least} columns", f"A prompt's prefix has {least} columns or more.",
                  lambda of, least=least: _columns(of) >= least)  # type: ignore[misc]
        for least in (512, 1024, 2048)
    ),
    Condition("split-K under the interpreter", "A prefix so long that the interpreted kernel splits it.",
              lambda of: _columns(of) >= INTERPRETED),
    Condition("split-K on a GPU", "A prefix so long that the kernel on a GPU splits it in the case's dtype.",
              lambda of: _columns(of) >= SPLIT[of.case.dtype]),
    Condition("two lanes split", "One step of two requests whose prefixes are all split on a GPU.",
              lambda of: any(split > 1 for split, _ in _lanes(of))),
    Condition("two lanes split beside a short one", "The same, and a request in that step whose prefix is shorter.",
              lambda of: any(split > 1 and whole for split, whole in _lanes(of))),
    Condition("fork across draft models", "On pages, a fork that another model drafts for takes a step.",
              lambda of: any(_forks(of))),
    Condition("prefix hit across draft models", "Over a prefix cache, a request begins like one that left and that "
              "another model drafted for, and takes a step.", lambda of: any(_meets(of))),
)  # fmt: skip
"""The conditions that need long prompts or unlike draft models; `python -m tests.measure search` counts the cases."""
