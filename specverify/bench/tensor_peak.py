"""The most bytes of tensors that a piece of work has alive at once, beside what was alive before it.

On the CPU the operators of torch are watched; on a GPU the allocator counts. Resident memory is no such measure: it
holds what the process keeps of earlier work.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AliveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operators allocate inside the `with`, until they are freed.

    An output that shares the storage of an input is no allocation. What a kernel allocates inside itself is not seen.

    Attributes:
        alive_bytes: Bytes of the storages that are alive now.
        peak_bytes: The most of them so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator `func`, and count the storages that are new in what it returns."""
        inputs = {id_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        outputs = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor) and id_of(leaf) not in inputs:
                self._count(leaf)
        return outputs

    def _count(self, tensor: Tensor) -> None:
        storage, number = tensor.untyped_storage(), id_of(tensor)
        if number in self._sizes:
            return
        self._sizes[number] = storage.nbytes()
        self.alive_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
        weakref.finalize(storage, self._free, number)

    def _free(self, number: int) -> None:
        self.alive_bytes -= self._sizes.pop(number)


def id_of(tensor: Tensor) -> int:
    """The number of the storage behind a tensor, its own as long as the storage lives."""
    number: int = tensor.untyped_storage()._cdata
    return number


def peak_bytes(device: str, work: Callable[[], Any]) -> int:
    """The most bytes that `work` has alive at once on a device of this type, beside what was alive before."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return int(torch.cuda.max_memory_allocated()) - int(before)
    with AliveTensors() as tensors:
        work()
    peak: int = tensors.peak_bytes
    return peak
