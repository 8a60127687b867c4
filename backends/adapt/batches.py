"""The requests of a session as one batch, for engines that batch by themselves.

A batch is what `generate_many` is asked: the requests in the order in which they enter, and what happens to them.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specverify.reference.case import Case
from specverify.reference.grammar import Grammar
from specverify.reference.session import Roster
from specverify.reference.trace import Shared, Trace

BATCH_PARAMETERS = {
    "requests": "the requests, a list of at least one `Request`, in the order in which they enter",
    "actions": 'what happens, in order: ("add", i), ("step", n) and ("cancel", i), where i is a place in `requests`',
    "engine": "as for `generate`",
    "model": "as for `generate`",
    "draft_model": "as for `generate`",
    "checkpoint": "as for `generate`",
    "draft_checkpoint": "as for `generate`",
    "setting": "the setting of `settings` in which the requests run; empty for the plain one",
}
"""The parameters that a `generate_many` may take, each with what it is given."""


@dataclass(frozen=True)
class Request:
    """A request of a batch, in the words of `specverify.backends.adapt.blackbox.PARAMETERS`.

    Settings that `generate` does not take hold their plain value.
    """

    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stops: tuple[int, ...] = ()
    grammar: Grammar | None = None


def request_of(case: Case) -> Request:
    """The request of a case without a session."""
    sampling = case.sampling
    return Request(
        list(case.prompt),
        case.stops.room(len(case.prompt)),
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seed,
        tuple(sorted({*case.stops.eos, *case.stops.stop_tokens})),
        sampling.grammar,
    )


@dataclass(frozen=True)
class Batch:
    """The requests of a session that enter, and what happens to them.

    Attributes:
        cases: Each request as the case that it would be alone, in the order in which they enter.
        numbers: Their numbers in the session.
        actions: The actions, as BATCH_PARAMETERS has them; behind the last one, requests run to their ends.
        cancelled: Places of the requests that are cancelled.
    """

    cases: tuple[Case, ...]
    numbers: tuple[int, ...]
    actions: tuple[tuple[str, int], ...]
    cancelled: frozenset[int]

    @property
    def requests(self) -> list[Request]:
        """The requests, in the order in which they enter."""
        return [request_of(case) for case in self.cases]


def batch_of(case: Case) -> Batch:
    """The batch that the session of a case is; actions that find no request to act on are left out."""
    session = case.session
    assert session is not None
    roster = Roster(1 + len(session.mates))
    numbers: list[int] = []
    actions: list[tuple[str, int]] = []
    for action in session.actions:
        if action.kind == "step":
            if actions and actions[-1][0] == "step":
                actions[-1] = ("step", actions[-1][1] + 1)
            elif roster.living:
                actions.append(("step", 1))
            continue
        for number in roster.play(action):
            if action.kind == "add":
                numbers.append(number)
            actions.append((action.kind, numbers.index(number)))
    cancelled = frozenset(place for kind, place in actions if kind == "cancel")
    return Batch(tuple(case.alone(number) for number in numbers), tuple(numbers), tuple(actions), cancelled)


def shared_trace(case: Case, batch: Batch, runs: Sequence[Trace | None]) -> Trace:
    """The trace of a session from the runs of its requests, in the order in which they entered.

    None stands for a run that nobody saw.
    """
    assert case.session is not None
    size = 1 + len(case.session.mates)
    traces: list[Trace | None] = [None] * size
    prompts: list[tuple[int, ...]] = [()] * size
    for number, alone, run in zip(batch.numbers, batch.cases, runs, strict=True):
        traces[number] = run
        prompts[number] = () if run is None else alone.prompt
    own = traces[0] or Trace((), (), None)
    return Trace(
        own.steps, own.output, own.finish, speculated=own.speculated, shared=Shared(tuple(traces), tuple(prompts))
    )


def batch_parameters_of(generate_many: Callable[..., Any]) -> frozenset[str]:
    """The names of BATCH_PARAMETERS that the function takes.

    Raises:
        TypeError: It takes no `requests`, or needs a parameter that is none of BATCH_PARAMETERS.
    """
    parameters = inspect.signature(generate_many).parameters
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    line = f"blackbox: generate_many={getattr(generate_many, '__name__', generate_many)}"
    if "requests" not in parameters:
        raise TypeError(f"{line} takes no requests")
    for parameter in parameters.values():
        is_needed = parameter.default is parameter.empty and parameter.kind not in variable
        if parameter.name not in BATCH_PARAMETERS and is_needed:
            raise TypeError(f"{line} needs {parameter.name}, which is none of {', '.join(BATCH_PARAMETERS)}")
    return frozenset(BATCH_PARAMETERS) & frozenset(parameters)
