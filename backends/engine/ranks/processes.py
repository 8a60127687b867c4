"""Ranks as processes that talk by torch.distributed.

The transport is gloo on the CPU, nccl or hccl on devices. Before each collective the ranks exchange its name and
shape, so that ranks that have parted say so and do not wait for one another. Over nccl and hccl this file has not
been run.
"""

import os
from collections.abc import MutableSequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from specverify.backends.engine.collectives import Group, OutOfStep, out_of_step_message

TRANSPORTS = {"gloo": "cpu", "nccl": "cuda", "hccl": "npu"}
"""The transports of torch.distributed, each with the device of its tensors."""

HEADER = 96
"""Bytes that name a collective and its shape."""

END = "the end of the run"
"""The word for the collective of a rank whose run is over."""

OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class ProcessGroup(Group):
    """The group of one process, which has joined torch's default group.

    `entered[rank]` counts the collectives that each rank has entered; it lies in memory that the processes share.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        entered: MutableSequence[int],
        device: str = "cpu",
        whole: "ProcessGroup | None" = None,
    ) -> None:
        super().__init__(rank, size, whole)
        self._entered = entered
        self._device = device
        self._torch_group = None if whole is None else _torch_group(size)
        self._all_ranks = whole or self
        self.parted: str | None = None

    def part(self, size: int) -> "ProcessGroup":
        """See `Group`; a rank that enters another collective than one of a part is told by its lagging alone."""
        return ProcessGroup(self.rank, size, self._entered, self._device, self)

    def close(self) -> None:
        """Meet the other ranks at the end of a run, so that none of them waits for this one."""
        if self.parted is None:
            self._meet(END)

    def _reduce(self, call: str, tensor: Tensor, operation: str) -> Tensor:
        self._meet(call)
        total = tensor.contiguous().clone()
        dist.all_reduce(total, OPERATIONS[operation], group=self._torch_group)
        return total

    def _gather(self, call: str, tensor: Tensor) -> list[Tensor]:
        self._meet(call)
        return self._gather_all(tensor.contiguous())

    def _broadcast(self, call: str, tensor: Tensor) -> Tensor:
        self._meet(call)
        received = tensor.contiguous().clone()
        dist.broadcast(received, 0, group=self._torch_group)
        return received

    def _gather_all(self, tensor: Tensor) -> list[Tensor]:
        tensors = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(tensors, tensor, group=self._torch_group)
        return tensors

    def _meet(self, call: str) -> None:
        """Exchange the names of the collective.

        Raises:
            OutOfStep: The ranks enter different ones.
        """
        self._entered[self.rank] += 1
        line = bytearray(call.encode()[:HEADER].ljust(HEADER))
        lines = self._gather_all(torch.frombuffer(line, dtype=torch.uint8).to(self._device))
        self.parted = out_of_step_message([bytes(line.tolist()).decode().strip() for line in lines])
        self._all_ranks.parted = self.parted
        if self.parted is not None:
            raise OutOfStep(self.parted)


@cache
def _torch_group(size: int) -> Any:
    """Torch's group of the first `size` processes; all processes make it together, once."""
    return dist.new_group(list(range(size)))


def join(rank: int, size: int, place: str, seconds: float, transport: str = "gloo") -> None:
    """Join torch's default group of `size` processes, which meet at the file `place`."""
    if transport == "gloo":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the ranks are processes of one machine
    limit = timedelta(seconds=seconds)
    dist.init_process_group(transport, init_method=f"file://{place}", rank=rank, world_size=size, timeout=limit)
