"""Tests for an Ascend device, and for the packages that its operators need."""

from importlib import import_module
from importlib.util import find_spec

# torch is imported by the functions that ask it: a list of backends on a machine without Ascend needs none.


def why_no_npu() -> str | None:
    """The reason why the device cannot be used, in words; None where it can."""
    # find_spec looks for the package without importing it.
    if find_spec("torch_npu") is None:
        return "torch_npu is not installed (it goes with an Ascend device)"
    try:
        import torch

        import_module("torch_npu")  # registers torch.npu and torch.ops.npu
    except (ImportError, OSError) as why:
        return f"torch_npu cannot be imported: {' '.join(str(why).split())[:120]}"
    return None if torch.npu.is_available() else "torch_npu sees no Ascend device"  # type: ignore[attr-defined, unused-ignore]


def without_nnal() -> str | None:
    """The reason why ATB's operators cannot be used although torch_npu can; None where they can.

    ATB comes with the NNAL package. torch_npu loads NNAL's library when one of ATB's operators is first looked up.
    """
    import torch

    try:
        has_operator = hasattr(torch.ops.atb, "_npu_paged_attention_splitfuse")
    except OSError as why:
        return f"NNAL is missing: {' '.join(str(why).split())[:120]}"
    return None if has_operator else "NNAL, which holds ATB's operators, is not installed"
