"""Admission of traces: the answer of `run` is rebuilt from our own types.

A refusal names the request, the step and the field.
"""

from collections.abc import Mapping
from dataclasses import replace

from backends.admission.misshapen import Misshapen, refusal
from backends.admission.numbers import TOKEN, real, reals, whole, wholes, word
from backends.admission.ranks import admitted_ranks
from backends.admission.sessions import admitted_accounts, admitted_events, admitted_prompts
from backends.admission.sizes import Sizes, sizes_of
from backends.admission.stages import admitted_step, finish_word, ours
from backends.base import Declaration
from reference.case import Case
from reference.session import Action
from reference.trace import Accounting, Shared, Speculated, Stage, Step, Trace


def admitted(trace: object, case: Case, declaration: Declaration) -> Trace:
    """The answer of `backend.run(case)` as a Trace of exactly our own types, with read-only arrays.

    Lists, tuples, arrays of other widths and tensors of any device are converted where their shape is right. A stage
    that is None stays unrevealed; a stage that the declaration does not name is admitted like the others. Values are
    not judged: NaN, a wrong path and a wrong mask cell pass.

    Args:
        trace: The returned value, of any type.
        case: The case that was run.
        declaration: The backend's declaration.

    Raises:
        Misshapen: for the first field of a type, shape or range that no invariant could compare.
    """
    return LiveDoor(case, declaration).admit(trace)


class LiveDoor:
    """The admission of one case, or of one live session: each step is checked once, however often it is shown."""

    def __init__(self, case: Case, declaration: Declaration) -> None:
        self._case = case
        self._takes_tape = declaration.takes_tape
        self._actions = () if case.session is None else case.session.actions
        self._sizes: dict[int, Sizes] = {}
        self._seen: dict[tuple[int, int], tuple[object, Step]] = {}

    def do(self, action: Action) -> None:
        """Note an action beyond those of the case; an action that switches drafts admits the sizes of the new draft."""
        if action.draft is not None:
            self._actions = (*self._actions, action)
            # Sizes depend on the drafts that a request may have by now.
            self._sizes.clear()

    def admit(self, trace: object) -> Trace:
        """Admit a trace as `admitted` does; steps that were shown before, by identity, are not checked again."""
        one = ours("what run returned", trace, Trace)
        made = self._request(one, 0)
        shared = self._shared(one.shared)
        return made if shared is None else replace(made, shared=shared)

    def _request(self, one: Trace, number: int) -> Trace:
        """The trace of one request, without its account of the session."""
        sizes = self._sizes_of(number)
        try:
            output = wholes("output", one.output, 0, sizes.last_token, TOKEN)
            finish = finish_word("finish", one.finish)
            of_prompt = None if one.prompt_logprobs is None else reals("prompt_logprobs", one.prompt_logprobs)
        except Misshapen as wrong:
            # Output and finish belong to no step; emission is the stage that makes them.
            raise Misshapen(Stage.EMITTED, wrong.why) from None
        return Trace(
            steps=self._steps(one.steps, number, sizes),
            output=output,
            finish=finish,
            accounting=None if one.accounting is None else _accounting(one.accounting),
            forward_s=_seconds("forward_s", one.forward_s),
            fallbacks=_fallbacks("fallbacks", one.fallbacks),
            attention_calls=whole("attention_calls", one.attention_calls, 0),
            speculated=None if one.speculated is None else _speculated(one.speculated),
            ranks=admitted_ranks(one.ranks, self._case.ranks),
            prompt_logprobs=of_prompt,
        )

    def _steps(self, value: object, number: int, sizes: Sizes) -> tuple[Step, ...]:
        """Every step of a request, in order."""
        if not isinstance(value, (tuple, list)):
            raise refusal("steps", value, "a tuple of reference.trace.Step")
        return tuple(self._step(one, at, number, sizes) for at, one in enumerate(value))

    def _step(self, value: object, at: int, number: int, sizes: Sizes) -> Step:
        """The admitted form of a step, checked once; the original is kept too, so that no later step gets its `id`."""
        seen = self._seen.get((number, id(value)))
        if seen is not None:
            return seen[1]
        step = ours(f"step {at}", value, Step)
        try:
            made = admitted_step(step, sizes)
        except Misshapen as wrong:
            raise wrong.within(f"step {at}") from None
        self._seen[number, id(value)] = (value, made)
        return made

    def _shared(self, value: object) -> Shared | None:
        """The part of a trace that shows all requests of a session; None for a case without a session."""
        session = self._case.session
        if session is None and value is None:
            return None
        if session is None:
            raise refusal("shared", value, "None: the case has no session")
        requests = 1 + len(session.mates)
        one = ours(f"shared, of a session of {requests} requests", value, Shared)
        if not isinstance(one.requests, (tuple, list)) or len(one.requests) != requests:
            found = f"{len(one.requests)} traces" if isinstance(one.requests, (tuple, list)) else ""
            raise refusal("shared.requests", one.requests, f"a trace or None for each of {requests} requests", found)
        traces = tuple(self._member(trace, number) for number, trace in enumerate(one.requests))
        prompts = admitted_prompts(one.prompts, self._case, traces)
        events = admitted_events(one.events, self._case)
        return Shared(traces, prompts, admitted_accounts(one.accounts, requests), events)

    def _member(self, value: object, number: int) -> Trace | None:
        """The trace of one request of a session; None for a request that never entered."""
        if value is None:
            return None
        try:
            one = ours("its trace", value, Trace)
            if one.shared is not None:
                raise refusal("shared", one.shared, "None in the trace of one request")
            return self._request(one, number)
        except Misshapen as wrong:
            raise wrong.within(f"request {number}") from None

    def _sizes_of(self, number: int) -> Sizes:
        """The sizes of one request, with every draft that the request may have by now."""
        if number not in self._sizes:
            drafts = (one.draft for one in self._actions if one.draft is not None and number in one.requests)
            alone = self._case if self._case.session is None else self._case.alone(number)
            self._sizes[number] = sizes_of(alone, self._takes_tape, tuple(one for one in drafts if one is not None))
        return self._sizes[number]


def _accounting(value: object) -> Accounting:
    """The counters as ints; invariants judge their values."""
    one = ours("accounting", value, Accounting)
    names = ("verify_calls", "draft_calls", "proposed", "accepted", "rejected")
    counted = {name: whole(f"accounting.{name}", getattr(one, name)) for name in names}
    return Accounting(**counted, accept_lengths=wholes("accounting.accept_lengths", one.accept_lengths))


def _speculated(value: object) -> Speculated:
    """The counts of drafted tokens, of which no more than all are accepted."""
    one = ours("speculated", value, Speculated)
    proposed = whole("speculated.proposed", one.proposed, 0)
    accepted = whole("speculated.accepted", one.accepted, 0)
    if accepted > proposed:
        raise refusal("speculated.accepted", accepted, f"at most the {proposed} proposed")
    return Speculated(proposed, accepted)


def _seconds(field: str, value: object) -> float:
    """Finite seconds of at least 0."""
    seconds = real(field, value, finite=True)
    if seconds < 0:
        raise refusal(field, seconds, "seconds of at least 0")
    return seconds


def _fallbacks(field: str, value: object) -> dict[str, int]:
    """The number of fallbacks by reason, each at least 0."""
    if not isinstance(value, Mapping):
        raise refusal(field, value, "a dict of counts by reason")
    return {word(f"{field}'s reason", why): whole(f"{field}[{why!r}]", count, 0) for why, count in value.items()}
