"""The rows of EAGLE heads by transformers' own Llama modules, which read the head's config.json, in float64."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from specverify.backends.transformers_reference import wide
from specverify.reference.trace import Array
from tests.config_files import Content

SOURCES = {"midlayer.": "layers.0.", "fusion_fc.": "fc.", "transformer.": "layers.0."}
"""Prefixes of published layouts, each with that of vLLM."""


def llama_config(content: Content) -> LlamaConfig:
    """The config of the head's layer as transformers reads it; nested objects hold fields of the head."""
    nested = [content[name] for name in ("transformer_layer_config", "model") if isinstance(content.get(name), dict)]
    fields = {name: value for part in (*nested, content) for name, value in part.items() if name != "model_type"}
    return LlamaConfig(**{**fields, "attn_implementation": "eager"})


def state_of(folder: Path) -> dict[str, Tensor]:
    """The head's tensors in float64, by their names in vLLM's layout."""
    state = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        name = name.removeprefix("model.")
        for their_name, our_name in SOURCES.items():
            name = name.replace(their_name, our_name)
        state[name] = tensor.double() if tensor.is_floating_point() else tensor
    return state


class Layer:
    """A decoder layer of Llama in which each part is a module of transformers."""

    def __init__(self, config: LlamaConfig, state: dict[str, Tensor], prefix: str) -> None:
        self.config = config
        self._state = state
        self._prefix = prefix
        self._attention = LlamaAttention(config, 0)
        for part in "qkvo":
            self._project(self._attention, f"self_attn.{part}_proj")
        self._block = LlamaMLP(config)
        for part in ("gate", "up", "down"):
            self._project(self._block, f"mlp.{part}_proj")
        self._rotary = LlamaRotaryEmbedding(config)

    def _project(self, module: nn.Module, name: str) -> None:
        """Give `module` the stored projection; heads that read token and state have wider ones than Llama."""
        part = name.rsplit(".", 1)[1]
        weight = self._state[f"{self._prefix}.{name}.weight"]
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=getattr(module, part).bias is not None)
        stored = {"weight": weight}
        if linear.bias is not None:
            stored["bias"] = self._state[f"{self._prefix}.{name}.bias"]
        linear.load_state_dict(stored)
        setattr(module, part, linear)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """`x` [rows, hidden] through a norm of transformers with the stored gain `name`."""
        gain = self._state[f"{name}.weight"]
        module = LlamaRMSNorm(len(gain), eps=self.config.rms_norm_eps)
        module.load_state_dict({"weight": gain})
        normed: Tensor = module(x)
        return normed

    def output(self, x: Tensor, residual: Tensor) -> Tensor:
        """The output [rows, hidden] of rows whose attention reads `x` [rows, width]."""
        rows = len(x)
        mask = torch.full((rows, rows), -torch.inf).triu(1)[None, None]
        tables = self._rotary(x, torch.arange(rows)[None])
        if getattr(self.config, "no_rope_layers", None) == [0]:  # a field of heads, which no class of Llama reads
            tables = torch.ones_like(tables[0]), torch.zeros_like(tables[1])
        attended, _ = self._attention(x[None], tables, mask)
        residual = residual + attended[0]
        normed = self.norm(residual, f"{self._prefix}.post_attention_layernorm")
        block: Tensor = self._block(normed)
        return residual + block


def eagle1_scores(content: Content, folder: Path, embedded: Tensor, states: Tensor, head: Tensor) -> Array:
    """The scores [rows, vocabulary] of an EAGLE-1 head on `embedded` tokens beside `states`, each [rows, hidden]."""
    state = state_of(folder)  # outside of `wide`, which would replace the dtypes that the file names
    with wide():
        x = torch.cat([embedded, states], -1) @ state["fc.weight"].T + state.get("fc.bias", torch.zeros(()))
        output = Layer(llama_config(content), state, "layers.0").output(x, x)
        scores: Array = (output @ head.T).numpy()
    return scores


def eagle3_scores(content: Content, folder: Path, embedded: Tensor, states: Tensor) -> Array:
    """The scores [rows, draft vocabulary] of an EAGLE-3 head; `states` [rows, parts * hidden] are fused."""
    state = state_of(folder)  # outside of `wide`, which would replace the dtypes that the file names
    with wide():
        layer = Layer(llama_config(content), state, "layers.0")
        fused = states @ state["fc.weight"].T
        normed = layer.norm(fused, "layers.0.hidden_norm")
        x = torch.cat([layer.norm(embedded, "layers.0.input_layernorm"), normed], -1)
        output = layer.output(x, normed if content.get("norm_before_residual") else fused)
        scores: Array = (layer.norm(output, "norm") @ state["lm_head.weight"].T).numpy()
    return scores


def scores_of(kind: str, content: Content, folder: Path, tensors: dict[str, Any]) -> Array:
    """The scores of a head of this kind by transformers' modules."""
    if kind == "eagle1":
        return eagle1_scores(content, folder, tensors["embedded"], tensors["states"], tensors["head"])
    return eagle3_scores(content, folder, tensors["embedded"], tensors["states"])
