"""The scores of a draft of blocks in published files: by transformers' Qwen3 modules, and by the package `dflash`."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import DynamicCache, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

from specverify.backends.transformers_reference import wide
from specverify.reference.trace import Array
from tests.config_files import Content


def qwen3_config(content: Content) -> Qwen3Config:
    """The config as z-lab's package reads it; fields of speculators' nested object count as its own."""
    nested = content.get("transformer_layer_config")
    fields = {**(nested if isinstance(nested, dict) else {}), **content}
    return Qwen3Config(**{name: value for name, value in fields.items() if name != "model_type"})


def state_of(folder: Path) -> dict[str, Tensor]:
    """The tensors in float64, by their published names."""
    return {
        name.removeprefix("model.").removeprefix("logit_head."): tensor.double()
        if tensor.is_floating_point()
        else tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }


class Slots:
    """The block behind a context, layer by layer, each part a module of transformers."""

    def __init__(self, content: Content, folder: Path) -> None:
        self.options = {**content, **(content.get("dflash_config") or {})}
        self.config = qwen3_config(content)
        self.state = state_of(folder)

    def norm(self, x: Tensor, name: str) -> Tensor:
        module = Qwen3RMSNorm(x.shape[-1], eps=self.config.rms_norm_eps).double()
        module.weight = nn.Parameter(self.state[f"{name}.weight"])
        normed: Tensor = module(x)
        return normed

    def linear(self, x: Tensor, name: str) -> Tensor:
        return nn.functional.linear(x, self.state[f"{name}.weight"], self.state.get(f"{name}.bias"))

    def outputs(self, root: int, hidden: Tensor, embedding: Tensor) -> Tensor:
        """The normed outputs [slots, hidden] under the token `root`, behind states `hidden` [T, width]."""
        config = self.config
        size, count = self.options["block_size"], len(hidden)
        context = self.norm(self.linear(hidden, "fc"), "hidden_norm")
        x = embedding[[root] + [self.options["mask_token_id"]] * (size - 1)]
        cos, sin = Qwen3RotaryEmbedding(config)(x, torch.arange(count + size)[None])
        for number in range(config.num_hidden_layers):
            name = f"layers.{number}"
            normed = self.norm(x, f"{name}.input_layernorm")
            before, after = self.convolutions(f"{name}.attention_conv", normed)
            inputs = torch.cat([context, before(normed)])
            heads = {
                part: self.linear(inputs, f"{name}.self_attn.{part}_proj").view(1, len(inputs), -1, config.head_dim)
                for part in "qkv"
            }
            queries, keys = (
                self.norm(heads[part], f"{name}.self_attn.{part}_norm").transpose(1, 2) for part in ("q", "k")
            )
            queries, keys = apply_rotary_pos_emb(queries, keys, cos, sin)
            groups = config.num_attention_heads // config.num_key_value_heads
            keys, values = (repeat_kv(part, groups) for part in (keys, heads["v"].transpose(1, 2)))
            mixed = nn.functional.scaled_dot_product_attention(
                queries[:, :, count:], keys, values, attn_mask=self.mask(number, count, size)
            )
            x = x + after(self.linear(mixed.transpose(1, 2).reshape(size, -1), f"{name}.self_attn.o_proj"))
            block = Qwen3MLP(config).double()
            for part in ("gate", "up", "down"):
                getattr(block, f"{part}_proj").weight = nn.Parameter(self.state[f"{name}.mlp.{part}_proj.weight"])
            normed = self.norm(x, f"{name}.post_attention_layernorm")
            before, after = self.convolutions(f"{name}.mlp_conv", normed)
            x = x + after(block(before(normed)))
        return self.norm(x, "norm")

    def convolutions(self, name: str, normed: Tensor) -> Sequence[Callable[[Tensor], Tensor]]:
        """The maps of slots before and after a part, each as one matrix over slots and channels together."""
        if f"{name}.base_kernel" not in self.state:
            return [torch.Tensor.clone] * 2
        taps, group = (int(self.options[f"conv_{part}_size"]) for part in ("kernel", "group"))
        size, hidden = normed.shape
        deltas = self.linear(normed, f"{name}.kernel_projection").view(size, 2, taps, hidden // group, 1)
        by_channel = deltas.expand(-1, -1, -1, -1, group).reshape(size, 2, taps, hidden)
        kernels = self.state[f"{name}.base_kernel"] + by_channel
        matrices = torch.zeros(2, size, size, hidden, dtype=normed.dtype)
        for tap in range(min(taps, size)):
            slots = torch.arange(tap, size)
            matrices[:, slots, slots - tap] = kernels[slots, :, tap].transpose(0, 1)
        return [partial(torch.einsum, "ijc,jc->ic", matrix) for matrix in matrices]

    def mask(self, layer: int, count: int, size: int) -> Tensor:
        """The columns that each slot sees, bool [slots, count + slots], by the rule of z-lab's package."""
        is_windowed = self.config.layer_types[layer] == "sliding_attention"
        causal = self.options.get("is_causal")
        query, key = torch.arange(count, count + size)[:, None], torch.arange(count + size)[None, :]
        visible = torch.ones(size, count + size, dtype=torch.bool)
        if is_windowed if causal is None else causal:
            visible &= key <= query
        return visible & ((query - key).abs() < self.config.sliding_window) if is_windowed else visible

    def scores(self, path: Sequence[int], hidden: Tensor, embedding: Tensor, head: Tensor, first: int) -> Tensor:
        """The scores behind `path`, whose first token is the root, by the head's own matrix or the target's `head`.

        `first` is the slot that scores the root's children.
        """
        outputs = self.outputs(path[0], hidden, embedding)[first : first + len(path)]
        scores = outputs[-1] @ self.state.get("lm_head.weight", head).T
        if "candidate_selector.successor_codebook" in self.state:
            return self.selected(scores, outputs[-1], path[-1])
        if "markov_head.markov_w1.weight" not in self.state:
            return scores
        before = self.state["markov_head.markov_w1.weight"][list(path)]
        kind = self.options.get("markov_head_type") or "vanilla"
        latent = before[-1]
        if kind == "gated":
            latent = latent * self.linear(torch.cat([outputs[-1], latent]), "markov_head.gate_proj").sigmoid()
        if kind == "rnn":
            memory = torch.zeros_like(latent)
            for embedded, output in zip(before, outputs, strict=True):
                joined = self.linear(torch.cat([memory, embedded, output]), "markov_head.joint_proj")
                gate, candidate, read = joined.chunk(3)
                memory = gate.sigmoid() * memory + (1 - gate.sigmoid()) * candidate.tanh()
                latent = read.tanh()
        return scores + self.state["markov_head.markov_w2.weight"] @ latent

    def selected(self, scores: Tensor, output: Tensor, previous: int) -> Tensor:
        """The scores of the selector: those of the slot's best tokens, and minus infinity for the others."""
        best, ids = scores.topk(self.options["selector_top_k"])
        vectors = {part: self.state[f"candidate_selector.{part}_codebook"] for part in ("predecessor", "successor")}
        gate = self.linear(output, "candidate_selector.hidden_projection")
        edges = torch.einsum("r,r,cr->c", vectors["predecessor"][previous], gate, vectors["successor"][ids])
        return torch.full_like(scores, -torch.inf).scatter(0, ids, best + edges)


