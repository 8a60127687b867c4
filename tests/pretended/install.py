"""Installs the pretended device in this process, in the place of the CUDA that a CPU build of torch lacks.

torch's own mechanism for devices outside its tree (PrivateUse1) cannot serve: its device may not be called `cuda`, and
code that asks `device.type == "cuda"` would not run. Here tensors are a subclass that reports `cuda:0`, and a mode of
torch's dispatcher sees the operators that make tensors. The default stream of the process is that of the main thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specverify.backends.engine.law_device import why_no_float64
from tests.pretended import streams
from tests.pretended.graphs import GeneratorState, Graph
from tests.pretended.ledger import LEDGER, Ledger
from tests.pretended.streams import HOST
from tests.pretended.tensor import Abilities, Allocated, DeviceTensor, forbid, run_operator

CUDA, META = 1, 14
"""Numbers of device types in c10/core/DeviceType.h."""

NAME = "a pretended device"


class OnDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator, also those without operands, which make tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_operator(func, args, kwargs or {})


TOTAL_MEMORY = 80 << 30
"""Bytes of the device."""


@dataclass(frozen=True)
class Properties:
    """The properties of an H100, in the place of `torch.cuda.get_device_properties`."""

    name: str = NAME
    major: int = 9
    minor: int = 0
    total_memory: int = TOTAL_MEMORY
    multi_processor_count: int = 132
    shared_memory_per_block_optin: int = 232448


def install(float64: bool = True) -> None:
    """Install the device for as long as this process lives."""
    if not _INSTALLED:
        device = pretended_device(float64)
        device.__enter__()
        _INSTALLED.append(device)


_INSTALLED: list[Any] = []
"""The device of this process: an object that is dropped would take it away."""


@contextmanager
def pretended_device(float64: bool = True) -> Iterator[Ledger]:
    """Inside the `with`, torch has a CUDA device, which computes float64 or not; its ledger begins empty."""
    allow_guards()
    LEDGER.clear()
    flags = torch.__future__.get_overwrite_module_params_on_conversion()
    with ExitStack() as stack:
        for holder, names in STAND_INS.items():
            for name, value in names.items():
                stack.callback(_put_back(holder, name))
                setattr(holder, name, value)
        # A module that moves gets new parameters: those of a subclass cannot be exchanged in place.
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, flags)
        # `torch.tensor(numbers, device="cuda")` makes a CPU tensor first, and then copies it where modes can see it.
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        stack.enter_context(OnDevice())  # type: ignore[no-untyped-call]
        stack.callback(streams.set_stream, HOST.streams[0])
        # Threads that wait for one another cost seven times the work where the machine has other work to do.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        stack.callback(setattr, Abilities, "float64", Abilities.float64)
        Abilities.float64 = float64
        # What a device was asked once is asked again of another one.
        why_no_float64.cache_clear()
        stack.callback(why_no_float64.cache_clear)
        moved = torch.ones(1).to("cuda")
        if not isinstance(moved, DeviceTensor):
            raise RuntimeError(f"torch {torch.__version__} lays its device guards out otherwise: {moved.device}")
        LEDGER.clear()
        yield LEDGER


def _put_back(holder: Any, name: str) -> Callable[[], None]:
    """A function that gives an attribute of a module the value back that it has now, or takes it away again."""
    if name not in vars(holder):
        return lambda: delattr(holder, name)
    value = vars(holder)[name]
    return lambda: setattr(holder, name, value)


def allow_guards() -> None:
    """Let torch's C++ code ask for the current device of type CUDA, and set it, which does nothing.

    A CPU build has no device guard of that type: a subscript of a CUDA tensor would raise. The guard of meta tensors
    does nothing; a copy of its table of functions is entered for CUDA, with another `getDevice`.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * (META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    if _GUARD:
        return
    if registry[CUDA]:
        raise RuntimeError("this torch is built with CUDA: nothing is pretended beside it")
    table_address = ctypes.c_void_p.from_address(registry[META] or 0).value or 0
    entries = [ctypes.c_void_p.from_address(table_address + POINTER * slot).value for slot in range(-HEAD, SLOTS)]
    entries[HEAD + GET_DEVICE] = ctypes.cast(_current_device, ctypes.c_void_p).value
    table = (ctypes.c_void_p * len(entries))(*entries)
    guard = (ctypes.c_void_p * 1)(ctypes.addressof(table) + POINTER * HEAD)
    registry[CUDA] = ctypes.addressof(guard)
    _GUARD.extend((table, guard))


POINTER, HEAD, SLOTS, GET_DEVICE = 8, 2, 24, 2
"""Bytes of a pointer; entries before the functions of a C++ class; copied functions; the place of `getDevice`."""

_GUARD: list[Any] = []
"""What C++ holds the address of."""


@ctypes.CFUNCTYPE(ctypes.c_uint16, ctypes.c_void_p)  # type: ignore[untyped-decorator]
def _current_device(_: int) -> int:
    """`cuda:0` as a c10::Device: the type in the low byte, the index above it."""
    return CUDA


def synchronize(device: Any = None, /) -> None:
    """Wait for all streams, in the place of `torch.cuda.synchronize`."""
    forbid("the host waits (synchronize)")
    HOST.synchronize()
    LEDGER.note("synchronize")


def set_sync_debug_mode(mode: int | str) -> None:
    """In the place of torch's own."""
    LEDGER.mode = {"default": 0, "warn": 1, "error": 2}[mode] if isinstance(mode, str) else mode


class Generator:
    """In the place of the device's random generator: its state is marked while a graph is captured.

    Attributes:
        state: The state; `capturing` is left marked by a capture that ends in an error.
    """

    def __init__(self) -> None:
        self.state = GeneratorState()
        self.device = torch.device("cuda", 0)

    def initial_seed(self) -> int:
        """Its seed."""
        return 0

    def get_state(self) -> torch.Tensor:
        """Seed and offset, bytes on the host."""
        return torch.zeros(16, dtype=torch.uint8)

    def clone_state(self) -> GeneratorState:
        """Another state like this one, which no graph knows."""
        return GeneratorState()

    def graphsafe_set_state(self, state: GeneratorState) -> None:
        """Go on with `state`."""
        self.state = state


GENERATOR = Generator()

STAND_INS: dict[Any, dict[str, Any]] = {
    torch.cuda: {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: Properties(),
        "get_sync_debug_mode": lambda: LEDGER.mode,
        "set_sync_debug_mode": set_sync_debug_mode,
        "set_device": lambda device: None,
        "default_generators": (GENERATOR,),
        "memory_allocated": lambda device=None: Allocated.now,
        "max_memory_allocated": lambda device=None: Allocated.peak,
        "reset_peak_memory_stats": Allocated.begin_peak,
        "mem_get_info": lambda device=None: (TOTAL_MEMORY - Allocated.now, TOTAL_MEMORY),
        "empty_cache": lambda: None,
        "synchronize": synchronize,
        "Stream": streams.Stream,
        "Event": streams.Event,
        "stream": streams.StreamContext,
        "current_stream": streams.current_stream,
        "default_stream": lambda device=None: HOST.streams[0],
        "set_stream": streams.set_stream,
        "CUDAGraph": Graph,
    },
    torch.accelerator: {
        "synchronize": synchronize,
        "is_available": lambda: True,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
    },
    torch.cuda.graphs.graph: {"default_capture_stream": None},
    torch._C: {"_host_emptyCache": lambda: None},
}
"""What torch's modules have on a machine with a device, by module and name."""
