"""Our Triton kernel under its interpreter: against float64 softmax, over shapes, dtypes, pages, splits and poison."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: pip install -e '.[triton]', on Linux")

import triton
import triton.language as tl

from specverify.backends.base import Unavailable
from specverify.backends.compositions import open_engine
from specverify.backends.engine.attention import triton_kernels
from specverify.backends.engine.attention.compact import Compact
from specverify.backends.engine.attention.triton_launch import Plan, TritonTree, interpreted_kernel, plan_for_cpu
from specverify.backends.registry import open_backend
from specverify.properties.strategies.models import GALLERY
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.layout import KvLayout
from specverify.reference.sampling import Stops
from specverify.reference.tree import Tree
from tests.tiers import first
from tests.treeattention import Scene, constant, hidden_changed, scene

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KERNEL = interpreted_kernel()
SIXTEEN_BIT = 2.0
"""What weights rounded to 16 bits add to the bound of an attention that rounds once."""


def kernel_with_splits(splits: int, tile: int = 16, rows: int = 16) -> TritonTree:
    """The kernel with a plan of our choice."""

    def plan(query: Tensor, kv_heads: int, packed: Compact) -> Plan:
        return Plan(rows, tile, splits)

    return replace(KERNEL, plan=plan)


def run(drawn_scene: Scene, kernel: TritonTree = KERNEL) -> Tensor:
    return kernel(drawn_scene.query, drawn_scene.columns, drawn_scene.scaling)


def bound(drawn_scene: Scene) -> float:
    return 1.0 if drawn_scene.query.dtype == torch.float32 else SIXTEEN_BIT


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [0, 2])
def test_the_kernel_is_the_softmax(dtype: torch.dtype, splits: int) -> None:
    """Empty prefixes, tiles and pages that end before, at and after a prefix, more rows than a tile, unequal lanes."""
    scenes = [
        scene(((0, 1),), 1, 1, 4, dtype),
        scene(((15, 3), (16, 2)), 2, 1, 6, dtype, page=16),
        scene(((17, 20), (0, 33), (3, 1)), 4, 2, 8, dtype, page=1),
        scene(((33, 5),), 2, 2, 8, dtype, window=5),
    ]
    for number, drawn_scene in enumerate(scenes):
        assert drawn_scene.error(run(drawn_scene, kernel_with_splits(splits))) <= bound(drawn_scene), number


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_large_heads(dim: int) -> None:
    for dtype, splits in ((torch.float32, 0), (torch.bfloat16, 3)):
        drawn_scene = scene(((40, 7),), 4, 2, dim, dtype, page=7)
        assert drawn_scene.error(run(drawn_scene, kernel_with_splits(splits))) <= bound(drawn_scene)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_shape_sweep(dtype: torch.dtype) -> None:
    """q_len 1 to 8 and more than 16, batches of 1 to 4, lengths around tile and page, GQA ratios, head dimensions."""
    ran = 0
    for q_len in (1, 2, 3, 4, 5, 6, 7, 8, 17, 31, 32, 33, 64):
        for batch in (1, 2, 3, 4):
            for around, page in ((0, 0), (16, 0), (16, 16), (32, 5), (64, 1), (128, 128)):
                lanes = tuple((max(0, around - 1 + lane), max(1, q_len - lane)) for lane in range(batch))
                ratio, dim = ((1, 8), (2, 64), (4, 128), (3, 256))[(q_len + batch) % 4]
                drawn_scene = scene(lanes, 2 * ratio, 2, dim, dtype, page, window=(0, 0, 9)[ran % 3], seed=ran)
                plan = KERNEL if ran % 2 else kernel_with_splits(1 + ran % 4, (16, 32, 64)[ran % 3], 32)
                assert drawn_scene.error(run(drawn_scene, plan)) <= bound(drawn_scene), (lanes, ratio, dim, page)
                ran += 1
    assert ran == 13 * 4 * 6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_scores_give_the_mean_of_what_is_seen(dtype: torch.dtype) -> None:
    """Q = K = 0, and a value of its own in every column; the tree is asymmetric, so a transposed mask shows."""
    drawn_scene = constant(scene(((20, 18), (3, 7)), 2, 1, 4, dtype, page=5))
    out = run(drawn_scene, kernel_with_splits(2))
    assert drawn_scene.error(out) <= bound(drawn_scene)
    turned = drawn_scene.columns.visible.clone()
    turned[0, 0, :, 20:38] = turned[0, 0, :, 20:38].T.clone()
    turned_output = run(
        replace(drawn_scene, columns=replace(drawn_scene.columns, visible=turned)), kernel_with_splits(2)
    )
    assert drawn_scene.error(turned_output) > 5 * bound(drawn_scene)


@pytest.mark.parametrize("splits", [0, 2])
def test_what_a_row_may_not_see_changes_no_bit_of_it(splits: int) -> None:
    """Cells that no lane owns, and those after a lane's end in its last page, hold NaN throughout."""
    drawn_scene = scene(((18, 34), (5, 3)), 2, 1, 4, page=4)
    kernel = kernel_with_splits(splits, rows=64)
    base = run(drawn_scene, kernel)
    assert bool(base.isfinite().all())
    for row, by in ((0, 30000.0), (3, 7.0), (31, 30000.0), (33, 7.0)):
        changed = run(hidden_changed(drawn_scene, row, by), kernel)
        assert torch.equal(changed[0, :, row], base[0, :, row]), row
        assert not torch.equal(changed[0], base[0])
        assert torch.equal(changed[1], base[1])


