"""Backends of ours on the pretended device: `--backend tests.pretended.backends:cuda_eager` and its like.

They are the rows of `backends/shipped.py` for an NVIDIA device, composed as on one. The Triton kernel is interpreted
over the numbers of the tensors, under the plan of a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from specverify.backends import compositions, devices
from specverify.backends.base import Unavailable
from specverify.backends.engine.attention import triton_launch
from specverify.backends.engine.attention.measured import ways
from specverify.backends.engine.attention.triton_launch import TritonTree, plan_for_gpu
from specverify.backends.engine.backend import EngineBackend
from specverify.backends.engine.seams import Seams
from specverify.backends.shipped import ROWS
from tests.pretended.install import install, pretended_device
from tests.pretended.ledger import Ledger
from tests.pretended.tensor import DeviceTensor, Underway, touch

BUILD = {"__version__": "pretended", "cuda": "13.0"}
"""What `version.py` of a torch with CUDA says."""


class DeviceKernel:
    """A Triton kernel, interpreted over the numbers of device tensors.

    Attributes:
        writes: The places of the arguments that it writes.
    """

    def __init__(self, function: Any, writes: tuple[int, ...]) -> None:
        from triton.runtime.interpreter import InterpretedFunction

        self._interpreted = InterpretedFunction(function)
        self._name = function.__name__
        self.writes = writes

    def __getitem__(self, grid: Any) -> Any:
        """A function that launches the kernel over `grid`."""

        def launch(*arguments: Any, **constants: Any) -> None:
            for number, argument in enumerate(arguments):
                if hasattr(argument, "data_ptr") and not isinstance(argument, DeviceTensor):
                    raise ValueError(f"Pointer argument (at {number}) cannot be accessed from Triton (cpu tensor?)")
            tensors = [argument for argument in arguments if isinstance(argument, DeviceTensor)]
            written = [arguments[number].memory for number in self.writes]
            touch([tensor.memory for tensor in tensors], written, f"the kernel {self._name}")
            numbers = [
                argument.values_on_host if isinstance(argument, DeviceTensor) else argument for argument in arguments
            ]
            options = {name: value for name, value in constants.items() if name not in ("num_warps", "num_stages")}

            def compute() -> None:
                self._interpreted[grid](*numbers, **options)

            compute()
            if Underway.capture is not None:
                Underway.capture.operations.append(compute)

        return launch


def device_kernel() -> TritonTree:
    """Our kernel on the pretended device, in the place of the one that Triton compiles."""
    from specverify.backends.engine.attention import triton_kernels

    tree, merge = DeviceKernel(triton_kernels.tree, (9, 10)), DeviceKernel(triton_kernels.merge, (2,))
    # `widen`, as under the interpreter: NumPy would multiply bfloat16 as integers.
    return TritonTree(tree, merge, plan_for_gpu, widen=True)


@contextmanager
def device_and_backends(float64: bool = True) -> Iterator[Ledger]:
    """Inside the `with` there is the device, and our backends of an NVIDIA device open on it."""
    with pytest.MonkeyPatch.context() as patch, pretended_device(float64) as ledger:
        _let_backends_open(patch)
        yield ledger


def _let_backends_open(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(devices, "torch_build", lambda: BUILD)
    for module in (compositions, triton_launch):
        patch.setattr(module, "compiled_kernel", device_kernel)
    patch.setitem(compositions.COMPOSITIONS, "flex-compiled", _compiled_by_torch)
    patch.delitem(ways.ON_CUDA, ways.FLEX)


def _compiled_by_torch() -> Seams:
    raise Unavailable("nothing is compiled for the pretended device")


def open_pretended(name: str) -> EngineBackend:
    """The backend of the row `name`, on the pretended device of this process; it says that it is emulated."""
    row = next(row for row in ROWS if row.name == name)
    return compositions.compose(replace(row, name=f"pretended-{name}", emulated=True))


def _opened_for_good(name: str, float64: bool = True) -> EngineBackend:
    install(float64)
    _let_backends_open(pytest.MonkeyPatch())
    return open_pretended(name)


def cuda_eager() -> EngineBackend:
    """`pretended-cuda-eager`, in a process that keeps the device."""
    return _opened_for_good("cuda-eager")


def cuda_eager_without_float64() -> EngineBackend:
    """`pretended-cuda-eager` on a device that computes no float64, in a process that keeps the device."""
    return _opened_for_good("cuda-eager", float64=False)


def cuda_fused_sdpa() -> EngineBackend:
    """`pretended-cuda-fused-sdpa`, in a process that keeps the device."""
    return _opened_for_good("cuda-fused-sdpa")


def cuda_fused_words() -> EngineBackend:
    """`pretended-cuda-fused-words`, in a process that keeps the device."""
    return _opened_for_good("cuda-fused-words")


def cuda_fused_graphs() -> EngineBackend:
    """`pretended-cuda-fused-graphs`, in a process that keeps the device."""
    return _opened_for_good("cuda-fused-graphs")


NAMES = ("cuda_eager", "cuda_fused_sdpa", "cuda_fused_words", "cuda_fused_graphs")
"""The functions above, which open a backend."""
