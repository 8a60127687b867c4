"""The processes of a run that `torchrun` started, and the prompts of each.

A rank of a bench needs no other while it runs: it writes a record of its own, so that the death of one loses nothing of
another. They meet once, when their prompts are done, and rank 0 puts the records together. The ranks of a training
share the texts of each shard, and their gradients are averaged.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specverify.records.merge import shard_folder
from specverify.setup.errors import MissingInput, UnusableInput

BACKENDS = ("gloo", "nccl", "hccl")
"""Ways for processes to meet: on the CPU, on NVIDIA devices, on Ascend devices."""

PATIENCE = timedelta(hours=12)
"""How long a rank waits for the others; a rank whose connection closes is noticed at once."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run.

    Attributes:
        rank: The number of this process.
        world: The number of processes; 1 where `torchrun` started none.
        local: The number of this process on its machine, which is the number of its device.
        backend: One of BACKENDS.
    """

    rank: int = 0
    world: int = 1
    local: int = 0
    backend: str = BACKENDS[0]

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which prepares the data of a training, measures and writes."""
        return self.rank == 0

    def prompt_numbers(self, count: int) -> list[int]:
        """The numbers of the prompts of this rank among `count`: each that leaves `rank` when divided by `world`."""
        return list(range(self.rank, count, self.world))

    def folder(self, folder: Path) -> Path:
        """The folder of this rank's record inside that of the run."""
        return folder if self.world == 1 else shard_folder(folder, self.rank, self.world)

    def join(self) -> None:
        """Join the other processes, and take the device of this one; nothing for a single process.

        Raises:
            UnusableInput: The processes do not find each other.
            MissingInput: The package or the devices of `backend` are not here.
        """
        if self.world == 1:
            return
        import torch
        from torch import distributed

        if self.backend == "nccl":
            if not torch.cuda.is_available():
                raise MissingInput("--dist-backend nccl: torch sees no CUDA device here")
            torch.cuda.set_device(self.local)
        elif self.backend == "hccl":
            if find_spec("torch_npu") is None:
                raise MissingInput("--dist-backend hccl: torch_npu is not installed")
            import_module("torch_npu").npu.set_device(self.local)
        try:
            distributed.init_process_group(self.backend, timeout=PATIENCE)
        except (RuntimeError, ValueError) as why:
            raise UnusableInput(f"torchrun: {' '.join(str(why).split())[:160]}") from None

    def meet(self) -> str | None:
        """Wait until every rank has finished its prompts, then part from them.

        Returns:
            Why the others could not be met, in one line; None where all are here.
        """
        try:
            self.wait()
        except RuntimeError as why:  # a rank that was killed closes its connection
            return f"rank {self.rank}: not every rank came to the end ({' '.join(str(why).split())[:100]})"
        self.leave()
        return None

    def wait(self) -> None:
        """Wait until every rank is here."""
        if self.world > 1:
            from torch import distributed

            distributed.barrier()

    def broadcast(self, values: list[float]) -> list[float]:
        """The values of rank 0, the same in all."""
        if self.world == 1:
            return values
        import torch
        from torch import distributed

        sent = torch.tensor(values, dtype=torch.float64)
        distributed.broadcast(sent, 0)
        return [float(value) for value in sent]

    def leave(self) -> None:
        """Part from the others."""
        if self.world == 1:
            return
        from torch import distributed

        if distributed.is_initialized():
            distributed.destroy_process_group()


def ranks_of(environment: Mapping[str, str] = os.environ, backend: str = BACKENDS[0]) -> Ranks:
    """The ranks that the environment tells, as `torchrun` sets it: RANK, WORLD_SIZE, LOCAL_RANK.

    Raises:
        UnusableInput: A variable is no such number.
    """
    numbers: dict[str, Any] = {}
    for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        text = environment.get(name) or default
        if not text.isdecimal():
            raise UnusableInput(f"{name}={text!r}: torchrun sets it to a number")
        numbers[name] = int(text)
    if not numbers["RANK"] < numbers["WORLD_SIZE"]:
        raise UnusableInput(f"RANK={numbers['RANK']}: WORLD_SIZE is {numbers['WORLD_SIZE']}")
    return Ranks(numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_RANK"], backend)