def test_a_row_that_sees_nothing_gives_zeros() -> None:
    drawn_scene = scene(((4, 3),))
    visible = drawn_scene.columns.visible.clone()
    visible[0, 0, 1] = False
    blind = replace(drawn_scene, columns=replace(drawn_scene.columns, visible=visible))
    for splits in (0, 2):
        assert torch.equal(run(blind, kernel_with_splits(splits))[0, :, 1], torch.zeros(4, 8))


def test_pages_in_any_order_and_gathered_columns_give_the_same_bits() -> None:
    """The kernel's tiles follow columns, whatever pages they come from."""
    for splits in (0, 2):
        flat = run(scene(((37, 9),)), kernel_with_splits(splits))
        for page in (1, 5, 64):
            assert torch.equal(run(scene(((37, 9),), page=page), kernel_with_splits(splits)), flat)


def test_one_side_may_dominate() -> None:
    """Nothing overflows; log-sum-exps are as coarse as float32 is at the size of the scores, and no coarser."""
    drawn_scene = scene(((20, 6),))
    for side in (slice(0, 20), slice(20, None)):
        for size in (1e4, -1e4, 20.0, -20.0):
            key = torch.zeros_like(drawn_scene.columns.key)
            key[:, :, side] = size
            dominated_scene = replace(
                drawn_scene, query=torch.ones_like(drawn_scene.query), columns=replace(drawn_scene.columns, key=key)
            )
            assert dominated_scene.error(run(dominated_scene, kernel_with_splits(2))) <= 1 + abs(size) * 8**0.5 / 32, (
                side,
                size,
            )


def test_float64_is_refused() -> None:
    drawn_scene = scene(dtype=torch.float64)
    with pytest.raises(ValueError, match="not in float64"):
        run(drawn_scene)


def test_the_plan_for_the_interpreter_splits_long_prefixes() -> None:
    query = torch.zeros(1, 4, 6, 8)

    def plan(prefix: int) -> Plan:
        drawn_scene = scene(((prefix, 6),))
        return plan_for_cpu(query, 2, KERNEL.compact(drawn_scene.query, drawn_scene.columns))

    assert plan(10) == Plan(16, 16, 0)
    assert plan(95).splits == 0
    assert plan(128) == Plan(16, 64, 2)


