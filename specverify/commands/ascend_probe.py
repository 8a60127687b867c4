"""The command `doctor --probe ascend`: a test of the operators' documented rules.

It tells which rules hold on the Ascend device of this machine.
"""

from typing import Any

from specverify.backends.base import Unavailable


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
