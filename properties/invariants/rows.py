"""Comparison of arrays row by row, within noise, and the findings that result.

Invariants call these functions on attention outputs, logits and committed KV. `error` is the noise of rule N.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from specverify.properties.tolerance.amplification import (
    MAX_AMPLIFICATION,
    ROWS,
    excuses_channel_of_rows,
    excuses_row,
)
from specverify.properties.tolerance.bounds import entries_beyond, largest, rotation_error
from specverify.properties.tolerance.closeness import Noise, chain, kv_case, rows_beyond
from specverify.properties.verdict.finding import Comparisons, Finding, Reads
from specverify.properties.verdict.invariant import Fact, Oracle, Unobserved
from specverify.reference.case import Case
from specverify.reference.trace import Array, Kv, Stage, Step, Trace


def with_place(fact: Fact, step: int | None = None, **where: int | str) -> Fact:
    """A finding moved to `step`, if given, with `where` added to its coordinates; any other fact unchanged."""
    if not isinstance(fact, Finding):
        return fact
    return replace(fact, step=fact.step if step is None else step, where={**fact.where, **where})


def rows_of(array: Array) -> int:
    """The number of rows along the last axis, which is the unit of `Comparisons`."""
    return array.size // array.shape[-1] if array.size else 0


def read_by(
    error: Noise, step: Step, node: int, limit: float, pick: Callable[[Step], Array | None], before: int | None = None
) -> Reads | None:
    """What a difference at `node` of `step` reads, of the oracle's step that `pick` is asked of.

    `before` is the layer of a row of attention outputs; None for rows behind all layers.
    """
    if step.drafted is None:
        return None
    control = error.amplification.control
    context = step.context
    tree = step.drafted.tree
    rebased = control.rebased(context, tree)

    def row(oracle: Callable[[Case], Trace]) -> Array | None:
        return pick(oracle(rebased).steps[0])

    return Reads(control, context, tree, node, before, limit, row, attends=before is not None)


def attended_of(step: Step, place: tuple[int, int, int]) -> Array | None:
    """The attention output at `place` (layer, head, node) of `step`."""
    return None if step.attended is None else np.asarray(step.attended.output[place])


def logits_of(step: Step, node: int) -> Array | None:
    """The logits at `node` of `step`."""
    return None if step.scored is None else np.asarray(step.scored.logits[node])


def shape_finding(
    name: str, stage: Stage, number: int, true: Array, observed: Array, where: dict[str, int | str] | None = None
) -> Finding:
    """The finding that an array has another shape than it must have."""
    return Finding(name, stage, number, {"side": "shape", **(where or {})}, str(true.shape), str(observed.shape))


def attended_beyond(name: str, number: int, step: Step, true: Array, error: Noise) -> Iterator[Finding | Comparisons]:
    """A finding at the worst row of the first layer whose attention outputs [layers, heads, nodes, D] are wrong."""
    assert step.attended is not None
    observed = step.attended.output
    yield Comparisons(rows_of(true))
    if observed.shape != true.shape:
        yield shape_finding(name, Stage.ATTENDED, number, true, observed)
        return
    pairs = zip(observed, true, strict=True)
    yield from _attended_findings(name, number, step, pairs, range(true.shape[2]), error, 1.0, {})


def _attended_findings(
    name: str,
    number: int,
    step: Step,
    pairs: Iterable[tuple[Array, Array]],
    nodes: Sequence[int],
    error: Noise,
    slack: float,
    where: dict[str, int | str],
) -> Iterator[Finding]:
    """Findings in the first layer whose attention outputs [heads, rows, D] are wrong: pairs of observed and true.

    Row i is that of node `nodes[i]` of `step`. `slack` multiplies the bound. Later layers compute on the wrong one's
    output, so that only the first locates the fault; where ties may explain its worst row, the others are shown too.
    """
    for layer, (observed, true) in enumerate(pairs):
        has_finding = False
        limit = slack * error.inner_limit("attended", layer)
        for (head, row), measure in rows_beyond(observed, true, limit):
            spot = (layer, head, nodes[row])
            if error.amplification.excuses_attended(step, spot, measure, measure * limit / slack):
                continue
            place: dict[str, int | str] = {"layer": layer, "head": head, "node": nodes[row], **where}
            numbers = first_numbers(true[head, row]), first_numbers(observed[head, row])
            reads = _attended_reads(error, step, spot, limit)
            yield Finding(name, Stage.ATTENDED, number, place, *numbers, measure, reads=reads)
            has_finding = True
            if not error.choosing:
                return
        sigma = slack * error.sigma_of("attended", layer)
        for (head, row, channel), measure in () if has_finding else entries_beyond(observed, true, sigma):
            spot = (layer, head, nodes[row])
            values = float(true[head, row, channel]), float(observed[head, row, channel])
            distance = abs(values[1] - values[0])
            if error.amplification.excuses_entry(step, spot, distance / slack, true.shape[-1]):
                continue
            errors = observed[head, row] - true[head, row]
            if measure <= MAX_AMPLIFICATION and error.amplification.excuses_channel(step, spot, errors, channel):
                continue
            place = {"layer": layer, "head": head, "node": nodes[row], "channel": channel, **where}
            reads = _attended_reads(error, step, spot, distance / measure, channel)
            yield Finding(name, Stage.ATTENDED, number, place, *values, measure, reads=reads)
            has_finding = True
            if not error.choosing:
                return
        if has_finding:
            return


def _attended_reads(
    error: Noise, step: Step, place: tuple[int, int, int], limit: float, entry: int | None = None
) -> Reads | None:
    return read_by(error, step, place[2], limit, lambda true: _single(attended_of(true, place), entry), place[0])


def _logits_reads(error: Noise, step: Step, node: int, limit: float, entry: int | None = None) -> Reads | None:
    return read_by(error, step, node, limit, lambda true: _single(logits_of(true, node), entry))


def _single(row: Array | None, entry: int | None) -> Array | None:
    """The row, or one entry of it as a row."""
    return row if row is None or entry is None else row[entry : entry + 1]


def logits_beyond(name: str, number: int, step: Step, true: Array, error: Noise) -> Iterator[Finding | Comparisons]:
    """Findings for nodes of step `number` whose logits lie too far from `true` [nodes, V], worst first."""
    assert step.scored is not None
    observed = step.scored.logits
    yield Comparisons(rows_of(true))
    if observed.shape != true.shape:
        yield shape_finding(name, Stage.SCORED, number, true, observed)
        return
    yield from _logits_findings(name, number, step, observed, true, range(len(true)), error, pair=False, where={})


def _logits_findings(
    name: str,
    number: int,
    step: Step,
    observed: Array,
    true: Array,
    nodes: Sequence[int],
    error: Noise,
    *,
    pair: bool,
    where: dict[str, int | str],
) -> Iterator[Finding]:
    """Findings for rows of logits [rows, V] too far from `true`; row i is that of node `nodes[i]` of `step`."""
    wrong_rows = set()
    limit = error.logits_limit(pair=pair)
    for (row,), measure in rows_beyond(observed, true, limit):
        if error.excuses(step, nodes[row], measure):
            continue
        wrong_rows.add(row)
        token = int(np.nan_to_num(np.abs(observed[row] - true[row]), nan=np.inf).argmax())
        values = float(true[row, token]), float(observed[row, token])
        place: dict[str, int | str] = {"node": nodes[row], "token": token, **where}
        reads = _logits_reads(error, step, nodes[row], limit)
        yield Finding(name, Stage.SCORED, number, place, *values, measure, reads=reads)
    slack = 2.0 if pair else 1.0
    for (row, token), measure in entries_beyond(observed, true, slack * error.sigma_of("logits")):
        values = float(true[row, token]), float(observed[row, token])
        distance = abs(values[1] - values[0])
        if row in wrong_rows or error.amplification.excuses_entry(
            step, (nodes[row],), distance / slack, true.shape[-1]
        ):
            continue
        place = {"node": nodes[row], "token": token, **where}
        reads = _logits_reads(error, step, nodes[row], distance / measure, token)
        yield Finding(name, Stage.SCORED, number, place, *values, measure, reads=reads)


def compare_rows(
    name: str, base: Step, variant_step: Step, rows: list[int], variant_rows: list[int], error: Noise, variant: str
) -> Iterator[Finding | Comparisons]:
    """Findings where node `variant_rows[i]` of the variant differs from node `rows[i]` of the base.

    Two runs of one backend each have an error, so the bound is the noise of a pair of runs.

    Raises:
        Unobserved: One of the two does not reveal its logits.
    """
    if base.scored is None or variant_step.scored is None:
        raise Unobserved("the backend does not reveal the logits of both runs")
    where: dict[str, int | str] = {"variant": variant}
    # If the variant is the case itself, the subject returns the same trace: only rows that moved are compared.
    yield Comparisons(
        sum(base is not variant_step or row != variant_row for row, variant_row in zip(rows, variant_rows, strict=True))
    )
    attended, logits = error.expected(base, variant_step, rows, variant_rows)
    if attended is not None and variant_step.attended is not None:
        outputs = (layer[:, variant_rows] for layer in variant_step.attended.output)
        has_finding = False
        for finding in _attended_findings(name, 0, base, zip(outputs, attended, strict=False), rows, error, 2.0, where):
            has_finding = True
            yield finding
        if has_finding:
            return
    observed = variant_step.scored.logits[variant_rows]
    yield from _logits_findings(name, 0, base, observed, logits, rows, error, pair=True, where=where)


@dataclass(frozen=True)
class KvExcuses:
    """Excuses of rows by the conditioning of the model whose KV the oracle reveals as `before` on `source_case`.

    A row has a kind (`keys` or `values`) and a place (layer, head, slot).
    """

    oracle: Oracle
    source_case: Case
    dtype: str

    def excuses_row(self, kind: str, place: tuple[int, int, int], distance: float) -> bool:
        """Whether the row may be as far off as `distance`, in rms."""
        return excuses_row(self.oracle, lambda oracle: self._columns(oracle, kind), place, distance, self.source_case)

    def excuses_channel(self, kind: str, place: tuple[int, int, int], errors: Array, channel: int) -> bool:
        """Whether the row's error in one channel is as large as the others', by how far the head's channels move."""

        def ask(oracle: Oracle) -> Array | None:
            columns = self._columns(oracle, kind)
            return None if columns is None else np.asarray(columns[place[:2]])

        return excuses_channel_of_rows(self.oracle, ask, errors, channel, self.dtype)

    def _columns(self, oracle: Oracle, kind: str) -> Array | None:
        commit = oracle(self.source_case).steps[0].committed
        return None if commit is None or commit.before is None else getattr(commit.before, kind)


