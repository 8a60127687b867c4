"""The trace of all ranks: rank 0's, with the heads that the others hold."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.parallel import RankRun, kv_part
from specverify.reference.trace import Array, Kv, Step, Trace, frozen


class DraftParts(NamedTuple):
    """The ranks that have a part of a request's drafts, and the numbers of KV heads that a whole draft may have."""

    ranks: int
    heads: list[int]


def merge_traces(
    traces: Sequence[Trace], calls: Sequence[tuple[str, ...]], kv_heads: int, case: Case, number: int = 0
) -> Trace:
    """The trace of rank 0 with attention outputs and KV of all heads, and the run of each rank.

    `calls` are the collectives of each rank; `kv_heads` is the whole target's. `number` is that of the request of
    `case` whose traces these are.
    """
    first = traces[0]
    parts = _draft_parts(case, number)
    steps = tuple(
        _step([trace.steps[step] for trace in traces if step < len(trace.steps)], len(traces), kv_heads, parts)
        for step in range(len(first.steps))
    )
    shared = first.shared
    if shared is not None:
        requests = []
        for request_number, request in enumerate(shared.requests):
            ranks_requests = [trace.shared.requests[request_number] for trace in traces if trace.shared is not None]
            present = [rank_request for rank_request in ranks_requests if rank_request is not None]
            requests.append(None if request is None else merge_traces(present, calls, kv_heads, case, request_number))
        shared = replace(shared, requests=tuple(requests))
    runs = tuple(_run(trace, rank_calls) for trace, rank_calls in zip(traces, calls, strict=False))
    return replace(first, steps=steps, shared=shared, ranks=runs)


def _run(trace: Trace, calls: tuple[str, ...]) -> RankRun:
    emitted = tuple(step.emitted.tokens for step in trace.steps if step.emitted is not None)
    lengths = tuple(len(step.accepted.path) for step in trace.steps if step.accepted is not None)
    return RankRun(emitted, lengths, calls)


def _step(steps: Sequence[Step], ranks: int, kv_heads: int, draft_parts: DraftParts) -> Step:
    """The step of rank 0 with the heads of all; with its own alone where the ranks' steps differ in their rows."""
    first = steps[0]
    if len(steps) < ranks:
        return first
    outputs = [step.attended.output for step in steps if step.attended is not None]
    attended = first.attended
    if attended is not None and len(outputs) == ranks and _have_one_shape(outputs):
        attended = replace(attended, output=frozen(np.concatenate(outputs, 1)))
    committed = first.committed
    if committed is not None:
        committed_steps = [step.committed for step in steps if step.committed is not None]
        committed = replace(
            committed,
            before=_kv([part.before for part in committed_steps], kv_heads),
            verified=_kv([part.verified for part in committed_steps], kv_heads),
            after=_kv([part.after for part in committed_steps], kv_heads),
            draft=_draft_kv([part.draft for part in committed_steps[: draft_parts.ranks]], draft_parts),
        )
    return replace(first, attended=attended, committed=committed)


def _kv(parts: Sequence[Kv | None], kv_heads: int) -> Kv | None:
    present = [part for part in parts if part is not None]
    if len(present) < len(parts) or not present or not _have_one_shape([part.keys for part in present]):
        return None
    return replace(
        present[0],
        keys=_heads([part.keys for part in present], kv_heads),
        values=_heads([part.values for part in present], kv_heads),
    )


def _draft_parts(case: Case, number: int) -> DraftParts:
    """The parts of the drafts of request `number`; rank 0 alone where it has a whole draft."""
    if case.draft_ranks < 2:
        return DraftParts(1, [])
    actions = () if case.session is None else case.session.actions
    drafts = [case.alone(number).draft, *(action.draft for action in actions if number in action.requests)]
    heads = set[int]()
    for draft in drafts:
        if draft is not None and isinstance(draft.model, Seeded):
            heads.add(draft.model.architecture.kv_heads)
        elif draft is not None and draft.kv_sizes is not None and draft.kv_sizes[1] is not None:
            heads.add(draft.kv_sizes[1])
    return DraftParts(case.draft_ranks, sorted(heads))


def _draft_kv(parts: Sequence[Kv | None], draft_parts: DraftParts) -> Kv | None:
    """The draft's KV of all heads, of which there are as many as the parts fit; None where that is not known."""
    first = parts[0]
    if first is None or len(parts) == 1:
        return first
    heads = first.keys.shape[1]
    counts = [count for count in draft_parts.heads if kv_part(count, 0, len(parts)) == (0, heads)]
    return _kv(parts, counts[0]) if len(counts) == 1 else None


def _heads(parts: Sequence[Array], kv_heads: int) -> Array:
    """Arrays [layers, heads of a rank, length, width] as one of all heads; a head held twice is the first holder's."""
    ranks = len(parts)
    ranges = [kv_part(kv_heads, rank, ranks) for rank in range(ranks)]
    owners = [
        next(rank for rank in range(ranks) if ranges[rank][0] <= head < ranges[rank][1]) for head in range(kv_heads)
    ]
    return frozen(np.stack([parts[rank][:, head - ranges[rank][0]] for head, rank in enumerate(owners)], 1))


def _have_one_shape(arrays: Sequence[Array]) -> bool:
    return all(array.shape[2:] == arrays[0].shape[2:] and array.dtype == arrays[0].dtype for array in arrays)
