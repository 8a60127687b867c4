"""Group: one rank's door to the collectives that it shares with the other ranks.

A group keeps the sequence of its collectives, so that the sequences of all ranks can be compared.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
"""The reductions of `Group.all_reduce`."""


class OutOfStep(RuntimeError):
    """Ranks entered different collectives, or one ended while another waited; the message names them."""


class Group(ABC):
    """The collectives of rank `rank` of `size`.

    Attributes:
        calls: The collectives so far in order, each as its name and the shape of this rank's tensor.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.calls: list[str] = []

    def all_reduce(self, tensor: Tensor, operation: str = "sum") -> Tensor:
        """The sum, largest or smallest of the ranks' tensors, element by element; the same bits on every rank."""
        return self._reduce(self._log_call(f"all_reduce {operation}", tensor), tensor, operation)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which have one shape, in the order of ranks; they are not to be written to."""
        return self._gather(self._log_call("all_gather", tensor), tensor)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The tensor of rank 0; those of other ranks give the shape alone."""
        return self._broadcast(self._log_call("broadcast", tensor), tensor)

    def _log_call(self, name: str, tensor: Tensor) -> str:
        self.calls.append(f"{name} {list(tensor.shape)}")
        return self.calls[-1]

    @abstractmethod
    def _reduce(self, call: str, tensor: Tensor, operation: str) -> Tensor: ...

    @abstractmethod
    def _gather(self, call: str, tensor: Tensor) -> list[Tensor]: ...

    @abstractmethod
    def _broadcast(self, call: str, tensor: Tensor) -> Tensor: ...


def out_of_step_message(calls: list[str]) -> str | None:
    """Which rank entered another collective than rank 0, in one line; None if all entered the same."""
    for rank, call in enumerate(calls):
        if call != calls[0]:
            return f"rank {rank} is out of step: it enters {call}, and rank 0 enters {calls[0]}"
    return None
