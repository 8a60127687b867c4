"""Launches of our Triton kernels through Triton's own JIT, on a driver that compiles for a GPU and runs nothing.

`python -m tests.compiled_launches TARGET SCENES`, with sm_90 or its like, or gfx942: a JSON list of scenes, each with
keyword arguments of `treeattention.scene` and the number of splits, is launched as the engine launches it. The JIT
specialises arguments as on a device: an argument of value 1 becomes a constant, a multiple of 16 is known as such. The
interpreter and `triton.compile` with a signature do neither. Printed are the kinds of values that each integer argument
had, as JSON.
"""

import inspect
import json
import sys
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

from specverify.backends.engine.attention.triton_launch import Plan, compiled_kernel
from tests.treeattention import scene

SHARED_MEMORY = 232_448
"""Bytes of shared memory of one block on an H100; the JIT refuses a kernel that needs more."""


class CompilingTools:
    """The device queries that the JIT makes before a launch."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, *arguments: Any) -> tuple[int, ...]:
        """Module, function, registers and spills of a kernel that is never run; its threads where they are asked."""
        facts = (0, 0, 0, 0, 1024)
        return facts if "n_max_threads" in inspect.getsource(CompiledKernel._init_handles) else facts[:4]


class CompilingDriver:
    """A driver of one GPU architecture whose launches do nothing."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        self.utils = CompilingTools()

    def launcher_cls(self, *description: Any) -> Any:
        return lambda *arguments, **options: None

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def target_of(name: str) -> GPUTarget:
    """The target of that name."""
    return GPUTarget("hip", name, 64) if name.startswith("gfx") else GPUTarget("cuda", int(name[3:]), 32)


class WatchedKernel:
    """A kernel that notes of which kinds the values of its integer arguments were: `one`, `sixteen`, `other`.

    Attributes:
        kinds: For each argument the kinds of its values.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.kinds: dict[str, set[str]] = defaultdict(set)

    def __getitem__(self, grid: Any) -> Any:
        """A function that launches the kernel over `grid`."""

        def launch(*arguments: Any, **constants: Any) -> None:
            for name, value in zip(self._kernel.arg_names, arguments, strict=False):
                if isinstance(value, int):
                    self.kinds[name].add("one" if value == 1 else "sixteen" if value % 16 == 0 else "other")
            self._kernel[grid](*arguments, **constants)

        return launch


def launch(arguments: dict[str, Any], tree: WatchedKernel, merge: WatchedKernel) -> None:
    """Compile the kernels for one scene; raises what Triton raises."""
    splits, sinks = arguments.pop("splits"), arguments.pop("sinks", False)
    lanes = tuple((prefix, nodes) for prefix, nodes in arguments.pop("lanes"))
    drawn = scene(lanes, dtype=getattr(torch, arguments.pop("dtype")), **arguments)
    columns = drawn.columns
    if sinks:
        columns = replace(columns, sinks=torch.zeros(drawn.query.shape[1]))
    plan = Plan(16, 32, splits)
    attend = replace(compiled_kernel(), tree_kernel=tree, merge_kernel=merge, plan=lambda *_: plan)
    attend(drawn.query, columns, drawn.scaling)


if __name__ == "__main__":
    triton.runtime.driver.set_active(CompilingDriver(target_of(sys.argv[1])))
    kernels = compiled_kernel()
    watched = WatchedKernel(kernels.tree_kernel), WatchedKernel(kernels.merge_kernel)
    for arguments in json.loads(sys.argv[2]):
        launch(arguments, *watched)
    kinds = [{name: sorted(values) for name, values in kernel.kinds.items()} for kernel in watched]
    sys.stdout.write(json.dumps(kinds) + "\n")
