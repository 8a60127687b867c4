"""Whether an Ascend device is here, and what is missing where it is not."""

from importlib import import_module
from importlib.util import find_spec

import torch


def missing() -> str | None:
    """Why the device cannot be used, in words; None where it can."""
    if find_spec("torch_npu") is None:
        return "torch_npu is not installed (it goes with an Ascend device)"
    try:
        import_module("torch_npu")  # registers torch.npu and torch.ops.npu
    except (ImportError, OSError) as why:
        return f"torch_npu cannot be imported: {' '.join(str(why).split())[:120]}"
    return None if torch.npu.is_available() else "torch_npu sees no Ascend device"  # type: ignore[attr-defined, unused-ignore]


def without_nnal() -> str | None:
    """Why ATB's operators cannot be used where torch_npu can; None where they can.

    ATB comes with the NNAL package; torch_npu loads its library when one of the operators is first looked for.
    """
    try:
        found = hasattr(torch.ops.atb, "_npu_paged_attention_splitfuse")
    except OSError as why:
        return f"NNAL is missing: {' '.join(str(why).split())[:120]}"
    return None if found else "NNAL, which holds ATB's operators, is not installed"
