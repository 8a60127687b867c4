"""vLLM's class `LLM` with drafts that read the target's states: EAGLE, EAGLE-3, Medusa, MTP, DFlash.

No released head fits the small targets of cases: each is made for the target, and made anew when other weights of the
target are loaded. An engine with a DFlash draft is opened anew for them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from specverify.backends.adapt import blackbox, exported
from specverify.backends.adapt.engines import vllm
from specverify.backends.adapt.export import save_dflash, save_eagle1, save_eagle3, save_medusa, save_mimo

EAGLE = {"method": "eagle", "num_speculative_tokens": vllm.DRAFTED}
EAGLE3 = {"method": "eagle3", "num_speculative_tokens": vllm.DRAFTED}
MEDUSA = {"method": "medusa", "num_speculative_tokens": vllm.DRAFTED}
MTP = {"method": "mtp", "num_speculative_tokens": vllm.DRAFTED}
DFLASH = {"method": "dflash", "num_speculative_tokens": vllm.DRAFTED}


def with_head(save: Callable[[str | Path, Path], Path], speculation: dict[str, Any]) -> Callable[..., vllm.OpenLlm]:
    """An opener of engines with the head that `save` makes for a target."""

    def directories(checkpoint: str, _: str | None) -> tuple[str, str]:
        return checkpoint, str(exported(save, checkpoint))

    def open_engine(checkpoint: str, dtype: str, setting: str) -> vllm.OpenLlm:
        target, head = directories(checkpoint, None)
        engine = vllm.open_llm(target, dtype, setting, {**speculation, "model": head})
        engine.directories = directories
        return engine

    return open_engine


def directories_of_mimo(checkpoint: str, _: str | None) -> tuple[str, str]:
    """The directory of a Qwen2 as a MiMo, which holds target and MTP module."""
    folder = str(exported(save_mimo, checkpoint))
    return folder, folder


def open_with_mtp(checkpoint: str, dtype: str, setting: str) -> vllm.OpenLlm:
    """An engine with the one MTP module of a MiMo, which is run for each drafted token."""
    target, _ = directories_of_mimo(checkpoint, None)
    engine = vllm.open_llm(target, dtype, setting, MTP)
    engine.directories = directories_of_mimo
    return engine


ABILITIES = vllm.drafting_by_own_text(vllm.ABILITIES)
"""The declaration of every head."""

open_eagle = blackbox(vllm.generate, name="vllm-eagle", open=with_head(save_eagle1, EAGLE), **ABILITIES)
open_eagle3 = blackbox(vllm.generate, name="vllm-eagle3", open=with_head(save_eagle3, EAGLE3), **ABILITIES)
open_medusa = blackbox(
    vllm.generate,
    name="vllm-medusa",
    open=with_head(save_medusa, MEDUSA),
    **vllm.drafting_by_own_text(vllm.without_setting(vllm.DYNAMIC, vllm.ABILITIES)),
)
open_mtp = blackbox(vllm.generate, name="vllm-mtp", open=open_with_mtp, **{**ABILITIES, "families": ("qwen2",)})
open_dflash = blackbox(
    vllm.generate,
    name="vllm-dflash",
    open=with_head(save_dflash, DFLASH),
    # A reload of the draft's weights leaves its fused matrix of keys and values empty on a CPU (0.32.0).
    **{**ABILITIES, "reload": None},
)
