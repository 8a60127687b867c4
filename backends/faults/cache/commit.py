"""Faults of the commit in caches of branches, in the target's cache and in the draft model's cache."""

from torch import Tensor

from specverify.backends.engine.kv.base import KvCache, Pair
from specverify.backends.engine.kv.branch import Branch, Branches
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import attended_fault, committed_fault, in_place_of


@committed_fault(
    "branch-of-sibling-committed",
    "https://github.com/Neroued/ninfer/pull/73",
    "layout branch with several branches, and an accepted row below a root with other children",
)
@in_place_of("kv.branches")
class CommitsSibling(Branches):
    """The commit replays the rows of the branch beside the accepted one.

    The number of rows is right, so that lengths and positions show nothing.
    """

    def replay_rows(self, layer: int, path: list[int]) -> list[Pair]:
        """See `Branches.replay_rows`; rows at the same places of the next branch."""
        if not path:
            return super().replay_rows(layer, path)
        next_branch = (self.home(path[-1]) + 1) % len(self.paths)
        wrong = self.paths[next_branch]
        rows = [wrong[index] if index < len(wrong) else row for index, row in enumerate(path)]
        return super().replay_rows(layer, rows)


@attended_fault(
    "branch-not-dropped-after-commit",
    "family of https://github.com/sgl-project/sglang/pull/24086",
    "layout branch with several branches, and a step after a step",
)
@in_place_of("kv.branches")
class BranchesThatStay(Branches):
    """Branches are not dropped when one is committed, and the next step finds its rows among theirs.

    Rows are known by their number in the block, which the next block uses again.
    """

    def drop(self) -> None:
        """Keep every branch."""


@attended_fault(
    "branch-row-written-to-shared-prefix",
    "family of https://github.com/xLLM-AI/xllm/pull/1984: beams that part need a copy of what they share",
    "layout branch with several branches, and a tree with two leaves over a committed prefix",
)
@in_place_of("kv.branches")
class IntoThePrefix(Branches):
    """A second branch shares the committed columns without a copy, and its write lands on the last of them."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See `Branches.write`; the last row of the last branch also lands on the last committed column."""
        super().write(layer, keys, values)
        if len(self.paths) > 1 and self.length:
            row = self.paths[-1][-1]
            for stored_cells, cell in zip(self.committed_pairs[layer], self.cells[-1][layer][row], strict=True):
                stored_cells[:, -1] = cell


@committed_fault(
    "kv-truncated-not-gathered",
    "catalogue BZ-074: KV rewind is one integer, insufficient for a tree",
    "an accepted path that is not a prefix of the row order",
)
@in_place_of("commit")
def truncated_without_gather(seams: Seams, cache: KvCache, path: list[int]) -> str | None:
    """After verification the KV cache is cut to its new length without gathering the accepted rows."""
    return seams.commit(cache, list(range(len(path))))


@committed_fault(
    "overlapping-compaction",
    "catalogue BZ-132: overlapping in-place KV compaction",
    "two accepted rows, the first of them not in place",
)
@in_place_of("commit")
def overlapping_moves(seams: Seams, cache: KvCache, path: list[int]) -> str | None:
    """Accepted rows are compacted in place in an order that overwrites sources before they are read."""
    for layer in range(cache.layers):
        block = cache.block(layer)
        # For a path [0, 2, 3], row 3 goes to place 2 before row 2 is read.
        for place in reversed(range(len(path))):
            for cells in block:
                cells[..., place, :] = cells[..., path[place], :]
        cache.amend(layer, *block)
    return seams.commit(cache, list(range(len(path))))


@committed_fault(
    "values-moved-by-other-layout",
    "catalogue BZ-133: value cache moved with another layout",
    "an accepted path that is not a prefix of the row order",
)
@in_place_of("commit")
def values_in_place(seams: Seams, cache: KvCache, path: list[int]) -> str | None:
    """The value cache is compacted with another index formula than the key cache."""
    for layer in range(cache.layers):
        keys, values = cache.block(layer)
        moved_values = values.clone()
        # The exchange of source and target, before the right commit gathers both.
        moved_values[..., path, :] = values[..., : len(path), :]
        cache.amend(layer, keys, moved_values)
    return seams.commit(cache, path)


@committed_fault(
    "draft-cache-not-popped",
    "catalogue BZ-137: draft cache not popped for unaccepted tokens",
    "a draft model whose tree has an inner node",
)
@in_place_of("roll_back")
def draft_not_popped(seams: Seams, cache: KvCache, rows: list[int]) -> None:
    """The draft model's cache keeps the tokens that were rejected."""
    seams.roll_back(cache, list(range(cache.rows)))


@committed_fault(
    "draft-cache-overtrimmed", "catalogue BZ-141: draft cache rewind trims two entries too many", "a draft model"
)
@in_place_of("roll_back")
def draft_overtrimmed(seams: Seams, cache: KvCache, rows: list[int]) -> None:
    """The draft model's cache is rewound two entries too far."""
    seams.roll_back(cache, rows)
    cache.crop(max(cache.length - 2, 1))


@committed_fault(
    "draft-kv-never-written",
    "catalogue BZ-167: KV of the last draft token never written",
    "a draft model whose inner node is accepted",
)
@in_place_of("roll_back")
def draft_hole(seams: Seams, cache: KvCache, rows: list[int]) -> None:
    """The KV of the last accepted draft token is never written, and the hole is not marked."""
    if rows:
        for layer in range(cache.layers):
            keys, values = cache.block(layer)
            keys[..., rows[-1], :] = 0
            values[..., rows[-1], :] = 0
            cache.amend(layer, keys, values)
    seams.roll_back(cache, rows)


@committed_fault(
    "fast-reorder-never-taken",
    "EAGLE-Pangu, fast cache reorder: a guard that always falls back changes no output and costs the speed",
    "a commit by fast after something was committed",
)
@in_place_of("kv.branch")
class NeverFast(Branch):
    """The fast reorder is never taken: each commit gathers the whole cache, and says nothing of it.

    Output and cache stay right; only the reported way of the commit shows the fault.
    """

    def way_of(self, path: list[int]) -> tuple[str, str | None]:
        way, why = super().way_of(path)
        return ("path", None) if way == "fast" else (way, why)
