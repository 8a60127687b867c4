"""Ranks: the part of a target, or the requests, that each holds, and the record of its run.

Heads, inner width and vocabulary are cut into contiguous parts. Where there are fewer KV heads than ranks, several
ranks hold the same KV head (as vLLM's and SGLang's QKV projections do). In data parallelism every rank holds the whole
target, and requests are shared out by their numbers; a fork's twin follows its source, whose pages it shares.
"""

from dataclasses import dataclass

from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.draft.base import Draft
from specverify.reference.session import Session

RANKS = (1, 2, 4)
"""Numbers of ranks that a case may ask for."""

PART = "draft: "
"""The beginning of the names of collectives of the draft's ranks alone, in `RankRun.calls`."""

SHARDED = ("llama", "pangu", "qwen2", "qwen3", "mistral", "seed_oss", "smollm3")
"""Families with a sharded form: separate projections q, k, v, o, gate, up and down, and no norm over all heads."""


@dataclass(frozen=True)
class RankRun:
    """The run of one rank, as the rank itself saw it.

    Attributes:
        tokens: The tokens that each step emitted.
        lengths: The number of accepted rows of each step, the root included.
        calls: The collectives in the order in which the rank entered them, each as its name and shape. In a session
            they are those of all requests together. Those of the draft's ranks alone begin with PART.
    """

    tokens: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    calls: tuple[str, ...]


def rank_part(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """The first entry of `size` entries that `rank` holds, and the first one that it no longer holds.

    All parts but the last ones have ceil(size / ranks) entries; the last may have fewer, or none.
    """
    size_per_rank = -(-size // ranks)
    return min(rank * size_per_rank, size), min((rank + 1) * size_per_rank, size)


def kv_part(kv_heads: int, rank: int, ranks: int) -> tuple[int, int]:
    """As `rank_part`, for KV heads: with fewer of them than ranks, each is held by several ranks."""
    if kv_heads >= ranks:
        return rank_part(kv_heads, rank, ranks)
    return rank * kv_heads // ranks, rank * kv_heads // ranks + 1


def sharding_refusal(arch: Architecture, ranks: int) -> str | None:
    """Why a model of this architecture cannot run on so many ranks, or None."""
    if ranks == 1:
        return None
    if arch.family not in SHARDED:
        return f"model family {arch.family} on {ranks} ranks"
    refused = _heads_refusal(arch.heads, arch.kv_heads, ranks)
    return None if refused is None else f"model of {refused}"


def draft_refusal(draft: Draft, ranks: int) -> str | None:
    """Why a draft cannot run on so many ranks, each with a part of it, or None.

    Whether the model of a checkpoint can be cut is known once it is open.
    """
    if ranks == 1 or not draft.has_weights:
        return None
    if draft.model is not None:
        refused = sharding_refusal(draft.model.architecture, ranks) if isinstance(draft.model, Seeded) else None
        return None if refused is None else f"draft {refused}"
    if draft.part_heads is None:
        return f"{draft.TAG} draft on {ranks} ranks, where it has no parts: 1 for all of it on rank 0"
    refused = _heads_refusal(*draft.part_heads, ranks)
    return None if refused is None else f"{draft.TAG} draft of {refused}"


def _heads_refusal(heads: int, kv_heads: int, ranks: int) -> str | None:
    """Why so many heads of a layer cannot be shared out among so many ranks, or None."""
    if heads % ranks:
        return f"{heads} heads on {ranks} ranks"
    if kv_heads % ranks and ranks % kv_heads:
        return f"{kv_heads} KV heads on {ranks} ranks"
    return None


def owners(session: Session | None, ranks: int) -> tuple[int, ...]:
    """The rank of each request in data parallelism; request 0 alone where there is no session."""
    if session is None:
        return (0,)
    ranks_of = [number % ranks for number in range(1 + len(session.mates))]
    entered_requests: set[int] = set()
    for action in session.actions:
        if action.kind == "fork" and action.requests[1] not in entered_requests:
            ranks_of[action.requests[1]] = ranks_of[action.requests[0]]
        if action.kind in ("add", "fork"):
            entered_requests |= set(action.requests)
    return tuple(ranks_of)
