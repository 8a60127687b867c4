"""Llama 4's text model, with dense layers and with experts.

After transformers' `models/llama4`. The norm of queries and keys has no gain. The family `llama4_text` has experts: a
router scores those of each row, and the row, multiplied by the sigmoid of an expert's score, goes through the experts
with the highest scores and through a shared expert. Tensors have the names of Qwen 2 MoE.
"""

from dataclasses import dataclass

from specverify.reference.family.base import Family, Shapes, gated_block
from specverify.reference.family.experts import Mixture
from specverify.reference.family.settings import ArchitectureFields, whole
from specverify.reference.malformed import Malformed

LLAMA4 = Family("llama4", query_key_gains=False)


@dataclass(frozen=True)
class Llama4TextSettings(Mixture):
    """The counts of experts and the layers that have them."""

    experts: int = whole(16)
    experts_per_token: int = whole(1)
    expert_size: int = whole(8192)
    sparse_step: int = whole(1, least=0)  # each so many layers, the last one of them has experts; 0 for none

    def check(self, arch: ArchitectureFields) -> None:
        """See `Settings.check`."""
        if self.experts_per_token > self.experts:
            raise Malformed("settings", f"experts_per_token of {self.experts_per_token} with fewer experts")


def _blocks(arch: ArchitectureFields, layer: int) -> Shapes:
    hidden, settings = arch.hidden_size, Llama4TextSettings.of(arch)
    if not settings.has_experts(layer):
        return gated_block("mlp", hidden, arch.intermediate_size)
    table: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (settings.experts, hidden)}
    for expert in range(settings.experts):
        table |= gated_block(f"mlp.experts.{expert}", hidden, settings.expert_size)
    return {**table, **gated_block("mlp.shared_expert", hidden, settings.expert_size)}


LLAMA4_TEXT = Family(
    "llama4_text",
    query_key_gains=False,
    feed_forward=_blocks,
    # transformers runs every row through every expert, those that it did not choose at zero, so that no row's bits
    # follow the others. Yet engines group the rows of an expert, and a tie between experts is one here too.
    mixes_rows=True,
    rare=True,
    settings=Llama4TextSettings,
    drawn=(
        {"vocab_size": 29, "hidden_size": 16, "intermediate_size": 24, "heads": 2, "kv_heads": 1, "head_dim": 4,
         "windows": (0, 0, 0), "qk_norm": True, "chunks": (6, 0, 6), "unrotated": (1,), "floor_scale": 4,
         "attn_scale": 0.5, "settings": Llama4TextSettings(experts=4, expert_size=12, sparse_step=2)},
    ),
)  # fmt: skip
