"""Comparison of arrays row by row, within noise, and the findings that result.

Invariants call these functions on attention outputs, logits and committed KV. `error` is the noise of rule N.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from specverify.properties.tolerance.amplification import MAX_AMPLIFICATION, ROWS, excuses_row
from specverify.properties.tolerance.closeness import Noise, chain, kv_case, rows_beyond
from specverify.properties.tolerance.entries import entries_beyond, largest
from specverify.properties.verdict.finding import Comparisons, Finding, Reads
from specverify.properties.verdict.invariant import Fact, Oracle, Unobserved
from specverify.reference.case import Case
from specverify.reference.trace import Array, Kv, Stage, Step


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
    """What a difference at `node` of `step` reads, of the oracle's step that `pick` is asked of."""
    if step.drafted is None:
        return None
    control = error.amplification.control
    context = step.context
    tree = step.drafted.tree
    rebased = control.rebased(context, tree)
    return Reads(control, context, tree, node, before, limit, lambda oracle: pick(oracle(rebased).steps[0]))


def attended_of(step: Step, place: tuple[int, int, int]) -> Array | None:
    """The attention output at `place` (layer, head, node) of `step`."""
    return None if step.attended is None else np.asarray(step.attended.output[place])


def logits_of(step: Step, node: int) -> Array | None:
    """The logits at `node` of `step`."""
    return None if step.scored is None else np.asarray(step.scored.logits[node])


def attended_beyond(name: str, number: int, step: Step, true: Array, error: Noise) -> Iterator[Finding | Comparisons]:
    """A finding at the worst row of the first layer whose attention outputs [layers, heads, nodes, D] are wrong."""
    assert step.attended is not None
    observed = step.attended.output
    yield Comparisons(rows_of(true))
    if observed.shape != true.shape:
        yield Finding(name, Stage.ATTENDED, number, {"side": "shape"}, str(true.shape), str(observed.shape))
        return
    # Later layers compute on the wrong one's output, so that only the first locates the fault.
    has_finding = False
    for layer in range(len(true)):
        if has_finding:
            return
        limit = error.inner_limit("attended", layer)
        for (head, node), measure in rows_beyond(observed[layer], true[layer], limit):
            if error.amplification.excuses_attended(step, (layer, head, node), measure, measure * limit):
                continue
            where: dict[str, int | str] = {"layer": layer, "head": head, "node": node}
            yield Finding(
                name,
                Stage.ATTENDED,
                number,
                where,
                first_numbers(true[layer, head, node]),
                first_numbers(observed[layer, head, node]),
                measure,
                reads=_attended_reads(error, step, (layer, head, node), limit),
            )
            has_finding = True
            if not error.mixing:  # where experts may explain the worst row, the others of the layer are shown too
                return
        sigma = error.sigma_of("attended", layer)
        for (head, node, channel), measure in (
            () if has_finding else entries_beyond(observed[layer], true[layer], sigma)
        ):
            values = float(true[layer, head, node, channel]), float(observed[layer, head, node, channel])
            distance = abs(values[1] - values[0])
            place = (layer, head, node)
            if error.amplification.excuses_entry(step, place, distance, true.shape[-1]):
                continue
            where = {"layer": layer, "head": head, "node": node, "channel": channel}
            reads = _attended_reads(error, step, place, distance / measure, channel)
            yield Finding(name, Stage.ATTENDED, number, where, *values, measure, reads=reads)
            has_finding = True
            if not error.mixing:
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
        yield Finding(name, Stage.SCORED, number, {"side": "shape"}, str(true.shape), str(observed.shape))
        return
    wrong_nodes = set()
    for (node,), measure in rows_beyond(observed, true, error.logits_limit()):
        if error.excuses(step, node, measure):
            continue
        wrong_nodes.add(node)
        token = int(np.nan_to_num(np.abs(observed[node] - true[node]), nan=np.inf).argmax())
        where: dict[str, int | str] = {"node": node, "token": token}
        reads = _logits_reads(error, step, node, error.logits_limit())
        values = float(true[node, token]), float(observed[node, token])
        yield Finding(name, Stage.SCORED, number, where, *values, measure, reads=reads)
    for (node, token), measure in entries_beyond(observed, true, error.sigma_of("logits")):
        values = float(true[node, token]), float(observed[node, token])
        distance = abs(values[1] - values[0])
        if node in wrong_nodes or error.amplification.excuses_entry(step, (node,), distance, true.shape[-1]):
            continue
        reads = _logits_reads(error, step, node, distance / measure, token)
        yield Finding(name, Stage.SCORED, number, {"node": node, "token": token}, *values, measure, reads=reads)


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
    (attended, logits), has_finding = error.expected(base, variant_step, rows, variant_rows), False
    if attended is not None and variant_step.attended is not None:
        for layer, true in enumerate(attended):
            observed = variant_step.attended.output[layer][:, variant_rows]
            limit = 2 * error.inner_limit("attended", layer)
            for (head, index), measure in rows_beyond(observed, true, limit):
                if error.amplification.excuses_attended(base, (layer, head, rows[index]), measure, measure * limit / 2):
                    continue
                place: dict[str, int | str] = {"layer": layer, "head": head, "node": rows[index], **where}
                values = first_numbers(true[head, index]), first_numbers(observed[head, index])
                reads = _attended_reads(error, base, (layer, head, rows[index]), limit)
                yield Finding(name, Stage.ATTENDED, 0, place, *values, measure, reads=reads)
                has_finding = True
                if not error.mixing:
                    return
            sigma = 2 * error.sigma_of("attended", layer)
            for (head, index, channel), measure in () if has_finding else entries_beyond(observed, true, sigma):
                values_of = float(true[head, index, channel]), float(observed[head, index, channel])
                distance = abs(values_of[1] - values_of[0])
                spot = (layer, head, rows[index])
                # Each of the two runs may be half as far off.
                if error.amplification.excuses_entry(base, spot, distance / 2, true.shape[-1]):
                    continue
                place = {"layer": layer, "head": head, "node": rows[index], "channel": channel, **where}
                reads = _attended_reads(error, base, spot, distance / measure, channel)
                yield Finding(name, Stage.ATTENDED, 0, place, *values_of, measure, reads=reads)
                has_finding = True
                if not error.mixing:
                    return
            if has_finding:
                return
    wrong_rows = set()
    for (index,), measure in rows_beyond(
        variant_step.scored.logits[variant_rows], logits, error.logits_limit(pair=True)
    ):
        if error.excuses(base, rows[index], measure):
            continue
        wrong_rows.add(index)
        token = int(np.abs(variant_step.scored.logits[variant_rows[index]] - logits[index]).argmax())
        values_at = float(logits[index, token]), float(variant_step.scored.logits[variant_rows[index], token])
        place_at: dict[str, int | str] = {"node": rows[index], "token": token, **where}
        reads = _logits_reads(error, base, rows[index], error.logits_limit(pair=True))
        yield Finding(name, Stage.SCORED, 0, place_at, *values_at, measure, reads=reads)
    for (index, token), measure in entries_beyond(
        variant_step.scored.logits[variant_rows], logits, 2 * error.sigma_of("logits")
    ):
        values_at = float(logits[index, token]), float(variant_step.scored.logits[variant_rows[index], token])
        distance = abs(values_at[1] - values_at[0])
        if index in wrong_rows or error.amplification.excuses_entry(
            base, (rows[index],), distance / 2, logits.shape[-1]
        ):
            continue
        place_at = {"node": rows[index], "token": token, **where}
        reads = _logits_reads(error, base, rows[index], distance / measure, token)
        yield Finding(name, Stage.SCORED, 0, place_at, *values_at, measure, reads=reads)


