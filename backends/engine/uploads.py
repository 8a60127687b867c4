"""The copy of a tensor from the host to the device of a model, without a wait of the host."""

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor`, which lies on the host, on `device`; work that is launched later there sees the copy.

    The driver has copied memory that is not pinned aside before the call returns, so that the host may change it.
    """
    return tensor.to(device, non_blocking=True)