KvReads = Callable[[str, tuple[int, int, int], float], Reads]
"""From a kind (`keys` or `values`), a place (layer, head, slot) and a limit to what a difference there reads."""


def kv_reads(source_case: Case, tokens: tuple[int, ...]) -> KvReads:
    """The reads behind differences of the columns of `tokens`, which the oracle shows as `before` of `source_case`."""

    def reads(kind: str, place: tuple[int, int, int], limit: float) -> Reads:
        def row(oracle: Oracle) -> Array | None:
            commit = oracle(source_case).steps[0].committed
            return None if commit is None or commit.before is None else np.asarray(getattr(commit.before, kind)[place])

        return Reads(source_case, (), chain(tokens), place[2], place[0], limit, row)

    return reads


def committed_reads(error: Noise, step: Step) -> KvReads | None:
    """The reads behind differences of the columns that are committed behind `step`."""
    if step.drafted is None or step.accepted is None or step.committed is None:
        return None
    tree = step.drafted.tree
    nodes = [node for node in step.accepted.path if 0 <= node < len(tree)]
    tokens = (*step.context, *(tree.token[node] for node in nodes))[: step.committed.length]
    return kv_reads(kv_case(error.amplification.control, tokens), tokens) if tokens else None


def compare_kv(
    name: str,
    step: int,
    true: Kv | None,
    observed: Kv | None,
    error: Noise,
    where: dict[str, int | str],
    slack: float = 1.0,
    excuses: KvExcuses | None = None,
    reads: KvReads | None = None,
) -> Iterator[Finding | Comparisons]:
    """A finding at the worst slot of the first layer and kind whose committed KV differs by more than the noise.

    `slack` multiplies the bound; columns that one of the two caches has let go are left out. `excuses` says of a row
    whether it may lie so far off all the same; no row beyond MAX_AMPLIFICATION bounds may. `reads` says what a row
    reads.
    """
    if true is None or observed is None:
        return
    for expected_rows, observed_rows in ((true.keys, observed.keys), (true.values, observed.values)):
        if expected_rows.shape != observed_rows.shape:
            yield Comparisons()
            yield shape_finding(name, Stage.COMMITTED, step, expected_rows, observed_rows, where)
            return
    yield Comparisons(common_columns(true, observed))
    has_finding = False
    for layer in range(len(true.keys)):
        for kind in ("keys", "values"):
            limit = slack * error.inner_limit(kind, layer)
            # A layer with a window may have dropped its first columns in one run and not in the other.
            first = max(kv.first[layer] if kv.first else 0 for kv in (observed, true))
            observed_rows, expected_rows = (getattr(kv, kind)[layer][:, first:] for kv in (observed, true))
            for (head, index), measure in rows_beyond(observed_rows, expected_rows, limit):
                slot = index + first
                if (
                    excuses is not None
                    and measure <= MAX_AMPLIFICATION
                    and excuses.excuses_row(kind, (layer, head, slot), measure * limit)
                ):
                    continue
                place: dict[str, int | str] = {"layer": layer, "head": head, "slot": slot, "kind": kind[:-1], **where}
                values = (
                    first_numbers(getattr(true, kind)[layer, head, slot]),
                    first_numbers(getattr(observed, kind)[layer, head, slot]),
                )
                read = None if reads is None else reads(kind, (layer, head, slot), limit)
                yield Finding(name, Stage.COMMITTED, step, place, *values, measure, reads=read)
                has_finding = True
                if not error.choosing or reads is None:
                    return
            sigma = slack * error.sigma_of(kind, layer)
            granted = rotation_error(expected_rows, first, error.dtype) if kind == "keys" else 0.0
            for (head, index, channel), measure in (
                () if has_finding else entries_beyond(observed_rows, expected_rows, sigma, granted)
            ):
                spot = layer, head, index + first
                values_of = float(expected_rows[head, index, channel]), float(observed_rows[head, index, channel])
                distance = abs(values_of[1] - values_of[0])
                errors = observed_rows[head, index] - expected_rows[head, index]
                # The row may move ROWS times as far as the unit roundoff moves it, its largest entry so much farther.
                if excuses is not None and (
                    excuses.excuses_row(kind, spot, distance * ROWS / (slack * largest(len(errors))))
                    or (measure <= MAX_AMPLIFICATION and excuses.excuses_channel(kind, spot, errors, channel))
                ):
                    continue
                coordinates = {"layer": layer, "head": head, "slot": index + first, "channel": channel}
                place = {**coordinates, "kind": kind[:-1], **where}
                read = None if reads is None else reads(kind, spot, distance / measure)
                yield Finding(name, Stage.COMMITTED, step, place, *values_of, measure, reads=read)
                has_finding = True
                if not error.choosing or reads is None:
                    return
            if has_finding:
                return


def common_columns(first: Kv, second: Kv) -> int:
    """The number of columns that both caches hold, summed over layers."""
    begins = [kv.first or (0,) * len(kv.keys) for kv in (first, second)]
    return sum(max(0, min(first.length, second.length) - max(pair)) for pair in zip(*begins, strict=True))


def first_numbers(vector: Array) -> list[float]:
    """The first numbers of a row, enough to tell it from another."""
    return [float(value) for value in vector[:4]]
