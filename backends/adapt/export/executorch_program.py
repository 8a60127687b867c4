"""The exporter to a program of ExecuTorch, the runtime for small devices.

The program is a decoder whose KV cache is a static buffer, with slots and mask as inputs. A forward takes ROWS rows.
Each row brings its token, its position, the slot of the cache that it writes, and the slots that it sees. The program
therefore runs chains, trees and rewinds alike: which rows count is the caller's choice.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specverify.backends.adapt.models import open_network
from specverify.backends.base import Unsupported

ROWS, SLOTS = 16, 1280
"""Rows of a forward, and slots of the cache; both are sizes of the program."""

FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}
"""The `model_type` values of config.json that can be written."""

ROPES = ("default", "linear", "llama3", "yarn")
"""Kinds of `specverify.reference.architecture.ROPE_KINDS` that can be written; their tables never change."""


class SlottedDecoder(nn.Module):
    """The layers of a transformers model around a static cache.

    Attributes:
        keys_0, values_0, ...: The cache of each layer, [kv_heads, slots, head_dim].
    """

    inverse: Tensor

    def __init__(self, network: Any, slots: int = SLOTS) -> None:
        super().__init__()
        self.model = network.model
        self.head = network.lm_head
        config = network.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        rotary = network.model.rotary_emb
        self.register_buffer("inverse", rotary.inv_freq.float().clone())
        self.scaling = float(rotary.attention_scaling)
        for layer in range(config.num_hidden_layers):
            for kind in ("keys", "values"):
                self.register_buffer(f"{kind}_{layer}", torch.zeros(self.kv_heads, slots, 2 * len(self.inverse)))

    def forward(self, tokens: Tensor, positions: Tensor, slots: Tensor, mask: Tensor) -> Tensor:
        """Logits [rows, vocabulary]; see `streams`."""
        logits: Tensor = self.head(self.model.norm(self.streams(tokens, positions, slots, mask)[-1]))
        return logits

    def streams(self, tokens: Tensor, positions: Tensor, slots: Tensor, mask: Tensor) -> list[Tensor]:
        """The embeddings, and the residual stream after each layer, [rows, hidden] each.

        Args:
            tokens: int64 [rows].
            positions: int64 [rows], for rotary embedding.
            slots: int64 [rows]: the slot that each row writes before any row reads; all differ.
            mask: float32 [rows, slots]: 0 where the row sees the slot, and a large negative number elsewhere.
        """
        x = self.model.embed_tokens(tokens)
        streams = [x]
        angles = positions[:, None].float() * self.inverse
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        for number, layer in enumerate(self.model.layers):
            x = x + self.attend(number, layer.self_attn, layer.input_layernorm(x), (cos, sin, slots, mask))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            streams.append(x)
        return streams

    def attend(self, number: int, attention: Any, x: Tensor, row: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        """The output of the attention of layer `number` on the normed rows `x`, [rows, hidden]."""
        cos, sin, slots, mask = row
        queries, keys, values = (
            projection(x).view(len(x), heads, -1).transpose(0, 1)
            for projection, heads in (
                (attention.q_proj, self.heads), (attention.k_proj, self.kv_heads), (attention.v_proj, self.kv_heads),
            )
        )  # fmt: skip
        if hasattr(attention, "q_norm"):
            queries, keys = attention.q_norm(queries), attention.k_norm(keys)
        held_keys, held_values = getattr(self, f"keys_{number}"), getattr(self, f"values_{number}")
        held_keys.index_copy_(1, slots, rotate(keys, cos, sin))
        held_values.index_copy_(1, slots, values)
        group = self.heads // self.kv_heads
        seen_keys, seen_values = held_keys.repeat_interleave(group, 0), held_values.repeat_interleave(group, 0)
        scores = rotate(queries, cos, sin) @ seen_keys.transpose(1, 2) * attention.scaling + mask
        weighted_values = torch.softmax(scores, -1) @ seen_values
        output: Tensor = attention.o_proj(weighted_values.transpose(0, 1).reshape(len(x), -1))
        return output


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [heads, rows, head_dim] turned by half split: dimension i turns with i + head_dim / 2."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def save_executorch(checkpoint: str | Path, file: Path) -> Path:
    """Write the model of a checkpoint directory into `file` as a program of ExecuTorch in float32.

    The package `executorch` must be installed.

    Raises:
        Unsupported: The exporter does not know the family, its windows, or its rotary embedding.
        OSError: The file cannot be written.
    """
    from executorch.exir import to_edge_transform_and_lower

    network = open_network(checkpoint)
    check_network(network, "save_executorch")
    # Four tensors: torch.export takes one tensor that is given twice for one input, and would read positions as slots.
    inputs = (torch.zeros(ROWS, dtype=torch.long), torch.arange(ROWS), torch.arange(ROWS), torch.zeros(ROWS, SLOTS))
    with quiet_export(), torch.no_grad():
        program = torch.export.export(SlottedDecoder(network), inputs, strict=True)
        file.write_bytes(to_edge_transform_and_lower(program).to_executorch().buffer)
    return file


def check_network(network: Any, exporter: str) -> None:
    """Refuse a model that `SlottedDecoder` would run wrongly.

    Raises:
        Unsupported: The family, its windows, or its rotary embedding is not known; the line begins with `exporter`.
    """
    config = network.config
    kinds = {*(getattr(config, "layer_types", None) or ())} - {"full_attention"}
    rope = config.rope_parameters["rope_type"]
    if config.model_type not in FAMILIES or kinds or getattr(config, "sliding_window", None):
        raise Unsupported(f"{exporter} writes {', '.join(sorted(FAMILIES))} without windows of attention")
    if rope not in ROPES:
        raise Unsupported(f"{exporter} writes rotary embedding {', '.join(ROPES)}, and this model has {rope}")


@contextmanager
def quiet_export() -> Iterator[None]:
    """Inside the `with`, torch.export and ExecuTorch say nothing of their own deprecations, which no user can mend."""
    logging.getLogger("torch.export").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
