"""A crew of one worker that is a thread of this process, near to the user's objects.

An engine that has a name still runs in a process of its own. Only the drawing and judging of cases is done here.
"""

import contextlib
import multiprocessing as mp
import queue
import threading
import time
from collections.abc import Iterator

from specverify.campaign import worker
from specverify.campaign.campaign import Campaign
from specverify.campaign.messages import STOP, Broken
from specverify.plan import Plan

JOIN_S = 2.0
"""Seconds in which the thread must end after the order to stop; one whose engine hangs is left behind."""


class CrewHere:
    """The one worker of `plan`, as a thread; see `specverify.campaign.crew.AnyCrew`."""

    def __init__(self, plan: Plan, deadline: float) -> None:
        # Both ends are kept: the worker may have ended when an order comes.
        self._heard, self._orders = mp.Pipe(duplex=False)
        self._messages: queue.SimpleQueue[object] = queue.SimpleQueue()
        arguments = (plan, worker.Orders(self._heard, deadline))
        self._thread = threading.Thread(target=self._work, args=arguments, name="specverify", daemon=True)
        self._thread.start()

    def _work(self, plan: Plan, orders: worker.Orders) -> None:
        try:
            worker.work(plan, self._messages.put, orders, own_process=False)
        except worker.Refused as why:
            self._messages.put(Broken(str(why), why.code))
        except Exception as why:
            self._messages.put(Broken(worker.line_about(plan, why), 3))

    def messages(self, timeout: float) -> Iterator[tuple[int, object]]:
        """Messages that arrive within `timeout` seconds."""
        until = time.monotonic() + timeout
        with contextlib.suppress(queue.Empty):
            while True:
                yield 0, self._messages.get(timeout=max(0.0, until - time.monotonic()))

    def tell(self, word: str) -> None:
        """Give the worker an order."""
        self._orders.send(word)

    def replace(self, number: int, judged: tuple[str, ...]) -> None:
        """No thread dies without a message that says so."""
        raise AssertionError("a thread has no replacement")

    def end(self) -> None:
        """End the worker."""
        self.tell(STOP)
        self._thread.join(JOIN_S)
        if not self._thread.is_alive():
            self._heard.close()
            self._orders.close()


class CampaignHere(Campaign):
    """A campaign whose one worker is a thread of this process."""

    def start_crew(self, deadline: float) -> CrewHere:
        """The crew of one thread."""
        return CrewHere(self.plan.slice(0), deadline)
