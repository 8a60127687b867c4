"""The facts of a new machine: versions, the device, and the schemas of its operators."""

from typing import Any

import torch

from specverify.backends.devices import why_no_device
from specverify.backends.engine.law_device import why_no_float64
from specverify.setup.environment import environment
from specverify.setup.errors import MissingInput

PROPERTIES = ("name", "major", "minor", "total_memory", "multi_processor_count", "shared_memory_per_block_optin")
"""What is told of the device, where torch tells it."""


def machine_facts(device: str) -> tuple[bool, dict[str, Any]]:
    """Versions and properties, and whether a schema of an operator is unknown to us.

    Raises:
        MissingInput: There is no such device.
    """
    why = why_no_device(device)
    if why is not None:
        raise MissingInput(f"first-contact --device {device}: {why}")
    properties = torch.get_device_module(device).get_device_properties(0)
    declined = why_no_float64(torch.device(device))
    facts: dict[str, Any] = {
        "versions": environment(),
        "device": {name: getattr(properties, name) for name in PROPERTIES if hasattr(properties, name)},
        "devices": torch.get_device_module(device).device_count(),
        "cuda": torch.version.cuda,
        "laws": "on the device" if declined is None else f"on the host: {declined}",
    }
    if device != "npu":
        return False, facts
    from specverify.backends.ascend.operators.versions import compare_schemas

    rows = list(compare_schemas())
    return any(row["state"] == "differs" for row in rows), {**facts, "schemas": rows}
