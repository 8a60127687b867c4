"""gpt-oss (arXiv 2508.10925; transformers `models/gpt_oss`).

Each head has a sink, a learned score without a column that takes a share of each softmax. Every second layer has a
sliding window. All blocks are mixtures of experts with biases and a clamped gate. Tensors of experts have the names of
Qwen 2 MoE's, each expert its own.
"""

from dataclasses import dataclass

from specverify.reference.family.base import Family, Shapes, gated_block
from specverify.reference.family.settings import ArchitectureFields, Settings, positive
from specverify.reference.malformed import Malformed


@dataclass(frozen=True)
class GptOssSettings(Settings):
    """The counts of experts, and the numbers of their gate."""

    experts: int = 128
    experts_per_token: int = 4
    gate_alpha: float = positive(1.702)  # the gate g becomes g * sigmoid(alpha * g)
    gate_limit: float = positive(7.0)  # the gate is at most this, the other factor between this and its negative

    def check(self, arch: ArchitectureFields) -> None:
        """See `Settings.check`."""
        experts, taken = self.experts, self.experts_per_token
        if experts != int(experts) or taken != int(taken) or not 1 <= taken <= experts <= 4096:
            raise Malformed("settings", f"experts_per_token of {taken:g} with {experts:g} experts")


def _blocks(arch: ArchitectureFields, layer: int) -> Shapes:
    experts, hidden = GptOssSettings.of(arch).experts, arch.hidden_size
    table: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (experts, hidden), "mlp.gate.bias": (experts,)}
    for expert in range(experts):
        table |= gated_block(f"mlp.experts.{expert}", hidden, arch.intermediate_size, biased=True)
    return table


GPT_OSS = Family(
    "gpt_oss",
    feed_forward=_blocks,
    attention_extras=lambda arch, layer: {"self_attn.sinks": (arch.heads,)},
    mixes_rows=True,
    sinks=True,
    rare=True,
    settings=GptOssSettings,
    drawn=(
        {
            "vocab_size": 25, "hidden_size": 16, "intermediate_size": 12, "heads": 2, "kv_heads": 1, "head_dim": 4,
            "windows": (4, 0), "qkv_bias": True, "output_bias": True,
            "settings": GptOssSettings(experts=4, experts_per_token=2, gate_limit=1.0),
        },
        {
            "vocab_size": 37, "hidden_size": 16, "intermediate_size": 12, "heads": 4, "kv_heads": 2, "head_dim": 8,
            "windows": (6, 0, 6), "qkv_bias": True, "output_bias": True,
            "rope": {"theta": 150000.0, "kind": "yarn", "factor": 8.0, "original": 64, "truncate": False},
            "settings": GptOssSettings(experts=3, experts_per_token=1),
        },
    ),
)  # fmt: skip
