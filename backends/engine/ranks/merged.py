"""The trace of all ranks: rank 0's, with the heads that the others hold."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from specverify.reference.parallel import RankRun, kv_part
from specverify.reference.trace import Array, Kv, Step, Trace, frozen


def merge_traces(traces: Sequence[Trace], calls: Sequence[tuple[str, ...]], kv_heads: int) -> Trace:
    """The trace of rank 0 with attention outputs and target KV of all heads, and the run of each rank.

    `calls` are the collectives of each rank; `kv_heads` is the whole model's.
    """
    first = traces[0]
    steps = tuple(
        _step([trace.steps[number] for trace in traces if number < len(trace.steps)], len(traces), kv_heads)
        for number in range(len(first.steps))
    )
    shared = first.shared
    if shared is not None:
        requests = []
        for number, request in enumerate(shared.requests):
            ranks_requests = [trace.shared.requests[number] for trace in traces if trace.shared is not None]
            present = [rank_request for rank_request in ranks_requests if rank_request is not None]
            requests.append(None if request is None else merge_traces(present, calls, kv_heads))
        shared = replace(shared, requests=tuple(requests))
    runs = tuple(_run(trace, rank_calls) for trace, rank_calls in zip(traces, calls, strict=False))
    return replace(first, steps=steps, shared=shared, ranks=runs)


def _run(trace: Trace, calls: tuple[str, ...]) -> RankRun:
    emitted = tuple(step.emitted.tokens for step in trace.steps if step.emitted is not None)
    lengths = tuple(len(step.accepted.path) for step in trace.steps if step.accepted is not None)
    return RankRun(emitted, lengths, calls)


def _step(steps: Sequence[Step], ranks: int, kv_heads: int) -> Step:
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
