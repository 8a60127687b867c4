"""Admission of traces and blocks: what a backend returned is rebuilt from our own types.

A refusal of a trace names the request, the step and the field.
"""

from collections.abc import Mapping
from dataclasses import replace

from specverify.backends.admission.arrays import Axis, admit_array
from specverify.backends.admission.misshapen import Misshapen, refusal
from specverify.backends.admission.numbers import TOKEN, admit_float, admit_floats, admit_int, admit_ints, admit_word
from specverify.backends.admission.sessions import admit_accounts, admit_events, admit_prompts
from specverify.backends.admission.sizes import Sizes, sizes_of
from specverify.backends.admission.stages import admit_step, finish_word, require_type
from specverify.backends.base import Declaration
from specverify.reference.case import Case
from specverify.reference.parallel import RankRun
from specverify.reference.probability_world import Blocks
from specverify.reference.session import Action
from specverify.reference.trace import Accounting, Array, Shared, Speculated, Stage, Step, TargetCalls, Trace
from specverify.reference.tree import Shape


def admit_trace(trace: object, case: Case, declaration: Declaration) -> Trace:
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
    return LiveAdmission(case, declaration).admit(trace)


class LiveAdmission:
    """The admission of one case, or of one live session: each step is checked once, however often it is shown."""

    def __init__(self, case: Case, declaration: Declaration) -> None:
        self._case = case
        self._takes_tape = declaration.takes_tape
        self._actions = () if case.session is None else case.session.actions
        self._sizes: dict[int, Sizes] = {}
        self._step_by_identity: dict[tuple[int, int], tuple[object, Step]] = {}

    def do(self, action: Action) -> None:
        """Note an action beyond the actions of the case; a switch of drafts admits the sizes of the new draft."""
        if action.draft is not None:
            self._actions = (*self._actions, action)
            # Sizes depend on the drafts that a request may have by now.
            self._sizes.clear()

    def admit(self, trace: object) -> Trace:
        """Admit a trace as `admit_trace` does; steps that were shown before, by identity, are not checked again."""
        answer = require_type("what run returned", trace, Trace)
        request_trace = self._admit_request(answer, 0)
        shared = self._admit_shared(answer.shared)
        return request_trace if shared is None else replace(request_trace, shared=shared)

    def _admit_request(self, trace: Trace, number: int) -> Trace:
        """The trace of one request, without its account of the session."""
        sizes = self._sizes_of(number)
        try:
            output = admit_ints("output", trace.output, 0, sizes.last_token, TOKEN)
            finish = finish_word("finish", trace.finish)
            prompt_logprobs = (
                None if trace.prompt_logprobs is None else admit_floats("prompt_logprobs", trace.prompt_logprobs)
            )
        except Misshapen as wrong:
            # Output and finish belong to no step; emission is the stage that makes them.
            raise Misshapen(Stage.EMITTED, wrong.why) from None
        return Trace(
            steps=self._admit_steps(trace.steps, number, sizes),
            output=output,
            finish=finish,
            accounting=None if trace.accounting is None else _admit_accounting(trace.accounting),
            forward_s=_admit_seconds("forward_s", trace.forward_s),
            fallbacks=_admit_fallbacks("fallbacks", trace.fallbacks),
            attention_calls=admit_int("attention_calls", trace.attention_calls, 0),
            speculated=None if trace.speculated is None else _admit_speculated(trace.speculated),
            ranks=admit_rank_runs(trace.ranks, self._case.ranks),
            prompt_logprobs=prompt_logprobs,
        )

    def _admit_steps(self, value: object, number: int, sizes: Sizes) -> tuple[Step, ...]:
        """Every step of a request, in order."""
        if not isinstance(value, (tuple, list)):
            raise refusal("steps", value, "a tuple of specverify.reference.trace.Step")
        return tuple(self._admit_step(step, index, number, sizes) for index, step in enumerate(value))

    def _admit_step(self, value: object, index: int, number: int, sizes: Sizes) -> Step:
        """The admitted form of a step, checked once; the original is kept too, so that no later step gets its `id`."""
        entry = self._step_by_identity.get((number, id(value)))
        if entry is not None:
            return entry[1]
        step = require_type(f"step {index}", value, Step)
        try:
            rebuilt_step = admit_step(step, sizes)
        except Misshapen as wrong:
            raise wrong.within(f"step {index}") from None
        self._step_by_identity[number, id(value)] = (value, rebuilt_step)
        return rebuilt_step

    def _admit_shared(self, value: object) -> Shared | None:
        """The part of a trace that shows all requests of a session; None for a case without a session."""
        session = self._case.session
        if session is None and value is None:
            return None
        if session is None:
            raise refusal("shared", value, "None: the case has no session")
        requests = 1 + len(session.mates)
        shared = require_type(f"shared, of a session of {requests} requests", value, Shared)
        if not isinstance(shared.requests, (tuple, list)) or len(shared.requests) != requests:
            description = f"{len(shared.requests)} traces" if isinstance(shared.requests, (tuple, list)) else ""
            raise refusal(
                "shared.requests", shared.requests, f"a trace or None for each of {requests} requests", description
            )
        traces = tuple(self._admit_member(trace, number) for number, trace in enumerate(shared.requests))
        prompts = admit_prompts(shared.prompts, self._case, traces)
        events = admit_events(shared.events, self._case)
        return Shared(traces, prompts, admit_accounts(shared.accounts, requests), events)

    def _admit_member(self, value: object, number: int) -> Trace | None:
        """The trace of one request of a session; None for a request that never entered."""
        if value is None:
            return None
        try:
            trace = require_type("its trace", value, Trace)
            if trace.shared is not None:
                raise refusal("shared", trace.shared, "None in the trace of one request")
            return self._admit_request(trace, number)
        except Misshapen as wrong:
            raise wrong.within(f"request {number}") from None

    def _sizes_of(self, number: int) -> Sizes:
        """The sizes of one request, with every draft that the request may have by now."""
        if number not in self._sizes:
            drafts = (
                action.draft for action in self._actions if action.draft is not None and number in action.requests
            )
            alone = self._case if self._case.session is None else self._case.alone(number)
            self._sizes[number] = sizes_of(
                alone, self._takes_tape, tuple(draft for draft in drafts if draft is not None)
            )
        return self._sizes[number]


