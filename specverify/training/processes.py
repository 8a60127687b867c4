"""The processes of a run: one, or those that `torchrun` started.

They share the texts of each shard, and their gradients are averaged.
"""

import os
from datetime import timedelta

import torch
from torch import distributed

from specverify.setup.errors import UnusableInput

PATIENCE = timedelta(hours=12)
"""How long a process waits for the first one, which prepares the data alone."""


class Processes:
    """This process among those of the run.

    Attributes:
        rank: The number of this process; 0 prepares the data, measures and writes.
        world: The number of processes.
    """

    def __init__(self, device: str) -> None:
        """Join the processes that `torchrun` started; without it, be the only one.

        Raises:
            UnusableInput: The variables of `torchrun` are there, and the processes do not find each other.
        """
        self.rank = 0
        self.world = int(os.environ.get("WORLD_SIZE", "1") or 1)
        if self.world == 1:
            return
        try:
            distributed.init_process_group("nccl" if device == "cuda" else "gloo", timeout=PATIENCE)
        except (RuntimeError, ValueError) as why:
            raise UnusableInput(f"torchrun: {' '.join(str(why).split())[:160]}") from None
        self.rank = distributed.get_rank()

    @property
    def first(self) -> bool:
        """Whether this process prepares, measures and writes."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.world > 1:
            distributed.barrier()

    def broadcast(self, values: list[float]) -> list[float]:
        """The values of the first process, the same in all."""
        if self.world == 1:
            return values
        sent = torch.tensor(values, dtype=torch.float64)
        distributed.broadcast(sent, 0)
        return [float(value) for value in sent]

    def leave(self) -> None:
        """Part from the other processes."""
        if self.world > 1 and distributed.is_initialized():
            distributed.destroy_process_group()
