"""Faults of several branch caches of one request."""

from torch import Tensor

from specverify.backends.engine.kv.base import Pair
from specverify.backends.engine.kv.branches.several import Branches
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
