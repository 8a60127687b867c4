"""Launches of our Triton kernels through Triton's own JIT, on a driver that compiles for a GPU and runs nothing.

`python -m tests.compiled_launches ARCHITECTURE SCENES`: a JSON list of scenes, each with keyword arguments of
`treeattention.scene` and the number of splits, is launched as the engine launches it. The JIT specialises arguments as
on a device: an argument of value 1 becomes a constant, a multiple of 16 is known as such. The interpreter and
`triton.compile` with a signature do neither.
"""

import json
import sys
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from specverify.backends.engine.attention.triton_launch import Plan, compiled_kernel
from tests.treeattention import scene

SHARED_MEMORY = 232_448
"""Bytes of shared memory of one block on an H100; the JIT refuses a kernel that needs more."""


class CompilingTools:
    """The device queries that the JIT makes before a launch."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, *arguments: Any) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spilled registers and threads of a kernel that is never run."""
        return (0, 0, 0, 0, 1024)


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


def launch(arguments: dict[str, Any]) -> None:
    """Compile the kernels for one scene; raises what Triton raises."""
    splits, sinks = arguments.pop("splits"), arguments.pop("sinks", False)
    lanes = tuple((prefix, nodes) for prefix, nodes in arguments.pop("lanes"))
    drawn = scene(lanes, dtype=getattr(torch, arguments.pop("dtype")), **arguments)
    columns = drawn.columns
    if sinks:
        columns = replace(columns, sinks=torch.zeros(drawn.query.shape[1]))
    attend = replace(compiled_kernel(), plan=lambda query, kv_heads, packed: Plan(16, 32, splits))
    attend(drawn.query, columns, drawn.scaling)


if __name__ == "__main__":
    triton.runtime.driver.set_active(CompilingDriver(GPUTarget("cuda", int(sys.argv[1]), 32)))
    scenes = json.loads(sys.argv[2])
    for arguments in scenes:
        launch(arguments)
    sys.stdout.write(f"{len(scenes)} launches compiled\n")
