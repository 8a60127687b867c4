"""Llama 4's text model, with dense layers and with experts.

After transformers' `models/llama4`. The norm of queries and keys has no gain. The family `llama4_text` has experts: a
router scores those of each row, and the row, multiplied by the sigmoid of an expert's score, goes through the experts
with the highest scores and through a shared expert. Tensors have the names of Qwen 2 MoE.
"""

from collections.abc import Sequence

from specverify.reference.family.base import ArchitectureFields, Family, Shapes, gated_block
from specverify.reference.malformed import Malformed

LLAMA4 = Family("llama4", query_key_gains=False)


def has_experts(arch: ArchitectureFields, layer: int) -> bool:
    """Whether `layer` has experts: each so many layers the last one, where the setting `sparse_step` is not 0."""
    step = int(arch.setting("sparse_step"))
    return bool(step) and (layer + 1) % step == 0


def _blocks(arch: ArchitectureFields, layer: int) -> Shapes:
    hidden, inner = arch.hidden_size, int(arch.setting("expert_size"))
    if not has_experts(arch, layer):
        return gated_block("mlp", hidden, arch.intermediate_size)
    experts = int(arch.setting("experts"))
    table: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (experts, hidden)}
    for expert in range(experts):
        table |= gated_block(f"mlp.experts.{expert}", hidden, inner)
    return {**table, **gated_block("mlp.shared_expert", hidden, inner)}


def _check(arch: ArchitectureFields) -> None:
    for name, least in (("experts", 1), ("experts_per_token", 1), ("expert_size", 1), ("sparse_step", 0)):
        value = arch.setting(name)
        if value != int(value) or not least <= value <= 65536:
            raise Malformed("settings", f"{name} of {value} is not a whole number from {least} to 65536")
    if arch.setting("experts_per_token") > arch.setting("experts"):
        raise Malformed("settings", f"experts_per_token of {arch.setting('experts_per_token'):g} with fewer experts")


LLAMA4_TEXT = Family(
    "llama4_text",
    query_key_gains=False,
    feed_forward=_blocks,
    # transformers runs every row through every expert, those that it did not choose at zero, so that no row's bits
    # follow the others. Yet engines group the rows of an expert, and a tie between experts is one here too.
    mixes_rows=True,
    rare=True,
    check=_check,
    settings={
        "experts": 16.0,
        "experts_per_token": 1.0,
        "expert_size": 8192.0,
        "sparse_step": 1.0,  # each so many layers, the last one of them has experts; 0 for none
    },
    drawn=(
        {"vocab_size": 29, "hidden_size": 16, "intermediate_size": 24, "heads": 2, "kv_heads": 1, "head_dim": 4,
         "windows": (0, 0, 0), "qk_norm": True, "chunks": (6, 0, 6), "unrotated": (1,), "floor_scale": 4,
         "attn_scale": 0.5, "settings": (("expert_size", 12.0), ("experts", 4.0), ("sparse_step", 2.0))},
    ),
)  # fmt: skip


def check_irope(
    windows: Sequence[int], chunks: Sequence[int], unrotated: Sequence[int], floor_scale: int, attn_scale: float
) -> None:
    """Raise Malformed where chunks, unrotated layers and temperature make no sense together.

    The arguments are fields of `specverify.reference.architecture.Architecture`.
    """
    layers = len(windows)
    if len(chunks) not in (0, layers):
        raise Malformed("chunks", f"{len(chunks)} entries for {layers} layers (or none at all)")
    if chunks and (min(chunks) < 0 or not any(chunks)):
        none = "no layer has a chunk: leave the field empty"
        raise Malformed("chunks", "a chunk is a number of tokens, or 0 for none" if min(chunks) < 0 else none)
    for layer, (window, chunk) in enumerate(zip(windows, chunks or (0,) * layers, strict=True)):
        if window and chunk:
            raise Malformed(f"chunks[{layer}]", "a layer has a window or a chunk, not both")
    # Comparing with the sorted set refuses wrong order, repetition and layers that do not exist at once.
    if list(unrotated) != sorted({layer for layer in unrotated if 0 <= layer < layers}):
        raise Malformed("unrotated", f"layers 0..{layers - 1} in ascending order, each once")
    if floor_scale < 0:
        raise Malformed("floor_scale", f"{floor_scale} is negative (0 leaves the temperature alone)")
    if floor_scale and not unrotated:
        raise Malformed("floor_scale", "scales the queries of unrotated layers, and this model has none")
    if not 0 < attn_scale <= 100:
        raise Malformed("attn_scale", f"{attn_scale} is not above 0 and at most 100")