def _admit_accounting(value: object) -> Accounting:
    """The counters as ints; invariants judge their values."""
    accounting = require_type("accounting", value, Accounting)
    names = ("verify_calls", "draft_calls", "proposed", "accepted", "rejected")
    counters = {name: admit_int(f"accounting.{name}", getattr(accounting, name)) for name in names}
    lengths = admit_ints("accounting.accept_lengths", accounting.accept_lengths)
    calls = accounting.target_calls
    target_calls = None if calls is None else _admit_target_calls(calls)
    return Accounting(**counters, accept_lengths=lengths, target_calls=target_calls)


def _admit_target_calls(value: object) -> TargetCalls:
    """The forwards of the target as ints."""
    calls = require_type("accounting.target_calls", value, TargetCalls)
    names = ("prefill", "decode", "verify")
    return TargetCalls(
        **{name: admit_int(f"accounting.target_calls.{name}", getattr(calls, name), 0) for name in names}
    )


def _admit_speculated(value: object) -> Speculated:
    """The counts of drafted tokens, of which no more than all are accepted."""
    speculated = require_type("speculated", value, Speculated)
    proposed = admit_int("speculated.proposed", speculated.proposed, 0)
    accepted = admit_int("speculated.accepted", speculated.accepted, 0)
    if accepted > proposed:
        raise refusal("speculated.accepted", accepted, f"at most the {proposed} proposed")
    by_position = admit_ints("speculated.by_position", speculated.by_position)
    if by_position and sum(by_position) != accepted:
        raise refusal("speculated.by_position", by_position, f"counts that add up to the {accepted} accepted")
    return Speculated(proposed, accepted, by_position)


