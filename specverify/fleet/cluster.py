"""A Ray cluster on which the runs of a gate are judged."""

import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

from specverify.agenda import lanes_of
from specverify.backends.shipped import ROWS
from specverify.campaign.campaign import Campaign, Listener
from specverify.campaign.messages import Broken
from specverify.fleet.journal import RunMessages
from specverify.fleet.ray_campaign import FleetCampaign
from specverify.fleet.ray_crew import connect, room
from specverify.plan import Plan
from specverify.properties.tally import Tally


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
        return min(self._slices or room(self._ray, self._device(plan)), lanes_of(plan.cases))

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
    campaign.retell(run.messages, run.ended)
    return campaign.tally, campaign.code
