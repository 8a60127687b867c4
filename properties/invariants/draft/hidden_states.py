"""The invariant of the hidden states of the target that a draft reads.

The input of a draft's head is judged apart from the head: a state that is stale, shifted or taken elsewhere is named as
such, and is no drift of the head.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from specverify.properties.invariants.rows import first_numbers
from specverify.properties.tolerance.amplification import MAX_AMPLIFICATION, excuses_row
from specverify.properties.tolerance.bounds import UNIT
from specverify.properties.tolerance.closeness import EXACT, chain, rows_beyond
from specverify.properties.verdict.finding import Comparisons, Finding, Reads
from specverify.properties.verdict.followed import follow_step
from specverify.properties.verdict.invariant import Fact, Invariant, NotApplicable, Oracle, Unobserved, needing
from specverify.properties.verdict.subject import Subject
from specverify.properties.verdict.variants import pending_root
from specverify.reference.case import Case
from specverify.reference.draft.hidden import HeadInput
from specverify.reference.draft.layer_head import LayerHead
from specverify.reference.oracle.draft.head import own_rows_after
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Array, Stage, Step
from specverify.reference.tree import Tree

NAME = "draft.hidden-state-descriptor"

HIDDEN = {"float32": 360.0, "bfloat16": 60.0, "float16": 60.0}
"""Largest rms distance between a hidden state and the oracle's, in unit roundoffs times the rms of the states.

No control run measures this error. In 16 bits 81 drawn steps of clean runs came to 8.4 units at most (torch 2.13,
models of 1 to 3 layers). 360 units of bfloat16 are 1.4 times the states themselves: zeros would pass.
"""


def step_from_scratch(case: Case, oracle: Oracle, context: tuple[int, ...], tree: Tree) -> Step | None:
    """The oracle's step on `tree` after `context`, with the tree scored by the draft of `case` from scratch.

    None for a draft that can score no tree but its own.
    """
    draft = case.draft.with_fixed_tree(tree)
    if draft is None:
        return None
    stops = Stops(max_new_tokens=1)
    scratch_case = replace(
        case, draft=draft, prompt=(*context, tree.token[0]), sampling=Sampling(), stops=stops, steps=1
    )
    return oracle(scratch_case).steps[0]


def with_rows_of(case: Case, step: Step) -> Case:
    """`case` with a head that begins with the rows of `step`, where accepted nodes may keep those of the head's own."""
    draft = case.draft
    head_input = None if step.drafted is None else step.drafted.given
    if head_input is None or not isinstance(draft, LayerHead):
        return case
    if draft.alignment != "last" or not head_input.own_rows:
        return case
    # Rows that no text has are told of by `descriptor`.
    rows = tuple(row for row in sorted(set(head_input.own_rows)) if row > 0)
    return replace(case, draft=draft.with_own_rows(rows))


