"""Heads by a part of what they compute: a layer that reads the token's embedding adds nothing to it here.

Each checks the layout of its directory, as the engine's loader does.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file


def embedding_of(network: Any, token: int) -> torch.Tensor:
    """The target's embedding [hidden] of a token."""
    row: torch.Tensor = network.get_input_embeddings().weight[token]
    return row


def matrix_of(network: Any) -> torch.Tensor:
    """The matrix [V, hidden] of the target's scores."""
    matrix: torch.Tensor = network.get_output_embeddings().weight
    return matrix


class Head:
    """A head whose tokens follow from the token before them.

    Attributes:
        architecture: The name of its class in config.json.
    """

    architecture: ClassVar[str]

    def __init__(self, folder: str) -> None:
        self.config = json.loads((Path(folder) / "config.json").read_text())
        assert self.config["architectures"] == [self.architecture]
        self.load_weights(load_file(Path(folder) / "model.safetensors").items())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.weights = {name: tensor.float() for name, tensor in weights}
        hidden = self.config["hidden_size"]
        for name, shape in self.shapes(hidden).items():
            assert self.weights[name].shape == shape, name

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """The shapes of some tensors."""
        raise NotImplementedError

    def scores(self, network: Any, token: int) -> torch.Tensor:
        """The scores of the token behind `token`."""
        raise NotImplementedError

    def best_tokens(self, network: Any, text: list[int], most: int) -> list[int]:
        tokens = text[-1:]
        for _ in range(most):
            tokens.append(int(self.scores(network, tokens[-1]).argmax()))
        return tokens[1:]


class Eagle(Head):
    architecture = "LlamaForCausalLM"

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        assert not any(
            name.startswith(("lm_head", "embed_tokens", "layers.0.input_layernorm")) for name in self.weights
        )
        return {
            "fc.weight": (hidden, 2 * hidden),
            "layers.0.mlp.down_proj.weight": (hidden, self.config["intermediate_size"]),
        }

    def scores(self, network: Any, token: int) -> torch.Tensor:
        row = embedding_of(network, token)
        return matrix_of(network) @ (self.weights["fc.weight"][:, : len(row)] @ row)


class Eagle3(Head):
    architecture = "LlamaForCausalLMEagle3"

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        assert self.weights["layers.0.self_attn.q_proj.weight"].shape[1] == 2 * hidden
        return {"fc.weight": (hidden, self.config["num_aux_hidden_states"] * hidden)}

    def scores(self, network: Any, token: int) -> torch.Tensor:
        return self.weights["lm_head.weight"] @ embedding_of(network, token)


class Mtp(Head):
    architecture = "MiMoForCausalLM"

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        assert self.config["num_nextn_predict_layers"] == 1
        norms = (
            "token_layernorm",
            "hidden_layernorm",
            "input_layernorm",
            "post_attention_layernorm",
            "final_layernorm",
        )
        return {
            **{f"model.mtp_layers.0.{name}.weight": (hidden,) for name in norms},
            "model.mtp_layers.0.input_proj.weight": (hidden, 2 * hidden),
        }

    def scores(self, network: Any, token: int) -> torch.Tensor:
        row = embedding_of(network, token)
        return matrix_of(network) @ (self.weights["model.mtp_layers.0.input_proj.weight"][:, len(row) :] @ row)


class DFlash(Head):
    """A mask that finds the token before it alone; all masks of a block find the root."""

    architecture = "DFlashDraftModel"

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        settings = self.config["dflash_config"]
        vocabulary = self.config["vocab_size"]
        assert settings["mask_token_id"] < vocabulary
        assert max(settings["target_layer_ids"]) < self.config["num_target_layers"]
        return {
            "fc.weight": (hidden, len(settings["target_layer_ids"]) * hidden),
            "embed_tokens.weight": (vocabulary, hidden),
            "lm_head.weight": (vocabulary, hidden),
            "layers.0.self_attn.q_norm.weight": (self.config["head_dim"],),
        }

    def scores(self, network: Any, token: int) -> torch.Tensor:
        root, mask = (
            self.weights["embed_tokens.weight"][row] for row in (token, self.config["dflash_config"]["mask_token_id"])
        )
        return self.weights["lm_head.weight"] @ (root / root.square().mean().sqrt() + mask)

    def best_tokens(self, network: Any, text: list[int], most: int) -> list[int]:
        return [int(self.scores(network, text[-1]).argmax())] * most


class Medusa(Head):
    """Heads that read the state behind the last verified token: the one before the pending root."""

    architecture = "MedusaModel"

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        heads = range(self.config["num_heads"])
        return {f"blocks.{head}.layers.0.weight": (hidden, hidden) for head in heads} | {
            f"lm_heads.{head}.weight": (self.config["vocab_size"], hidden) for head in heads
        }

    def best_tokens(self, network: Any, text: list[int], most: int) -> list[int]:
        if len(text) < 2:
            return []
        state = network.model(torch.tensor([text[:-1]]), use_cache=False).last_hidden_state[0, -1]
        return [int(self._scores(head, state).argmax()) for head in range(most)]

    def _scores(self, head: int, state: torch.Tensor) -> torch.Tensor:
        block = torch.nn.functional.silu(self.weights[f"blocks.{head}.layers.0.weight"] @ state)
        return self.weights[f"lm_heads.{head}.weight"] @ (state + block)


HEADS: dict[str, type[Head]] = {"eagle": Eagle, "eagle3": Eagle3, "medusa": Medusa, "mtp": Mtp, "dflash": DFlash}
"""The heads by vLLM's methods of speculation."""
