"""A Ray cluster on which the runs of a gate are judged; any of its tasks may be lost."""

import sys
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from specverify.backends.shipped import ROWS
from specverify.campaign.campaign import Campaign, Listener
from specverify.campaign.crew import AnyCrew, Place
from specverify.campaign.messages import Broken
from specverify.fleet.journal import RunMessages
from specverify.fleet.ray_crew import RayCrew, connect, room
from specverify.lanes import LANES, lanes_of
from specverify.plan import Plan
from specverify.properties.tally import Tally

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
        assert self.crew is not None
        self.crew.replace(number, tuple(place.judged.elements()))


class Cluster:
    """A cluster that judges plans.

    Args:
        address: The address that Ray is given: `auto`, `HOST:PORT`, `ray://HOST:PORT`, or `local` for one made here.
        folder: The folder of the profile, whose files the workers see.
        slices: The slices of a plan; None for as many as the cluster runs at once.
        required: The devices that the profile requires.

    Raises:
        MissingInput: Ray is not installed, or no cluster answers.
    """

    def __init__(self, address: str, folder: Path, slices: int | None, required: tuple[str, ...]) -> None:
        self._ray = connect(address, folder)
        self._slices = slices
        self._required = required

    def slices(self, plan: Plan) -> int:
        """The number of slices of `plan`: a checkpoint's cases are one."""
        if plan.model is not None:
            return 1
        return min(
            self._slices or room(self._ray, self._device(plan)),
            lanes_of(plan.cases, LANES if plan.agenda is None else plan.agenda.most_lanes),
        )

    def judge(self, before: RunMessages | None, plan: Plan, listener: Listener) -> tuple[Tally, int | None]:
        """Judge `plan`, behind the messages of an earlier run that was killed; the tally, and the exit code if any."""
        campaign = FleetCampaign(replace(plan, jobs=self.slices(plan)), listener, self._ray, self._device(plan))
        if before is not None:
            # A place that could not start tries again.
            campaign.recall((place, message) for place, message in before.messages if not isinstance(message, Broken))
        with redirect_stdout(sys.stderr):  # Ray prints there what it has to say of lost workers
            campaign.run()
        return campaign.tally, campaign.code

    def close(self) -> None:
        """Leave the cluster."""
        with redirect_stdout(sys.stderr):
            self._ray.shutdown()

    def _device(self, plan: Plan) -> str:
        """The device of a shipped backend; of another one the first device that the profile requires, or the CPU."""
        shipped = next((row for row in ROWS if row.name == plan.backend), None)
        named = next(iter(self._required), "cpu") if shipped is None else shipped.device
        emulated = shipped is not None and shipped.emulated
        return named if named in ("cuda", "npu") and not emulated else "cpu"


def retell(run: RunMessages, plan: Plan, listener: Listener) -> tuple[Tally, int | None]:
    """The tally and the exit code of runs that are over."""
    campaign = Campaign(plan, listener)
    assert run.ended is not None
    for place, message in run.messages:
        campaign.hear(place, message)
    campaign.conclude(run.ended)
    return campaign.tally, campaign.code
