"""The server of requests that step together and are never forked.

So each needs room for its own text alone.
"""

from specverify.backends.engine.overlap_server import OverlapServer
from specverify.reference.case import Case


class BatchServer(OverlapServer):
    """A server without forks; their caches would have room for the texts of all requests together."""

    def longest_text(self, plans: list[Case]) -> int:
        """See `Server.longest_text`."""
        return max(plan.longest for plan in plans)