def test_the_interpreter_leaves_the_process_as_it_was() -> None:
    """Triton compiles other kernels in the same process, and torch's FlexAttention may import it before or after."""
    before = tl.load, tl.dot, tl.max, tl.tensor.__add__
    run(scene())
    assert (tl.load, tl.dot, tl.max, tl.tensor.__add__) == before
    knobs = getattr(triton, "knobs", None)  # triton 3.2 has no such module
    assert knobs is None or not knobs.runtime.interpret
    assert "TRITON_INTERPRET" not in os.environ
    assert isinstance(triton.jit(triton_kernels.tree), triton.JITFunction)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_the_kernels_compile_for_a_gpu_that_is_not_here() -> None:
    """To the machine code of an H100 or H200; it is not run."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {"GROUP": 4, "DIM": 64, "WIDE": 64, "ROWS": 64, "TILE": 64, "PARTLY": True, "WIDEN": False}
    for splits in (0, 4):
        types = {name: "*bf16" for name in ("query", "key", "value")}
        types |= {"out": "*fp32", "lse": "*fp32"} if splits else {"out": "*bf16", "lse": "*i32"}
        types |= {name: "*i32" for name in ("table", "first", "prefixes", "widths", "bits")} | {"scaling": "fp32"}
        types |= {"sinks": "*fp32"}
        full_constants = {**constants, "SPLITS": splits, "SINKS": splits > 0}
        assembly = _compile_kernel(triton_kernels.tree, types, full_constants, ASTSource, GPUTarget)
        assert "mma" in assembly["ptx"]
    merging = {"PARTS": 5, "DIM": 64, "WIDE": 64, "ROWS": 16}
    assert _compile_kernel(
        triton_kernels.merge, {"out": "*fp32", "lse": "*fp32", "merged": "*bf16"}, merging, ASTSource, GPUTarget
    )


def _compile_kernel(kernel: Any, types: dict[str, str], constants: dict[str, Any], source: Any, target: Any) -> Any:
    names = triton.jit(kernel).arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    binary = triton.compile(source(triton.jit(kernel), signature, constants), target=target("cuda", 90, 32))
    assert binary.asm["cubin"]
    return binary.asm


LAUNCHES = [
    # One row of several heads: how the first launch of every generation looks.
    {"lanes": [[5, 1]], "dtype": "float32", "splits": 0},
    # Every integer argument, strides among them, is 1, is a multiple of 16, is neither.
    {
        "lanes": [[0, 1]],
        "heads": 1,
        "kv_heads": 1,
        "dim": 1,
        "page": 1,
        "dtype": "bfloat16",
        "splits": 2,
        "sinks": True,
    },
    {"lanes": [[256, 512]], "heads": 16, "kv_heads": 16, "dim": 16, "page": 16, "dtype": "float16", "splits": 2},
    {"lanes": [[5, 33]], "heads": 3, "kv_heads": 3, "dim": 5, "page": 3, "dtype": "float32", "splits": 2},
]


@pytest.mark.parametrize("target", first(("sm_90", "sm_80", "sm_86", "sm_89", "sm_100", "sm_120", "gfx942"), 1))
def test_the_kernels_compile_for_each_specialisation_of_their_arguments(target: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.compiled_launches", target, json.dumps(LAUNCHES)]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    root = Path(__file__).parents[3]
    ended = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    tree_kinds, merge_kinds = json.loads(ended.stdout)
    for kernel, kinds in ((triton_kernels.tree, tree_kinds), (triton_kernels.merge, merge_kinds)):
        assert kinds == {name: ["one", "other", "sixteen"] for name in kinds}
        # A scalar that is no integer argument of these launches would not have been asked.
        pointers = {
            "query",
            "key",
            "value",
            "table",
            "sinks",
            "first",
            "prefixes",
            "widths",
            "bits",
            "out",
            "lse",
            "merged",
        }
        scalars = {name for name in triton.jit(kernel).arg_names if not name.isupper()} - pointers - {"scaling"}
        assert set(kinds) == scalars


# In the engine.


def test_the_backend_gives_what_the_split_in_torch_gives() -> None:
    tree = Tree((0, 0, 3, 0, 1), (6, 1, 2, 3, 1))
    for number, layout in ((1, KvLayout(kind="paged", page_size=2)), (5, KvLayout(kind="sliding")), (6, KvLayout())):
        case = Case(
            Seeded(GALLERY[number], 0), (3, 1, 2, 2, 6), Scripted((tree,)), layout, stops=Stops(4), dtype="float32"
        )
        assert open_engine("triton-interpreted").run(case).output == open_engine("cpu-split").run(case).output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_its_backend_names_the_twin() -> None:
    with pytest.raises(
        Unavailable, match=r"cuda-fused needs an NVIDIA device: .*; on the CPU, triton-interpreted runs"
    ) as caught:
        open_backend("cuda-fused")
    assert "\n" not in str(caught.value)


def test_without_triton_the_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> TritonTree:
        raise ImportError("No module named 'triton'")

    monkeypatch.setattr("specverify.backends.compositions.interpreted_kernel", none)
    with pytest.raises(
        Unavailable, match=r"triton-interpreted needs Triton \(pip install 'triton>=3.0', on Linux\): No"
    ):
        open_engine("triton-interpreted")
