"""The device types, and the reason why one cannot be used on this machine."""

DEVICES = ("cpu", "cuda", "npu")


def missing(device: str) -> str | None:
    """Why `device` (cpu, cuda, npu) cannot be used on this machine, or None if it can."""
    # Imported here, so that importing this module needs no torch.
    import torch

    if device == "cuda":
        if torch.cuda.is_available():
            return None
        return "no CUDA device is visible" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"
    if device == "npu":
        from backends.ascend.device import missing as missing_npu

        return missing_npu()
    return None
