"""Comparison of arrays row by row, within noise, and the findings that result.

Invariants call these functions on attention outputs, logits and committed KV. `error` is the noise of rule N.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from properties.tolerance.amplification import MAX_AMPLIFICATION, ROWS, excuses_row
from properties.tolerance.closeness import Noise, chain, kv_case, rows_beyond
from properties.tolerance.entries import entries_beyond, largest
from properties.verdict.finding import Compared, Finding, Reads
from properties.verdict.invariant import Fact, Oracle, Unobserved
from reference.case import Case
from reference.trace import Array, Kv, Stage, Step


def placed(fact: Fact, step: int | None = None, **where: int | str) -> Fact:
    """A finding moved to `step`, if given, with `where` added to its coordinates; any other fact unchanged."""
    if not isinstance(fact, Finding):
        return fact
    return replace(fact, step=fact.step if step is None else step, where={**fact.where, **where})


def rows_of(array: Array) -> int:
    """The number of rows along the last axis, which is the unit of `Compared`."""
    return array.size // array.shape[-1] if array.size else 0


def read_by(
    error: Noise, step: Step, node: int, limit: float, pick: Callable[[Step], Array | None], before: int | None = None
) -> Reads | None:
    """What a difference at `node` of `step` reads, of the oracle's step that `pick` is asked of."""
    if step.drafted is None:
        return None
    control, context, tree = error.amplification.control, step.context, step.drafted.tree
    rebased = control.rebased(context, tree)
    return Reads(control, context, tree, node, before, limit, lambda oracle: pick(oracle(rebased).steps[0]))


def attended_of(step: Step, place: tuple[int, int, int]) -> Array | None:
    """The attention output at `place` (layer, head, node) of `step`."""
    return None if step.attended is None else np.asarray(step.attended.output[place])


def logits_of(step: Step, node: int) -> Array | None:
    """The logits at `node` of `step`."""
    return None if step.scored is None else np.asarray(step.scored.logits[node])


def attended_beyond(name: str, number: int, step: Step, true: Array, error: Noise) -> Iterator[Finding | Compared]:
    """A finding at the worst row of the first layer whose attention outputs [layers, heads, nodes, D] are wrong."""
    assert step.attended is not None
    seen = step.attended.output
    yield Compared(rows_of(true))
    if seen.shape != true.shape:
        yield Finding(name, Stage.ATTENDED, number, {"side": "shape"}, str(true.shape), str(seen.shape))
        return
    # Later layers compute on the wrong one's output, so that only the first locates the fault.
    met = False
    for layer in range(len(true)):
        if met:
            return
        limit = error.inner_limit("attended", layer)
        for (head, node), measure in rows_beyond(seen[layer], true[layer], limit):
            if error.amplification.excuses_attended(step, (layer, head, node), measure, measure * limit):
                continue
            where: dict[str, int | str] = {"layer": layer, "head": head, "node": node}
            yield Finding(
                name,
                Stage.ATTENDED,
                number,
                where,
                brief(true[layer, head, node]),
                brief(seen[layer, head, node]),
                measure,
                reads=_attended_reads(error, step, (layer, head, node), limit),
            )
            met = True
            if not error.mixing:  # where experts may explain the worst row, the others of the layer are shown too
                return
        sigma = error.sigma_of("attended", layer)
        for (head, node, channel), measure in () if met else entries_beyond(seen[layer], true[layer], sigma):
            values = float(true[layer, head, node, channel]), float(seen[layer, head, node, channel])
            away, place = abs(values[1] - values[0]), (layer, head, node)
            if error.amplification.excuses_entry(step, place, away, true.shape[-1]):
                continue
            where = {"layer": layer, "head": head, "node": node, "channel": channel}
            reads = _attended_reads(error, step, place, away / measure, channel)
            yield Finding(name, Stage.ATTENDED, number, where, *values, measure, reads=reads)
            met = True
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


def logits_beyond(name: str, number: int, step: Step, true: Array, error: Noise) -> Iterator[Finding | Compared]:
    """Findings for nodes of step `number` whose logits lie too far from `true` [nodes, V], worst first."""
    assert step.scored is not None
    seen = step.scored.logits
    yield Compared(rows_of(true))
    if seen.shape != true.shape:
        yield Finding(name, Stage.SCORED, number, {"side": "shape"}, str(true.shape), str(seen.shape))
        return
    wrong_nodes = set()
    for (node,), measure in rows_beyond(seen, true, error.logits_limit()):
        if error.excuses(step, node, measure):
            continue
        wrong_nodes.add(node)
        token = int(np.nan_to_num(np.abs(seen[node] - true[node]), nan=np.inf).argmax())
        where: dict[str, int | str] = {"node": node, "token": token}
        reads = _logits_reads(error, step, node, error.logits_limit())
        values = float(true[node, token]), float(seen[node, token])
        yield Finding(name, Stage.SCORED, number, where, *values, measure, reads=reads)
    for (node, token), measure in entries_beyond(seen, true, error.sigma_of("logits")):
        values = float(true[node, token]), float(seen[node, token])
        away = abs(values[1] - values[0])
        if node in wrong_nodes or error.amplification.excuses_entry(step, (node,), away, true.shape[-1]):
            continue
        reads = _logits_reads(error, step, node, away / measure, token)
        yield Finding(name, Stage.SCORED, number, {"node": node, "token": token}, *values, measure, reads=reads)


