"""The agenda of a gate: saved cases first, then draws from several seeds.

Saved and drawn cases are split by case. Drawn cases come from lanes. Each lane draws a fixed share of the cases from a
seed of its own, so that the cases do not depend on the number of shards, nor on the number of workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from specverify.lanes import LANES, lanes_of
from specverify.properties.known import KnownFailure
from specverify.reference.case import Case

Item = TypeVar("Item")


@dataclass(frozen=True)
class Saved:
    """A saved case: its own file's invariant, if that names one, is always judged."""

    case: Case
    invariant: str | None = None


@dataclass(frozen=True)
class Agenda:
    """The cases of a gate's run on one backend, and the part of them that a worker judges.

    Attributes:
        saved: Cases that are judged before any draw.
        seeds: Seeds of the draws; lanes take them in turn.
        layouts: KV layouts of drawn cases; empty for all that the backend declares.
        known: Failures that are known.
        part: The number of this part, from 0; the shard's number while no worker has its slice.
        parts: The number of parts, which have no case in common.
        most_lanes: Most lanes of the run; runs with other numbers draw other cases.
    """

    saved: tuple[Saved, ...] = ()
    seeds: tuple[int, ...] = (0,)
    layouts: tuple[str, ...] = ()
    known_failures: tuple[KnownFailure, ...] = ()
    part: int = 0
    parts: int = 1
    most_lanes: int = LANES

    def slice(self, worker: int, workers: int) -> "Agenda":
        """The part of worker `worker` of this part's `workers`."""
        return replace(self, part=self.part + self.parts * worker, parts=self.parts * workers)

    def own_saved(self) -> list[Saved]:
        """The saved cases of this part, by their ids: shards whose memories differ still share no case."""
        return [saved for saved in self.saved if int(saved.case.id, 16) % self.parts == self.part]

    def own_part(self, items: Sequence[Item]) -> Sequence[Item]:
        """The items at the places of this part."""
        return items[self.part :: self.parts]

    def lanes(self, cases: int) -> list[tuple[int, int]]:
        """The lanes of this part in a run of `cases` drawn cases, as (number of the lane, its cases)."""
        count = lanes_of(cases, self.most_lanes)
        return [(lane, cases // count + (lane < cases % count)) for lane in self.own_part(range(count))]

    def num_cases(self, cases: int) -> int:
        """The number of cases of this part, saved and drawn, in a run of `cases` drawn cases."""
        return len(self.own_saved()) + sum(share for _, share in self.lanes(cases))
