"""The page of a run that goes on: it is written again while cases are judged, and reloads itself."""

import copy
import time
from pathlib import Path

from specverify import __version__
from specverify.campaign.campaign import Campaign
from specverify.properties.same_cause import by_cause
from specverify.properties.tally import Tally
from specverify.reports.writing import Unwritable, write_whole

REFRESH_S = 5
"""Least seconds between two writings, and the seconds after which a browser reloads the page."""


class Watched:
    """The page of a running campaign.

    Attributes:
        file: The HTML file.
    """

    def __init__(self, file: str | Path) -> None:
        self.file = file
        self._campaign: Campaign | None = None
        self._began = self._written = time.monotonic()

    def begin(self, campaign: Campaign) -> None:
        """The campaign whose counts the page shows."""
        self._campaign = campaign

    def look(self) -> str | None:
        """Write the page if the last one is old enough; the reason where it could not be written."""
        now = time.monotonic()
        if self._campaign is None or now - self._written < REFRESH_S:
            return None
        from specverify.reports.html.pages import running_page  # Jinja is imported only for a page

        try:
            write_whole(self.file, running_page(so_far(self._campaign, now - self._began), __version__, REFRESH_S))
        except Unwritable as why:
            return str(why)
        self._written = time.monotonic()
        return None


def so_far(campaign: Campaign, seconds: float) -> Tally:
    """The counts of a campaign that goes on, with the failures so far; the campaign's own counts stay as they are."""
    tally = copy.copy(campaign.tally)
    tally.seconds = seconds
    tally.failures = by_cause([failure for place in campaign.places for failure in place.failures])
    return tally
