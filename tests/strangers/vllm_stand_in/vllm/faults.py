"""The fault that is planted in the stand-in: the word in VLLM_STAND_IN_FAULT."""

import os


def has_fault(name: str) -> bool:
    return os.environ.get("VLLM_STAND_IN_FAULT") == name
