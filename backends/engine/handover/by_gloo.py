"""A mailbox over torch.distributed.

The transport is gloo between processes on the CPU, nccl or hccl between devices. A letter is two messages, its size
and its bytes. Over nccl and hccl this file has not been run.
"""

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from specverify.backends.engine.collectives import take_device
from specverify.backends.engine.handover.mailbox import PeerLost

SIDES = ("prefill", "decode")
"""The names of the sides, in the order of their numbers in torch's group."""


class GlooMailbox:
    """The end of `side`; the limit of a wait is the group's. Over nccl and hccl each side has a device of its own.

    Raises:
        PeerLost: The other side does not join.
    """

    def __init__(self, folder: Path, side: str, seconds: float, transport: str = "gloo", device: str = "cpu") -> None:
        self._rank = SIDES.index(side)
        self._device = take_device(device, self._rank)
        self._other_side = SIDES[1 - self._rank]
        if transport == "gloo":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # both sides are processes of one machine
        place = f"file://{folder / 'meeting'}"
        limit = timedelta(seconds=seconds)
        try:
            dist.init_process_group(transport, init_method=place, rank=self._rank, world_size=2, timeout=limit)
        except RuntimeError as error:
            raise PeerLost(_loss_text(self._other_side, error)) from error

    def post(self, letter: bytes) -> None:
        """See `Mailbox.post`."""
        self._send(torch.tensor([len(letter)]))
        self._send(torch.frombuffer(bytearray(letter), dtype=torch.uint8))

    def take(self, seconds: float) -> bytes:
        """See `Mailbox.take`."""
        size = int(self._receive(torch.zeros(1, dtype=torch.int64))[0])
        return self._receive(torch.zeros(size, dtype=torch.uint8)).numpy().tobytes()

    def _send(self, tensor: Tensor) -> None:
        try:
            dist.send(tensor.to(self._device), 1 - self._rank)
        except RuntimeError as error:
            raise PeerLost(_loss_text(self._other_side, error)) from error

    def _receive(self, room: Tensor) -> Tensor:
        buffer = room.to(self._device)
        try:
            dist.recv(buffer, 1 - self._rank)
        except RuntimeError as error:
            raise PeerLost(_loss_text(self._other_side, error)) from error
        return buffer.cpu()


def _loss_text(other_side: str, error: RuntimeError) -> str:
    return f"the {other_side} side is lost: {' '.join(str(error).split())[:120]}"
