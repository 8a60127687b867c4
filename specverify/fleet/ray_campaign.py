"""The campaign whose workers are tasks of Ray, any of which may be lost."""

from collections import Counter
from typing import Any

from specverify.campaign.campaign import Campaign, Listener
from specverify.campaign.crew import AnyCrew, Place
from specverify.fleet.ray_crew import RayCrew
from specverify.plan import Plan

FALLS = 3
"""Deaths at one case, or before the first case of a place, after which the case or the place is given up."""


class FleetCampaign(Campaign):
    """A campaign on a cluster.

    A lost task is no failure of the case that it judged: machines are taken away, and the case is judged again. Only a
    case at which FALLS tasks died is given up.

    Args:
        plan: The plan, whose jobs are the slices.
        listener: Records the run.
        ray: The module `ray`, connected.
        device: The device of the backend.
    """

    def __init__(self, plan: Plan, listener: Listener, ray: Any, device: str) -> None:
        super().__init__(plan, listener)
        self._ray = ray
        self._device = device
        self._falls: Counter[tuple[int, str]] = Counter()

    def start_crew(self, deadline: float) -> AnyCrew:
        """The crew that judges what is not judged yet."""
        judged = [None if place.over else tuple(place.judged.elements()) for place in self.places]
        return RayCrew(self._ray, self.plan, deadline, self._device, judged)

    def bury(self, number: int, place: Place, how: str) -> None:
        """A task was lost: start another one in its place, which goes on behind the last verdict."""
        case = place.case
        place.case = None
        # A failure that was being made smaller stays as it was drawn.
        place.provisional = False
        if self.stopping:
            place.over = True
            return
        key = (number, "" if case is None else case.id)
        self._falls[key] += 1
        if self._falls[key] >= FALLS and case is None:
            place.over = True
            self.trouble(f"slice {number} died {FALLS} times before a case ({how}); its cases were not judged")
            self.code = 3 if self.code is None else self.code
            return
        if self._falls[key] >= FALLS and case is not None:
            place.judged[case.id] += 1
            file = self.listener.worker_lost(case)
            saved = f" (saved as {file})" if file else ""
            self.trouble(f"case {case.id}{saved} was given up: {FALLS} tasks died at it, the last by {how}")
        self.tally.replaced += 1
        self.crew.replace(number, tuple(place.judged.elements()))
