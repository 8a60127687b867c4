"""Our kernels compile for the GPUs on which they will run, need no more than each has, and spill nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specverify.backends.engine.attention.triton_launch import Plan, fit_shared_memory, power_of_two, shared_bytes

pytest.importorskip("triton", reason="Triton is not installed: pip install -e '.[triton]', on Linux")

import triton

from tests.kernel_resources import SHARED_LIMIT, TABLE

ROWS: list[dict[str, Any]] = json.loads(TABLE.read_text())["rows"]
VERSION = json.loads(TABLE.read_text())["triton"]
ROOT = Path(__file__).parents[3]

FEW_BYTES = 32
"""Bytes of a thread's stack that are no spill worth a smaller tile: eight registers."""

SPILLS = {512: "a row of latent attention holds 512 sums, which no tile of 16 rows fits into the registers of a block"}
"""Why a kernel for heads of that width may spill more."""

SIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


def test_seven_targets_all_dtypes_and_the_widths_of_models_are_in_the_table() -> None:
    triples = {(row["target"], row["dtype"], row["dim"]) for row in ROWS}
    assert len(triples) == len(ROWS)
    for target in SHARED_LIMIT:
        for dtype in ("bfloat16", "float32"):
            assert {(target, dtype, dim) for dim in (16, 128, 256)} <= triples
        assert {(target, "float16", 128), (target, "bfloat16", 512)} <= triples
    for dtype in SIZE:
        assert {("sm_90", dtype, dim) for dim in (16, 32, 64, 80, 96, 112, 128, 192, 256)} <= triples


def test_no_kernel_needs_more_than_its_target_has_or_spills() -> None:
    for row in ROWS:
        assert row["shared"] <= SHARED_LIMIT[row["target"]], row
        assert row["stack"] <= FEW_BYTES or row["dim"] in SPILLS, row


def test_the_estimate_of_shared_memory_is_no_less_than_what_kernels_need() -> None:
    for row in ROWS:
        plan = Plan(row["rows"], row["tile"], 0)
        assert row["shared"] <= shared_bytes(plan, power_of_two(row["dim"]), SIZE[row["dtype"]]), row


@pytest.mark.parametrize("limit", sorted({*SHARED_LIMIT.values()}))
def test_a_plan_is_made_to_fit(limit: int) -> None:
    for wide in (16, 64, 128, 256, 512):
        for plan in (Plan(128, 64, 0), Plan(64, 32, 0)):
            fitted = fit_shared_memory(plan, wide, 2, limit)
            assert shared_bytes(fitted, wide, 2) <= limit, (wide, fitted)
            if shared_bytes(plan, wide, 2) <= limit:
                assert fitted == plan


def compiled_again(rows: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The rows of these targets, dtypes and heads, compiled now."""
    triples = [str(row[name]) for row in rows for name in ("target", "dtype", "dim")]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.kernel_resources", *triples],
        cwd=ROOT,
        env={**os.environ, "TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return [json.loads(line) for line in ended.stdout.splitlines()]


PLANNED = ("target", "dtype", "dim", "rows", "tile", "warps")
"""What another version of Triton leaves as it is."""


@pytest.mark.parametrize("rows", [ROWS[:1], pytest.param(ROWS[1:], marks=pytest.mark.slow)], ids=["first", "others"])
def test_the_table_is_what_the_compiler_gives(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    for row, again in zip(rows, compiled_again(rows, tmp_path), strict=True):
        compared = row if triton.__version__ == VERSION else PLANNED
        assert {name: again[name] for name in compared} == {name: row[name] for name in compared}
        assert again["shared"] <= SHARED_LIMIT[row["target"]]
