"""Ranks as threads of one process that take turns, which is cheap for draws.

Only one rank runs at a time and hands its turn on inside a collective, so that a run is the same every time. No message
leaves the process: `processes.py` is the form with a transport.
"""

import threading
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from specverify.backends.engine.collectives import REDUCTIONS, Group, OutOfStep, out_of_step_message

Result = TypeVar("Result")

ENDED = "nothing, since it has ended"
"""The word for the collective of a rank whose work is over."""


class ThreadGroup(Group):
    """The group of one thread."""

    def __init__(self, rank: int, size: int, meeting: "Meeting", whole: Group | None = None) -> None:
        super().__init__(rank, size, whole)
        self._meeting = meeting

    def part(self, size: int) -> "ThreadGroup":
        """See `Group`."""
        return ThreadGroup(self.rank, size, self._meeting, self)

    def _reduce(self, call: str, tensor: Tensor, operation: str) -> Tensor:
        return reduce(REDUCTIONS[operation], self._meeting.enter(self.rank, call, tensor, self.size))

    def _gather(self, call: str, tensor: Tensor) -> list[Tensor]:
        return self._meeting.enter(self.rank, call, tensor, self.size)

    def _broadcast(self, call: str, tensor: Tensor) -> Tensor:
        return self._meeting.enter(self.rank, call, tensor, self.size)[0]


class Entry(NamedTuple):
    """A rank in a collective of the first `size` ranks, in which it waits for the others."""

    size: int
    call: str
    tensor: Tensor


class Meeting:
    """The place where the ranks of one group meet.

    Attributes:
        groups: The group of each rank.
        parted: Why the ranks are out of step, or None; it stays.
    """

    def __init__(self, size: int) -> None:
        self.groups = [ThreadGroup(rank, size, self) for rank in range(size)]
        self.parted: str | None = None
        self._size = size
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._entries: dict[int, Entry] = {}
        self._gathered_tensors: list[list[Tensor]] = [[] for _ in range(size)]
        self._over: set[int] = set()

    def run(self, work: Callable[[Group], Result]) -> "list[Outcome[Result]]":
        """Let every rank do `work`, rank 0 in the calling thread; return what each made or raised."""
        self._entries.clear()
        self._over.clear()
        outcomes: list[Outcome[Result]] = [Outcome() for _ in range(self._size)]

        def rank(number: int) -> None:
            if number:
                self._turns[number].acquire()
            try:
                outcomes[number].value = work(self.groups[number])
            except BaseException as error:  # every exception belongs to the caller, which sees all ranks
                outcomes[number].error = error
            self._end(number)

        threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(1, self._size)]
        for thread in threads:
            thread.start()
        rank(0)
        for thread in threads:
            thread.join()
        return outcomes

    def enter(self, rank: int, call: str, tensor: Tensor, size: int) -> list[Tensor]:
        """The tensors of the first `size` ranks, once all of them have entered the collective `call`.

        Raises:
            OutOfStep: The ranks entered different collectives, now or before, or one has ended.
        """
        self._entries[rank] = Entry(size, call, tensor)
        self._settle()
        self._hand_on(rank)
        self._turns[rank].acquire()
        if self.parted is not None:
            raise OutOfStep(self.parted)
        return self._gathered_tensors[rank]

    def _end(self, rank: int) -> None:
        self._over.add(rank)
        self._entries.pop(rank, None)
        self._settle()
        self._hand_on(rank)

    def _settle(self) -> None:
        """Complete the collective in which all of its ranks are; if every rank waits in vain, they have parted."""
        entries = self._entries
        for size in sorted({entry.size for entry in entries.values()}):
            if all(rank in entries and entries[rank].size == size for rank in range(size)):
                self._complete(range(size), [entries[rank].call for rank in range(size)])
                return
        if entries and len(entries) + len(self._over) >= self._size:
            calls = [entries[rank].call if rank in entries else ENDED for rank in range(self._size)]
            self._complete(sorted(entries), calls)

    def _complete(self, ranks: Sequence[int], calls: list[str]) -> None:
        """Give `ranks` each other's tensors; `calls` are the collectives that had to be one."""
        self.parted = self.parted or out_of_step_message(calls)
        tensors = [self._entries.pop(rank).tensor for rank in ranks]
        for rank in ranks:
            self._gathered_tensors[rank] = tensors

    def _hand_on(self, rank: int) -> None:
        """Give the turn to the next rank that waits for no other and whose work is not over, perhaps to `rank`."""
        following = (number % self._size for number in range(rank + 1, rank + 1 + self._size))
        waiting = {*self._over, *self._entries}
        next_rank = next((number for number in following if number not in waiting), None)
        if next_rank is not None:
            self._turns[next_rank].release()


class Outcome(Generic[Result]):
    """The result of one rank, or the exception that it raised."""

    value: Result
    error: BaseException | None = None
