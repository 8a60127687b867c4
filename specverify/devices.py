"""Which devices are here, and what is missing where they are not."""

from importlib.util import find_spec

DEVICES = ("cpu", "cuda", "npu")


def missing(device: str) -> str | None:
    """What keeps `device` (cpu, cuda, npu) from being used on this machine, or None."""
    import torch

    if device == "cuda":
        if torch.cuda.is_available():
            return None
        return "no CUDA device is visible" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"
    if device == "npu":
        if find_spec("torch_npu") is None:
            return "torch_npu is not installed (it goes with an Ascend device)"
        import torch_npu  # type: ignore[import-not-found, unused-ignore]  # noqa: F401 - registers torch.npu

        return None if torch.npu.is_available() else "torch_npu sees no Ascend device"  # type: ignore[attr-defined, unused-ignore]
    return None
