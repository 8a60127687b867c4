"""The base of trained heads with a decoder layer."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from specverify.reference.draft.layer_head import HeadLayer
from specverify.training.heads.base import Batch, OpenedHead, TrainedHead, at_rows
from specverify.training.heads.layer import DecoderLayer, Experts, FurtherLayer, GatedBlock, Paths

ATTENTION, FEED_FORWARD = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
"""The projections of attention and of a gated block."""


class LayerHeadModule(TrainedHead):
    """A head that runs a decoder layer over rows of tokens beside states.

    Attributes:
        prefix: The prefix of the layer in published names.
        layer: The layer.
        further: The layers after it.
    """

    prefix: str
    layer: DecoderLayer

    def __init__(self, embedding: Tensor, target_head: Tensor) -> None:
        super().__init__(embedding, target_head)
        self.further = nn.ModuleList()

    @property
    def layers(self) -> list[DecoderLayer]:
        """All layers, the first at the front."""
        return [self.layer, *(layer for layer in self.further if isinstance(layer, FurtherLayer))]

    @abstractmethod
    def of_target(self, states: Tensor) -> Tensor:
        """The target's states [..., width] as rows hold them, [..., hidden]."""

    @abstractmethod
    def attention_input(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The input of attention [..., width] and the residual [..., hidden], of embeddings and held states."""

    @abstractmethod
    def scores(self, outputs: Tensor) -> Tensor:
        """The scores [..., V] of outputs [..., hidden]."""

    def run(self, batch: Batch, steps: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each step k: the learned rows' outputs [B, R, hidden], their numbers [B, R], and bool [B, R]: learned.

        A row whose token i + 1 + k or whose teacher lies beyond the text is not learned in that step.
        """
        rows, real = batch.rows()
        true = torch.arange(batch.tokens.shape[1], device=rows.device).expand(batch.tokens.shape)
        states = self.of_target(batch.states)
        # The last row of a text lacks its token; no learned row sees it.
        stream = self.attention_input(self.embedding[batch.tokens.roll(-1, 1)], states)
        visible = true[:, None] <= rows[..., None]
        *before, last = self.layers
        paths = list[Paths]()
        for layer, after in zip(before, self.layers[1:], strict=True):
            # The next layer's keys need the outputs of all true rows, not of the learned ones alone.
            paths.append(Paths(*layer.keys_and_values(stream[0], true), []))
            stream = _layer_input(after, layer(*stream, true, paths[-1], true[:, None] <= true[..., None]))
        paths.append(Paths(*last.keys_and_values(stream[0], true), []))
        outputs = last(*(at_rows(tensor, rows) for tensor in stream), rows, paths[-1], visible)
        yield outputs, rows, real
        for step in range(1, steps):
            ahead = rows + 1 + step
            real = real & (ahead < batch.lengths[:, None])
            tokens = batch.tokens.gather(1, torch.where(real, ahead, 0))
            outputs = self.run_layers(
                self.attention_input(self.embedding[tokens], outputs), rows + step, paths, visible
            )
            yield outputs, rows, real

    def run_layers(
        self, stream: tuple[Tensor, Tensor], positions: Tensor, paths: list[Paths], visible: Tensor
    ) -> Tensor:
        """The outputs [B, R, hidden] of rows through all layers; their keys and values join the `paths` of each.

        Args:
            stream: What the first layer's attention reads, and the residual.
            positions: int64 [B, R].
            paths: For each layer, what the rows see.
            visible: bool [B, R, T]; the true rows that each row sees.
        """
        for number, (layer, layer_paths) in enumerate(zip(self.layers, paths, strict=True)):
            if number:
                stream = _layer_input(layer, stream[1])
            layer_paths.steps.append(layer.keys_and_values(stream[0], positions))
            stream = stream[0], layer(*stream, positions, layer_paths, visible)
        return stream[1]

    def open(self, tokens: Tensor, states: Tensor) -> "OpenedLayer":
        """See `TrainedHead`."""
        return OpenedLayer(self, tokens, states)

    def layer_tensors(self) -> dict[str, Tensor]:
        """The weights of all layers by their published names."""
        tensors: dict[str, Tensor] = {}
        for number, layer in enumerate(self.layers):
            prefix = f"layers.{number}" if number else self.prefix
            tensors |= {f"{prefix}.self_attn.{name}.weight": getattr(layer, name).weight for name in ATTENTION}
            tensors |= {f"{prefix}.{name}": weight for name, weight in _feed_forward_tensors(layer.feed_forward)}
            tensors[f"{prefix}.post_attention_layernorm.weight"] = layer.post_attention_layernorm.weight
            if isinstance(layer, FurtherLayer):
                tensors[f"{prefix}.input_layernorm.weight"] = layer.input_layernorm.weight
        return tensors

    def layer_config(self, target: dict[str, Any]) -> dict[str, Any]:
        """The fields of config.json that every head with a layer has."""
        sizes = self.layer.sizes
        return {
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.embedding.shape[1],
            "intermediate_size": sizes.intermediate_size,
            "num_hidden_layers": len(self.layers),
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "head_dim": sizes.head_dim,
            "rms_norm_eps": sizes.norm_eps,
            "rope_theta": sizes.theta,
            "max_position_embeddings": target.get("max_position_embeddings", 2048),
            "vocab_size": len(self.target_head),
            "tie_word_embeddings": False,
            "dtype": "float32",
        }


def _layer_input(layer: DecoderLayer, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """The input of a further layer's attention, and its residual, of the outputs of the layer before."""
    assert isinstance(layer, FurtherLayer)
    return layer.input_layernorm(outputs), outputs


def _feed_forward_tensors(block: GatedBlock | Experts) -> Iterator[tuple[str, Tensor]]:
    """The weights of a feed-forward block under the names below its layer; experts have those of Llama 4."""
    if isinstance(block, GatedBlock):
        yield from ((f"mlp.{name}.weight", getattr(block, name).weight) for name in FEED_FORWARD)
        return
    yield "feed_forward.router.weight", block.router.weight
    yield "feed_forward.experts.gate_up_proj", block.gate_up
    yield "feed_forward.experts.down_proj", block.down
    for name in FEED_FORWARD:
        yield f"feed_forward.shared_expert.{name}.weight", getattr(block.shared_expert, name).weight


class OpenedLayer(OpenedHead):
    """A head with a layer that drafts: the true rows of all texts are run once, the nodes level by level."""

    @torch.no_grad()
    def __init__(self, head: LayerHeadModule, tokens: Tensor, states: Tensor) -> None:
        self.head = head
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        stream = head.attention_input(head.embedding[tokens.roll(-1, 1)], head.of_target(states))
        self.positions = positions
        visible = positions[:, None] <= positions[..., None]
        self.paths = list[Paths]()
        for number, layer in enumerate(head.layers):
            if number:
                stream = _layer_input(layer, stream[1])
            self.paths.append(Paths(*layer.keys_and_values(stream[0], positions), []))
            stream = stream[0], layer(*stream, positions, self.paths[-1], visible)
        self.true = stream[1]
        self.outputs = self.true[:, :1]
        self.depth = 0
        self.row = positions[:, 0]

    @torch.no_grad()
    def root(self, roots: Tensor) -> Tensor:
        """See `OpenedHead`."""
        self.row = roots - 1
        self.depth = 0
        for paths in self.paths:
            paths.steps = []
        self.outputs = at_rows(self.true, self.row[:, None])
        return self.head.scores(self.outputs)[:, 0]

    @torch.no_grad()
    def level(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """See `OpenedHead`."""
        head, width = self.head, tokens.shape[1]
        stream = head.attention_input(head.embedding[tokens], at_rows(self.outputs, parents))
        for paths in self.paths:
            paths.steps = [(at_rows(keys, parents), at_rows(values, parents)) for keys, values in paths.steps]
        self.depth += 1
        positions = (self.row + self.depth)[:, None].expand(-1, width)
        visible = (self.positions[:, None] <= self.row[:, None, None]).expand(-1, width, -1)
        self.outputs = head.run_layers(stream, positions, self.paths, visible)
        return head.scores(self.outputs)


def sizes_of(config: Any) -> HeadLayer:
    """The sizes of the head's layer: those of a layer of the target with this configuration of transformers."""
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") if isinstance(rope, dict) else None
    return HeadLayer(
        heads,
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
        config.intermediate_size,
        float(theta or 10000.0),
        float(getattr(config, "rms_norm_eps", None) or 1e-5),
    )


@torch.no_grad()
def begin_with(layer: DecoderLayer, source: Any, offset: int) -> bool:
    """Copy a layer of the target into `layer`, whose attention reads the stream from column `offset` on.

    Returns:
        False where the target's layer has other names or shapes; then nothing was copied.
    """
    block = layer.feed_forward.block
    pairs = []
    for part, names, owner in (("self_attn", ATTENTION, layer), ("mlp", FEED_FORWARD, block)):
        module = getattr(source, part, None)
        for name in names:
            weight = getattr(getattr(module, name, None), "weight", None)
            parameter = getattr(owner, name).weight
            if name in ("q_proj", "k_proj", "v_proj"):
                parameter = parameter[:, offset:]
            if weight is None or weight.shape != parameter.shape:
                return False
            pairs.append((parameter, weight))
    for parameter, weight in pairs:
        parameter.copy_(weight)
    weight = getattr(getattr(source, "post_attention_layernorm", None), "weight", None)
    if weight is not None and weight.shape == layer.post_attention_layernorm.weight.shape:
        layer.post_attention_layernorm.weight.copy_(weight)
    return True