KvExcuses = Callable[[str, tuple[int, int, int], float], bool]
"""From a kind (`keys` or `values`), a place (layer, head, slot) and a distance to whether it is excused."""


def kv_excuses(oracle: Oracle, source_case: Case, dtype: str) -> KvExcuses:
    """Excuses of rows by the conditioning of the model whose KV the oracle reveals as `before` on `source_case`."""

    def excuses(kind: str, place: tuple[int, int, int], distance: float) -> bool:
        def ask(reference: Oracle) -> Array | None:
            commit = reference(source_case).steps[0].committed
            return None if commit is None or commit.before is None else getattr(commit.before, kind)

        return excuses_row(oracle, ask, place, distance, dtype)

    return excuses


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

    `slack` multiplies the bound; columns that one of the two caches has let go are left out. `excuses` says of a row,
    by its kind, its place (layer, head, slot) and its distance, whether it may lie so far off all the same; no row
    beyond MAX_AMPLIFICATION bounds may. `reads` says what a row reads.
    """
    if true is None or observed is None:
        return
    for expected_rows, observed_rows in ((true.keys, observed.keys), (true.values, observed.values)):
        if expected_rows.shape != observed_rows.shape:
            yield Comparisons()
            yield Finding(
                name,
                Stage.COMMITTED,
                step,
                {"side": "shape", **where},
                str(expected_rows.shape),
                str(observed_rows.shape),
            )
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
                    and excuses(kind, (layer, head, slot), measure * limit)
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
                if not error.mixing or reads is None:
                    return
            sigma = slack * error.sigma_of(kind, layer)
            for (head, index, channel), measure in (
                () if has_finding else entries_beyond(observed_rows, expected_rows, sigma)
            ):
                spot = layer, head, index + first
                values_of = float(expected_rows[head, index, channel]), float(observed_rows[head, index, channel])
                distance = abs(values_of[1] - values_of[0])
                # The row may move ROWS times as far as the unit roundoff moves it, its largest entry so much farther.
                if excuses is not None and excuses(
                    kind, spot, distance * ROWS / (slack * largest(observed_rows.shape[-1]))
                ):
                    continue
                place = {
                    "layer": layer,
                    "head": head,
                    "slot": index + first,
                    "channel": channel,
                    "kind": kind[:-1],
                    **where,
                }
                read = None if reads is None else reads(kind, spot, distance / measure)
                yield Finding(name, Stage.COMMITTED, step, place, *values_of, measure, reads=read)
                has_finding = True
                if not error.mixing or reads is None:
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
