"""Faults of batches that are padded on the left."""

from dataclasses import replace

from torch import Tensor

from specverify.backends.engine.kv.lanes import LeftPadded
from specverify.backends.engine.model.causal_lm import Rows
from specverify.backends.engine.request import Request
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import attended_fault, in_place_of


@attended_fault(
    "left-pad-open-after-prefill",
    "ml-explore/mlx-lm issue 1906: every decode step runs without the mask, and a padded member attends to its pads",
    "prompts padded on the left, and a forward over committed columns",
)
@in_place_of("kv.left_padded")
class Open(LeftPadded):
    """Forwards over committed columns see the dead columns in front of them."""

    def close_columns(self, mask: Tensor, dead: int) -> Tensor:
        padded_mask = super().close_columns(mask, dead)
        if all(cache.length for cache in self.caches):
            padded_mask[:, :dead] = True
        return padded_mask


@attended_fault(
    "positions-jump-by-left-pad",
    "thu-nics/C2C pull request 19: positions are dropped after prefill, and new tokens jump ahead by the pad count",
    "prompts padded on the left, and a target that turns keys by their positions",
)
@in_place_of("gather")
def positions_jump(seams: Seams, batch: list[Request]) -> list[Rows]:
    """The rows of a verify forward count their positions from the first dead column."""
    return [
        replace(rows, positions=rows.positions + request.case.layout.left_pad)
        for rows, request in zip(seams.gather(batch), batch, strict=True)
    ]


@attended_fault(
    "left-pad-of-the-first-lane",
    "unslothai/unsloth issue 3699: one offset for a left-padded batch in place of each sequence's own",
    "a batch of unequal lengths that is padded on the left",
)
@in_place_of("kv.left_padded")
class OfTheFirst(LeftPadded):
    """Every mask of a batch is placed by the dead columns of the first lane."""

    def dead_columns(self, widths: list[int]) -> list[int]:
        dead_columns = super().dead_columns(widths)
        self._first = dead_columns[0]
        return dead_columns

    def close_columns(self, mask: Tensor, dead: int) -> Tensor:
        return super().close_columns(mask, dead).roll(self._first - dead, 1)
