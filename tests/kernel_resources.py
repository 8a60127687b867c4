"""What our Triton kernels need of a GPU that is not here: shared memory, registers and spills, by target and size.

`python -m tests.kernel_resources TARGET DTYPE HEAD_DIM [...]` compiles the kernel of a verify forward through Triton's
JIT, with the plan that `plan_for_gpu` chooses for Llama-3-8B's heads and a tree of 64 nodes, and prints one line of
JSON for each triple. A target is sm_80 or its like, or gfx942; the code is the machine code of the target.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from specverify.backends.engine.attention.triton_launch import Plan, compiled_kernel, plan_for_gpu
from tests.compiled_launches import CompilingDriver, CompilingTools, target_of
from tests.treeattention import scene

TABLE = Path(__file__).parent / "kernel_resources.json"
"""What was measured: a list of the lines that this program prints."""

SHARED_LIMIT = {"sm_80": 166912, "sm_86": 101376, "sm_89": 101376, "sm_90": 232448, "sm_100": 232448, "sm_120": 101376,
                "gfx942": 65536}  # fmt: skip
"""Most bytes of shared memory of one block by target (CUDA programming guide, compute capabilities; CDNA 3 ISA)."""

GROUP, NODES = 4, 64
"""Query heads of a KV head, and rows of the tree: more than a tile of rows holds."""


class MeasuringTools(CompilingTools):
    """Keeps what the JIT hands to the driver: machine code, and the bytes of shared memory."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        self.needs: list[dict[str, int]] = []

    def load_binary(self, *arguments: Any) -> tuple[int, int, int, int, int]:
        """See `CompilingTools`."""
        _, code, shared, *_ = arguments
        needs = of_hsaco(code) if self.target.backend == "hip" else of_cubin(code)
        self.needs.append({"shared": shared, **needs})
        return (0, 0, 0, 0, 1024)


def of_cubin(code: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack: what did not fit into registers."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        process = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", process.stdout)[0]
    return {"registers": int(registers), "stack": int(stack)}


def of_hsaco(code: bytes) -> dict[str, int]:
    """Vector registers of a thread, and bytes of its private memory, from the metadata of the code object."""
    return {
        "registers": packed_number(code, b".vgpr_count"),
        "stack": packed_number(code, b".private_segment_fixed_size"),
    }


def packed_number(code: bytes, name: bytes) -> int:
    """The MessagePack number behind a name."""
    place = code.index(name) + len(name)
    width = {0xCC: 1, 0xCD: 2, 0xCE: 4}.get(code[place], 0)
    return code[place] if not width else int.from_bytes(code[place + 1 : place + 1 + width], "big")


def needs_of(name: str, dtype: str, dim: int) -> dict[str, Any]:
    """The plan of the launch, and what its kernel needs."""
    driver = CompilingDriver(target_of(name))
    tools = MeasuringTools(driver.target)
    driver.utils = tools
    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda device=None: SimpleNamespace(
        major=9 if driver.target.backend == "hip" else driver.target.arch // 10,
        multi_processor_count=132,
        shared_memory_per_block_optin=SHARED_LIMIT[name],
    )
    triton.runtime.driver.set_active(driver)
    drawn = scene(((64, NODES),), heads=GROUP, kv_heads=1, dim=dim, dtype=getattr(torch, dtype), page=16)
    plans: list[Plan] = []

    def plan(query: torch.Tensor, kv_heads: int, packed: Any) -> Plan:
        plans.append(replace(plan_for_gpu(query, kv_heads, packed), splits=0))
        return plans[-1]

    replace(compiled_kernel(), plan=plan)(drawn.query, drawn.columns, drawn.scaling)
    (needs,) = tools.needs
    rows, tile, warps = plans[0].rows, plans[0].tile, plans[0].warps
    return {"target": name, "dtype": dtype, "dim": dim, "rows": rows, "tile": tile, "warps": warps, **needs}


if __name__ == "__main__":
    words = sys.argv[1:]
    for name, dtype, dim in zip(words[::3], words[1::3], words[2::3], strict=True):
        sys.stdout.write(json.dumps(needs_of(name, dtype, int(dim))) + "\n")
        sys.stdout.flush()