def _admit_seconds(field: str, value: object) -> float:
    """Finite seconds of at least 0."""
    seconds = admit_float(field, value, finite=True)
    if seconds < 0:
        raise refusal(field, seconds, "seconds of at least 0")
    return seconds


def _admit_fallbacks(field: str, value: object) -> dict[str, int]:
    """The number of fallbacks by reason, each at least 0."""
    if not isinstance(value, Mapping):
        raise refusal(field, value, "a dict of counts by reason")
    return {
        admit_word(f"{field}'s reason", why): admit_int(f"{field}[{why!r}]", count, 0) for why, count in value.items()
    }


def admit_rank_runs(value: object, ranks: int) -> tuple[RankRun, ...] | None:
    """The run of each of `ranks` ranks; None for a backend that does not show them.

    Raises:
        Misshapen: for a wrong number of runs, or a field of a wrong type.
    """
    if value is None:
        return None
    if not isinstance(value, (tuple, list)) or len(value) != ranks:
        description = f"{len(value)} runs" if isinstance(value, (tuple, list)) else ""
        raise refusal("ranks", value, f"the runs of {ranks} ranks", description)
    return tuple(_admit_run(f"ranks[{rank}]", run) for rank, run in enumerate(value))


def _admit_run(field: str, value: object) -> RankRun:
    run = require_type(field, value, RankRun)
    for name in ("tokens", "calls"):
        if not isinstance(getattr(run, name), (tuple, list)):
            raise refusal(f"{field}.{name}", getattr(run, name), "a tuple")
    tokens = tuple(
        admit_ints(f"{field}.tokens[{number}]", step, 0, None, TOKEN) for number, step in enumerate(run.tokens)
    )
    calls = tuple(admit_word(f"{field}.calls[{number}]", call) for number, call in enumerate(run.calls))
    return RankRun(tokens, admit_ints(f"{field}.lengths", run.lengths, 0), calls)


def admit_blocks(blocks: object, requests: int, shape: Shape, vocabulary: int, coins: int) -> Blocks:
    """The blocks that `ExactLaw.verify`, `rounds` or `samples` returned, as NumPy arrays.

    Args:
        blocks: The returned value, of any type.
        requests: B, the number of rows of the tape or of seeds that were given.
        shape: The tree; paths and blocks have room for its height + 1 entries.
        vocabulary: The size of the vocabulary; token ids are smaller.
        coins: The number of coins on one request's tape.

    Raises:
        Misshapen: at stage accepted, for a field of another type or shape, for a node outside the tree, and for a token
            outside the vocabulary.
    """
    try:
        answer = require_type("the tables' answer", blocks, Blocks)
        row_axes: tuple[Axis, ...] = (("requests", requests), ("height + 1", shape.height + 1))
        coin_axes: tuple[Axis, ...] = (("requests", requests), ("coins", coins))
        return Blocks(
            path=_admit_indices("path", answer.path, row_axes, len(shape), "a node"),
            tokens=_admit_indices("tokens", answer.tokens, row_axes, vocabulary, "a token"),
            low=None if answer.low is None else admit_array("low", answer.low, "float", coin_axes, read_only=False),
            high=None if answer.high is None else admit_array("high", answer.high, "float", coin_axes, read_only=False),
        )
    # The arrays know no stage; all of this answer belongs to acceptance.
    except Misshapen as wrong:
        raise Misshapen(Stage.ACCEPTED, wrong.why) from None


def _admit_indices(field: str, value: object, axes: tuple[Axis, ...], below: int, noun: str) -> Array:
    """`value` as integers from -1 to `below` - 1, where -1 marks an unused place."""
    indices = admit_array(field, value, "int", axes, read_only=False)
    if indices.size and not -1 <= indices.min() <= indices.max() < below:
        worst = int(indices.min() if indices.min() < -1 else indices.max())
        raise refusal(field, value, f"{noun} from 0 to {below - 1}, or -1 for nothing", str(worst))
    return indices