def scores_of(content: Content, folder: Path, path: Sequence[int], tensors: dict[str, Tensor], first: int) -> Array:
    """See `Slots.scores`; `tensors` holds `hidden`, `embedding` and `head` in float64."""
    slots = Slots(content, folder)
    with wide():
        scores = slots.scores(path, tensors["hidden"], tensors["embedding"], tensors["head"], first)
    rows: Array = scores.numpy()
    return rows


def package_draft(content: Content, folder: Path) -> tuple[Any, Qwen3Config]:
    """The draft of the package `dflash`, with its config: one of DFlash2 where its class says so."""
    from dflash.model import DFlash2DraftModel, DFlashDraftModel  # absent unless it was installed

    config, state = qwen3_config(content), state_of(folder)
    kind = DFlash2DraftModel if "DFlash2DraftModel" in content["architectures"] else DFlashDraftModel
    with wide():
        draft: Any = kind(config).double().eval()
        renamed = {f"{name}.weight" if name.endswith("codebook") else name: tensor for name, tensor in state.items()}
        own_weights = {name: tensor for name, tensor in renamed.items() if name in draft.state_dict()}
        draft.load_state_dict(own_weights, strict=True)
    return draft, config


def package_path(content: Content, folder: Path, root: int, outputs: Array, head: Tensor) -> list[int]:
    """The tokens that the selector of the package `dflash` chooses behind `root`, by outputs [slots, hidden]."""
    draft, _ = package_draft(content, folder)
    with wide():
        hidden = torch.tensor(outputs)[None, 1:]
        path, _, _ = draft.propose(hidden, torch.tensor([root]), lambda x: x @ head.T, 0.0)
    tokens: list[int] = path[0].tolist()
    return tokens


def package_outputs(
    content: Content, folder: Path, root: int, tensors: dict[str, Tensor], cuts: Sequence[int]
) -> Array:
    """The normed outputs [slots, hidden] of the package `dflash`, whose context grows by a forward at each of `cuts`.

    After each forward the package crops the block from its cache, as its own generation does.
    """
    draft, config = package_draft(content, folder)
    with wide():
        size = draft.block_size
        embedded = tensors["embedding"][[root] + [draft.mask_token_id] * (size - 1)][None]
        cache = DynamicCache(config=config)
        cache.activate_past_recording()
        first = 0
        for last in (*cuts, len(tensors["hidden"])):
            output = draft(
                position_ids=torch.arange(first, last + size)[None], noise_embedding=embedded,
                target_hidden=tensors["hidden"][None, first:last], past_key_values=cache, use_cache=True,
            )  # fmt: skip
            cache.crop(-(cache.get_seq_length() - last))
            first = last
    outputs: Array = output[0].numpy()
    return outputs
