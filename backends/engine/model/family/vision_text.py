"""The text model of Qwen2-VL and Qwen2.5-VL.

It is transformers' Qwen 2 with the rotary embedding of Qwen2-VL. transformers' own class of that text model demands
heads as wide together as the hidden states, and has no head for logits; its numbers are those of this class
(`tests/meta/oracle/test_three_axes.py`).
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding

from specverify.backends.engine.model.family.base import ModelFamily, rope_of
from specverify.backends.engine.model.float64_modules import ExactRotary
from specverify.reference.architecture import Architecture
from specverify.reference.family.vision_text import VisionTextSettings


class VisionTextConfig(Qwen2Config):  # type: ignore[misc]
    """Qwen 2's config, whose `rope_parameters` have a `mrope_section`."""

    ignore_keys_at_rope_validation: ClassVar[set[str]] = {"mrope_section"}


class VisionTextForCausalLM(Qwen2ForCausalLM):  # type: ignore[misc]
    """Qwen 2 with positions on three axes, [3, B, T]; positions [B, T] stand for all three."""

    config: VisionTextConfig

    def __init__(self, config: VisionTextConfig) -> None:
        super().__init__(config)
        self.model.rotary_emb = Qwen2VLRotaryEmbedding(config)


class ExactAxes(ExactRotary):
    """The rotary tables of three axes in float64."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.sections = config.rope_parameters["mrope_section"]

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [B, T, head_dim] for `position_ids` [3, B, T] or [B, T]."""
        angle = position_ids.expand(3, -1, -1)[..., None].double() * self.inverse
        parts = torch.split(angle, self.sections, -1)
        turned = torch.cat([part[axis] for axis, part in enumerate(parts)], -1)
        turned = torch.cat((turned, turned), -1)
        return (turned.cos() * self.scaling).to(hidden.dtype), (turned.sin() * self.scaling).to(hidden.dtype)


def _exact(_: nn.Module, config: Any) -> nn.Module:
    return ExactAxes(config)


def _fields(arch: Architecture) -> dict[str, Any]:
    sections = list(VisionTextSettings.of(arch).sections)
    return {"use_sliding_window": False, "rope_parameters": {**rope_of(arch), "mrope_section": sections}}


QWEN2_VL = ModelFamily(
    "qwen2_vl",
    VisionTextConfig,
    VisionTextForCausalLM,
    _fields,
    exact={"Qwen2VLRotaryEmbedding": _exact},
)