def compared(
    name: str, base: Step, other: Step, rows: list[int], others: list[int], error: Noise, variant: str
) -> Iterator[Finding | Compared]:
    """Findings where node `others[i]` of the variant differs from node `rows[i]` of the base.

    Two runs of one backend each have an error, so the bound is the noise of a pair of runs.

    Raises:
        Unobserved: One of the two does not reveal its logits.
    """
    if base.scored is None or other.scored is None:
        raise Unobserved("the backend does not reveal the logits of both runs")
    where: dict[str, int | str] = {"variant": variant}
    # If the variant is the case itself, the subject returns the same trace: only rows that moved are compared.
    yield Compared(sum(base is not other or row != at for row, at in zip(rows, others, strict=True)))
    (attended, logits), met = error.expected(base, other, rows, others), False
    if attended is not None and other.attended is not None:
        for layer, true in enumerate(attended):
            seen = other.attended.output[layer][:, others]
            limit = 2 * error.inner_limit("attended", layer)
            for (head, at), measure in rows_beyond(seen, true, limit):
                if error.amplification.excuses_attended(base, (layer, head, rows[at]), measure, measure * limit / 2):
                    continue
                place: dict[str, int | str] = {"layer": layer, "head": head, "node": rows[at], **where}
                values = brief(true[head, at]), brief(seen[head, at])
                reads = _attended_reads(error, base, (layer, head, rows[at]), limit)
                yield Finding(name, Stage.ATTENDED, 0, place, *values, measure, reads=reads)
                met = True
                if not error.mixing:
                    return
            sigma = 2 * error.sigma_of("attended", layer)
            for (head, at, channel), measure in () if met else entries_beyond(seen, true, sigma):
                values_of = float(true[head, at, channel]), float(seen[head, at, channel])
                away, spot = abs(values_of[1] - values_of[0]), (layer, head, rows[at])
                # Each of the two runs may be half as far off.
                if error.amplification.excuses_entry(base, spot, away / 2, true.shape[-1]):
                    continue
                place = {"layer": layer, "head": head, "node": rows[at], "channel": channel, **where}
                reads = _attended_reads(error, base, spot, away / measure, channel)
                yield Finding(name, Stage.ATTENDED, 0, place, *values_of, measure, reads=reads)
                met = True
                if not error.mixing:
                    return
            if met:
                return
    wrong_rows = set()
    for (at,), measure in rows_beyond(other.scored.logits[others], logits, error.logits_limit(pair=True)):
        if error.excuses(base, rows[at], measure):
            continue
        wrong_rows.add(at)
        token = int(np.abs(other.scored.logits[others[at]] - logits[at]).argmax())
        values_at = float(logits[at, token]), float(other.scored.logits[others[at], token])
        place_at: dict[str, int | str] = {"node": rows[at], "token": token, **where}
        reads = _logits_reads(error, base, rows[at], error.logits_limit(pair=True))
        yield Finding(name, Stage.SCORED, 0, place_at, *values_at, measure, reads=reads)
    for (at, token), measure in entries_beyond(other.scored.logits[others], logits, 2 * error.sigma_of("logits")):
        values_at = float(logits[at, token]), float(other.scored.logits[others[at], token])
        away = abs(values_at[1] - values_at[0])
        if at in wrong_rows or error.amplification.excuses_entry(base, (rows[at],), away / 2, logits.shape[-1]):
            continue
        place_at = {"node": rows[at], "token": token, **where}
        reads = _logits_reads(error, base, rows[at], away / measure, token)
        yield Finding(name, Stage.SCORED, 0, place_at, *values_at, measure, reads=reads)


KvExcuses = Callable[[str, tuple[int, int, int], float], bool]
"""From a kind (`keys` or `values`), a place (layer, head, slot) and a distance to whether it is excused."""


def kv_excuses(oracle: Oracle, asked: Case, dtype: str) -> KvExcuses:
    """Excuses of rows by the conditioning of the model whose KV the oracle reveals as `before` on the case `asked`."""

    def excuses(kind: str, place: tuple[int, int, int], distance: float) -> bool:
        def ask(one: Oracle) -> Array | None:
            held = one(asked).steps[0].committed
            return None if held is None or held.before is None else getattr(held.before, kind)

        return excuses_row(oracle, ask, place, distance, dtype)

    return excuses


