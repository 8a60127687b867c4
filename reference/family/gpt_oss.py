"""gpt-oss (arXiv 2508.10925; transformers `models/gpt_oss`).

Each head has a sink, a learned score without a column that takes a share of each softmax. Every second layer has a
sliding window. All blocks are mixtures of experts with biases and a clamped gate. Tensors of experts have the names of
Qwen 2 MoE's, each expert its own.
"""

from specverify.reference.family.base import ArchitectureFields, Family, Shapes, gated_block
from specverify.reference.malformed import Malformed


def _blocks(arch: ArchitectureFields, layer: int) -> Shapes:
    experts, hidden = int(arch.setting("experts")), arch.hidden_size
    table: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (experts, hidden), "mlp.gate.bias": (experts,)}
    for expert in range(experts):
        table |= gated_block(f"mlp.experts.{expert}", hidden, arch.intermediate_size, biased=True)
    return table


def _check(arch: ArchitectureFields) -> None:
    experts, experts_per_token = arch.setting("experts"), arch.setting("experts_per_token")
    if (
        experts != int(experts)
        or experts_per_token != int(experts_per_token)
        or not 1 <= experts_per_token <= experts <= 4096
    ):
        raise Malformed("settings", f"experts_per_token of {experts_per_token:g} with {experts:g} experts")
    for name in ("gate_alpha", "gate_limit"):
        if not arch.setting(name) > 0:
            raise Malformed("settings", f"{name} of {arch.setting(name)} is not positive")


GPT_OSS = Family(
    "gpt_oss",
    feed_forward=_blocks,
    attention_extras=lambda arch, layer: {"self_attn.sinks": (arch.heads,)},
    mixes_rows=True,
    sinks=True,
    rare=True,
    check=_check,
    settings={
        "experts": 128.0,
        "experts_per_token": 4.0,
        "gate_alpha": 1.702,  # the gate g becomes g * sigmoid(alpha * g)
        "gate_limit": 7.0,  # the gate is at most this, and the other factor lies between this and its negative
    },
    drawn=(
        {
            "vocab_size": 25, "hidden_size": 16, "intermediate_size": 12, "heads": 2, "kv_heads": 1, "head_dim": 4,
            "windows": (4, 0), "qkv_bias": True, "output_bias": True,
            "settings": (("experts", 4.0), ("experts_per_token", 2.0), ("gate_limit", 1.0)),
        },
        {
            "vocab_size": 37, "hidden_size": 16, "intermediate_size": 12, "heads": 4, "kv_heads": 2, "head_dim": 8,
            "windows": (6, 0, 6), "qkv_bias": True, "output_bias": True,
            "rope": {"theta": 150000.0, "kind": "yarn", "factor": 8.0, "original": 64, "truncate": False},
            "settings": (("experts", 3.0), ("experts_per_token", 1.0)),
        },
    ),
)  # fmt: skip
