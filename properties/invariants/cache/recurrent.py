"""Invariants of recurrent state: prefills and roots compute it, and commits keep it."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from specverify.properties.invariants.cache.commits import commits
from specverify.properties.invariants.rows import first_numbers
from specverify.properties.tolerance.amplification import MAX_AMPLIFICATION, excuses_row
from specverify.properties.tolerance.bounds import INNER, UNIT
from specverify.properties.tolerance.closeness import EXACT, PRIOR, chain, kv_case
from specverify.properties.verdict.finding import Comparisons, Finding, Reads
from specverify.properties.verdict.invariant import Fact, Invariant, NotApplicable, Oracle, Unobserved, needing
from specverify.properties.verdict.subject import Subject
from specverify.properties.verdict.variants import pending_root
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.family.recurrent import RecurrentState
from specverify.reference.trace import Array, Stage

NAME = "cache.recurrent-equivalence"
ROWS = "cache.recurrent-rows"

PREFILL, ROOT = "prefill", "root"
"""Sides of a finding of ROWS: the state with which the first step begins, and the state after the root's row."""


def recurrent_rows(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """The first step begins with the recurrent state of its context, and each root's row goes on from that.

    Both are judged before any commit, so that what a prefill, a known prefix or the row of plain decode computed is not
    told as wrong attention of the layer above. Later steps begin with what the commit before them left.
    """
    looked = False
    steps = subject(case).steps
    for number, step in enumerate(steps):
        record = step.committed
        if record is None:
            continue
        rows: list[tuple[str, tuple[int, ...], RecurrentState | None]] = [
            (ROOT, (*step.context, pending_root(case, subject, number)), record.recurrent_root)
        ]
        if number == 0 and step.context:
            rows.insert(0, (PREFILL, step.context, record.recurrent_before))
        for side, tokens, state in rows:
            if state is None:
                continue
            looked = True
            for fact in _compare_state(case, oracle, number, tokens, state, {"side": side}, ROWS, Stage.ATTENDED):
                yield fact
                if isinstance(fact, Finding):
                    return
    if not steps:
        raise NotApplicable("no step was taken")
    if not looked:
        if _oracle_state(case, oracle, (*steps[0].context, case.prompt[-1])) is None:
            raise NotApplicable("the reference knows no recurrent state of the target")
        raise Unobserved("the backend does not reveal its recurrent state before commits")


def recurrent_equivalence(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """After each step, and when the next one begins, the recurrent state is that of running the emitted tokens.

    A state is a sum over a path, so that it must be that of the last accepted node, whatever the node's depth or row.
    The window of the convolution is judged by itself. Other requests of a session, evictions and forks act between
    two steps.
    """
    looked = False
    committed_tokens: tuple[int, ...] = ()
    last_commit: tuple[tuple[int, ...], RecurrentState | None] = ((), None)
    for number, tokens, record in commits(case, subject):
        committed_tokens = tokens or committed_tokens
        if last_commit[1] is not None and record.recurrent_before is not None:
            yield from _compare_state(
                case, oracle, number - 1, last_commit[0], record.recurrent_before, {"side": "between"}
            )
        last_commit = (tokens, record.recurrent)
        if record.recurrent is not None and tokens:
            looked = True
            yield from _compare_state(case, oracle, number, tokens, record.recurrent, {})
    if not committed_tokens:
        raise NotApplicable("nothing was committed")
    if not looked:
        if _oracle_state(case, oracle, committed_tokens) is None:
            raise NotApplicable("the reference knows no recurrent state of the target")
        raise Unobserved("the backend does not reveal its recurrent state")


def _oracle_state(case: Case, oracle: Oracle, tokens: tuple[int, ...]) -> RecurrentState | None:
    """The reference's recurrent state behind `tokens`."""
    record = oracle(kv_case(case, tokens)).steps[0].committed
    return None if record is None else record.recurrent_before


def _compare_state(
    case: Case,
    oracle: Oracle,
    number: int,
    tokens: tuple[int, ...],
    observed: RecurrentState,
    where: dict[str, int | str],
    name: str = NAME,
    stage: Stage = Stage.COMMITTED,
) -> Iterator[Fact]:
    """A finding at the first layer whose window or memory after `tokens` is not the oracle's."""
    true = _oracle_state(case, oracle, tokens)
    if true is None:
        raise Unobserved("the reference knows no recurrent state")
    shapes = [[array.shape for array in (*state.windows, *state.memories)] for state in (true, observed)]
    yield Comparisons(sum(shape[0] for shape in shapes[0]))
    if shapes[0] != shapes[1]:
        place: dict[str, int | str] = {**where, "side": "shape"}
        yield Finding(name, stage, number, place, str(shapes[0]), str(shapes[1]))
        return
    for layer in range(len(true.windows)):
        for kind, field in (("window", "windows"), ("memory", "memories")):
            observed_rows, expected_rows = (getattr(state, field)[layer] for state in (observed, true))
            rms_distance = distance(observed_rows, expected_rows)
            measure = rms_distance / bound(case.dtype, len(true.windows), expected_rows)
            if measure > 1 and not _is_excused(case, oracle, tokens, field, layer, rms_distance, measure):
                # A checkpoint's case names no layers: those with a recurrent state are counted among themselves.
                layer_number = case.model.architecture.recurrent[layer] if isinstance(case.model, Seeded) else layer
                row = int(
                    np.nan_to_num(np.abs(observed_rows - expected_rows), nan=np.inf)
                    .reshape(len(expected_rows), -1)
                    .max(1)
                    .argmax()
                )
                values = first_numbers(expected_rows[row].ravel()), first_numbers(observed_rows[row].ravel())
                place = {"layer": layer_number, "kind": kind, **where}
                limit = bound(case.dtype, len(true.windows), expected_rows)
                ask = partial(_state_row, case, tokens, field, layer)
                reads = Reads(case, (), chain(tokens), len(tokens) - 1, layer_number, limit, ask) if tokens else None
                yield Finding(name, stage, number, place, *values, measure, reads=reads)
                return


def _is_excused(
    case: Case, oracle: Oracle, tokens: tuple[int, ...], field: str, layer: int, rms_distance: float, measure: float
) -> bool:
    """Whether the target's conditioning explains a state that is `rms_distance`, which is `measure` times its bound."""
    return measure <= MAX_AMPLIFICATION and excuses_row(
        oracle, partial(_state_row, case, tokens, field, layer), (), rms_distance, case
    )


def _state_row(case: Case, tokens: tuple[int, ...], field: str, layer: int, oracle: Oracle) -> Array | None:
    """The windows or memories of a recurrent layer after `tokens`, in one row."""
    state = _oracle_state(case, oracle, tokens)
    return None if state is None else getattr(state, field)[layer].ravel()


def distance(observed: Array, true: Array) -> float:
    """The root mean square of the difference; infinity where it is not a number."""
    with np.errstate(over="ignore", invalid="ignore"):
        size = float(np.sqrt(np.mean(np.square(observed.astype(np.float64) - true)))) if true.size else 0.0
    return size if np.isfinite(size) else np.inf


def bound(dtype: str, layers: int, true: Array) -> float:
    """The largest rms distance that a state may have: in float64 that of rule N, else so many a-priori sigmas."""
    size = float(np.sqrt(np.mean(np.square(true)))) if true.size else 0.0
    if dtype == "float64":
        return EXACT * max(1.0, size)
    return INNER[dtype].sigmas * PRIOR[dtype][1] * float(np.sqrt(layers)) * UNIT[dtype] * max(size, 1e-2)


def _may_be_recurrent(case: Case) -> bool:
    return not isinstance(case.model, Seeded) or bool(case.model.architecture.recurrent)


INVARIANTS = (
    Invariant(
        ROWS,
        "A prefill leaves the recurrent state of its tokens, and the root's row of each step goes on from that.",
        needing(Stage.EMITTED, Stage.COMMITTED),
        recurrent_rows,
        _may_be_recurrent,
    ),
    Invariant(
        NAME,
        "The recurrent state of layers without attention is that of running the emitted tokens in sequence.",
        needing(Stage.EMITTED, Stage.COMMITTED),
        recurrent_equivalence,
        _may_be_recurrent,
    ),
)