KvReads = Callable[[str, tuple[int, int, int], float], Reads]
"""From a kind (`keys` or `values`), a place (layer, head, slot) and a limit to what a difference there reads."""


def kv_reads(asked: Case, tokens: tuple[int, ...]) -> KvReads:
    """What differences of the columns of `tokens` read, which the oracle reveals as `before` on the case `asked`."""

    def reads(kind: str, place: tuple[int, int, int], limit: float) -> Reads:
        def row(oracle: Oracle) -> Array | None:
            held = oracle(asked).steps[0].committed
            return None if held is None or held.before is None else np.asarray(getattr(held.before, kind)[place])

        return Reads(asked, (), chain(tokens), place[2], place[0], limit, row)

    return reads


def committed_reads(error: Noise, step: Step) -> KvReads | None:
    """What differences of the columns that are committed behind `step` read."""
    if step.drafted is None or step.accepted is None or step.committed is None:
        return None
    tree = step.drafted.tree
    nodes = [node for node in step.accepted.path if 0 <= node < len(tree)]
    tokens = (*step.context, *(tree.token[node] for node in nodes))[: step.committed.length]
    return kv_reads(kv_case(error.amplification.control, tokens), tokens) if tokens else None


def kv_differs(
    name: str,
    step: int,
    true: Kv | None,
    seen: Kv | None,
    error: Noise,
    where: dict[str, int | str],
    slack: float = 1.0,
    excuses: KvExcuses | None = None,
    reads: KvReads | None = None,
) -> Iterator[Finding | Compared]:
    """A finding at the worst slot of the first layer and kind whose committed KV differs by more than the noise.

    `slack` multiplies the bound; columns that one of the two caches has let go are left out. `excuses` says of a row,
    by its kind, its place (layer, head, slot) and its distance, whether it may lie so far off all the same; no row
    beyond MOST bounds may. `reads` says what a row reads.
    """
    if true is None or seen is None:
        return
    for wanted, held in ((true.keys, seen.keys), (true.values, seen.values)):
        if wanted.shape != held.shape:
            yield Compared()
            yield Finding(name, Stage.COMMITTED, step, {"side": "shape", **where}, str(wanted.shape), str(held.shape))
            return
    yield Compared(columns_of(true, seen))
    met = False
    for layer in range(len(true.keys)):
        for kind in ("keys", "values"):
            limit = slack * error.inner_limit(kind, layer)
            # A layer with a window may have dropped its first columns in one run and not in the other.
            first = max(kv.first[layer] if kv.first else 0 for kv in (seen, true))
            held, wanted = (getattr(kv, kind)[layer][:, first:] for kv in (seen, true))
            for (head, at), measure in rows_beyond(held, wanted, limit):
                slot = at + first
                if (
                    excuses is not None
                    and measure <= MAX_AMPLIFICATION
                    and excuses(kind, (layer, head, slot), measure * limit)
                ):
                    continue
                place: dict[str, int | str] = {"layer": layer, "head": head, "slot": slot, "kind": kind[:-1], **where}
                values = brief(getattr(true, kind)[layer, head, slot]), brief(getattr(seen, kind)[layer, head, slot])
                read = None if reads is None else reads(kind, (layer, head, slot), limit)
                yield Finding(name, Stage.COMMITTED, step, place, *values, measure, reads=read)
                met = True
                if not error.mixing or reads is None:
                    return
            sigma = slack * error.sigma_of(kind, layer)
            for (head, at, channel), measure in () if met else entries_beyond(held, wanted, sigma):
                spot = layer, head, at + first
                values_of = float(wanted[head, at, channel]), float(held[head, at, channel])
                away = abs(values_of[1] - values_of[0])
                # The row may move ROWS times as far as the unit roundoff moves it, its largest entry so much farther.
                if excuses is not None and excuses(kind, spot, away * ROWS / (slack * largest(held.shape[-1]))):
                    continue
                place = {
                    "layer": layer,
                    "head": head,
                    "slot": at + first,
                    "channel": channel,
                    "kind": kind[:-1],
                    **where,
                }
                read = None if reads is None else reads(kind, spot, away / measure)
                yield Finding(name, Stage.COMMITTED, step, place, *values_of, measure, reads=read)
                met = True
                if not error.mixing or reads is None:
                    return
            if met:
                return


def columns_of(one: Kv, other: Kv) -> int:
    """The number of columns that both caches hold, summed over layers."""
    begins = [kv.first or (0,) * len(kv.keys) for kv in (one, other)]
    return sum(max(0, min(one.length, other.length) - max(pair)) for pair in zip(*begins, strict=True))


def brief(vector: Array) -> list[float]:
    """The first numbers of a row, enough to tell it from another."""
    return [float(value) for value in vector[:4]]