def descriptor(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Each row of a draft's head holds its token beside the target's state that the descriptor names."""
    next_row = 0
    own_rows: tuple[int, ...] = ()
    looked = False
    for number, step in enumerate(subject(case).steps):
        if step.drafted is None:
            continue
        pending = pending_root(case, subject, number)
        # Of a root that is not the pending one draft.fidelity tells; here the true one stands above the same tree.
        follower = follow_step(case, oracle, step)
        true = step_from_scratch(with_rows_of(case, step), follower, step.context, step.drafted.tree.with_root(pending))
        if true is None:
            raise NotApplicable("the draft of this kind can score no tree but its own")
        assert true.drafted is not None
        assert true.scored is not None
        if true.drafted.tree.parent != step.drafted.tree.parent:
            continue  # a head without a row proposes the bare root, which draft.fidelity judges
        expected_input, head_input = true.drafted.given, step.drafted.given
        if head_input is not None and expected_input is not None:
            looked = True
            rows = partial(_states_by, case, step, pending, "given")
            begin = Beginning(next_row, own_rows)
            yield from _compare_inputs(case, follower, number, begin, head_input, expected_input, rows, step.context)
            own_rows = own_rows_after(case.draft, step)
            num_kept = len(own_rows) - len(head_input.own_rows) if own_rows else 0
            next_row = head_input.first + len(head_input.tokens) + num_kept
        scored = step.scored
        states = true.scored.hidden
        if scored is not None and scored.hidden is not None and states is not None:
            looked = True
            yield Comparisons(len(states))
            rows = partial(_states_by, case, step, pending, "scored")
            for (node,), measure in _states_beyond(case, follower, scored.hidden, states, rows):
                where: dict[str, int | str] = {"node": node, "side": "scored"}
                values = first_numbers(states[node]), first_numbers(scored.hidden[node])
                tree = step.drafted.tree
                limit = _limit(case, states)
                reads = Reads(case, step.context, tree, node, None, limit, partial(_row, rows, node))
                yield Finding(NAME, Stage.SCORED, number, where, *values, measure, reads=reads)
                break
    if not looked:
        raise Unobserved("the backend does not reveal the hidden states that its draft was given")


def _states_by(case: Case, step: Step, pending: int, where: str, oracle: Oracle) -> Array | None:
    """The hidden states of `step` by `oracle`: those `given` to the head, or those of the `scored` nodes."""
    assert step.drafted is not None
    true = step_from_scratch(with_rows_of(case, step), oracle, step.context, step.drafted.tree.with_root(pending))
    if true is None or true.drafted is None or true.scored is None:
        return None
    if where == "scored":
        return true.scored.hidden
    return None if true.drafted.given is None else true.drafted.given.hidden


@dataclass(frozen=True)
class Beginning:
    """Where the rows of a step begin: the number of the row, and the rows above that hold states of the head's own."""

    row: int
    own_rows: tuple[int, ...]


def _compare_inputs(
    case: Case,
    oracle: Oracle,
    number: int,
    begin: Beginning,
    head_input: HeadInput,
    expected: HeadInput,
    rows_by: Callable[[Oracle], Array | None],
    context: tuple[int, ...],
) -> Iterator[Fact]:
    """Findings where the rows of a step do not begin at `begin`, do not end at the root's, or hold other values.

    A head whose cache was thrown away begins again at row 0, or behind the rows that it found in known pages. A head
    that keeps no rows begins at the first that `expected` holds, which is the root's.
    """
    yield Comparisons(1 + len(head_input.tokens))
    if head_input.reads != expected.reads:
        yield _finding(number, {"side": "descriptor"}, str(expected.reads), str(head_input.reads))
        return
    next_row = max(begin.row, expected.first)
    last = expected.first + len(expected.tokens)
    goes_on = head_input.first == next_row
    # Rows may be run once more where no alignment says which ones stay.
    most = max(head_input.adopted, 0 if _keeps_rows(case) else next_row)
    begins_again = expected.first <= head_input.first <= most
    if not (goes_on or begins_again) or head_input.first + len(head_input.tokens) != last:
        rows = (
            f"rows {next_row} to {last - 1}",
            f"rows {head_input.first} to {head_input.first + len(head_input.tokens) - 1}",
        )
        yield _finding(number, {"side": "rows"}, *rows)
        return
    own_rows = begin.own_rows
    if _keeps_rows(case) and not (goes_on and begin.row):
        # A fork begins with those of its source, which stand above the first row that it runs.
        own_rows = tuple(row for row in head_input.own_rows if row < head_input.first)
    if head_input.own_rows != own_rows:
        yield _finding(number, {"side": "own rows"}, own_rows, head_input.own_rows)
        return
    rows_held = slice(head_input.first - expected.first, len(expected.tokens))
    for row, (token, right) in enumerate(
        zip(head_input.tokens, expected.tokens[rows_held], strict=True), head_input.first
    ):
        if token != right:
            yield _finding(number, {"position": row, "side": "beside"}, right, token)
            return
    states = expected.hidden[rows_held]
    worst = [
        (row, measure)
        for (row,), measure in _states_beyond(case, oracle, head_input.hidden, states, rows_by, rows_held.start)
    ]
    # A state that was computed from wrong rows above is wrong as well: the first one tells where it began.
    if worst:
        row, measure = min(worst)
        where: dict[str, int | str] = {"position": head_input.first + row, "side": "state"}
        place = head_input.first + row
        if isinstance(case.draft, LayerHead):
            place = case.draft.position_of_state(place)
        text = (*context, head_input.tokens[-1])
        limit = _limit(case, states)
        ask_row = partial(_row, rows_by, rows_held.start + row)
        reads = Reads(case, (), chain(text), place, None, limit, ask_row)
        yield replace(
            _finding(number, where, first_numbers(states[row]), first_numbers(head_input.hidden[row]), measure),
            reads=reads,
        )


def _keeps_rows(case: Case) -> bool:
    """Whether rows of accepted nodes stay in the head's cache as they were run for a tree."""
    return isinstance(case.draft, LayerHead) and case.draft.alignment == "last"


def _row(rows: Callable[[Oracle], Array | None], row: int, oracle: Oracle) -> Array | None:
    """Row `row` of what `rows` says of `oracle`."""
    states = rows(oracle)
    return None if states is None or row >= len(states) else np.asarray(states[row])


def _finding(
    number: int, where: dict[str, int | str], expected: object, observed: object, measure: float | None = None
) -> Finding:
    return Finding(NAME, Stage.DRAFTED, number, where, expected, observed, measure)


def _states_beyond(
    case: Case,
    oracle: Oracle,
    observed: Array,
    true: Array,
    rows_by: Callable[[Oracle], Array | None],
    first: int = 0,
) -> Iterator[tuple[tuple[int, ...], float]]:
    """The rows of `observed` [rows, width] that lie further from `true` than the noise of the working dtype.

    Rows that the target's conditioning explains are left out; `true` begins at row `first` of what `rows_by` gives.
    """
    if not len(true):
        return
    limit = _limit(case, true)
    for (row,), measure in rows_beyond(observed, true, limit):
        is_excused = measure <= MAX_AMPLIFICATION and excuses_row(
            oracle, rows_by, (first + row,), measure * limit, case
        )
        if not is_excused:
            yield (row,), measure


def _limit(case: Case, true: Array) -> float:
    """The largest distance of a row of hidden states from the oracle's rows `true`."""
    scale = float(np.sqrt(np.mean(np.square(true))))
    return EXACT * max(1.0, scale) if case.dtype == "float64" else HIDDEN[case.dtype] * UNIT[case.dtype] * scale


INVARIANTS = (
    Invariant(
        NAME,
        "A draft is given the hidden states that its descriptor names, each beside the token that belongs to it.",
        needing(Stage.DRAFTED),
        descriptor,
        lambda case: case.draft.reads is not None,
    ),
)
