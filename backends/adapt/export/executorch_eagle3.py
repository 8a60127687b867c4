"""The exporter to the two programs of ExecuTorch's plan for EAGLE-3: a target and its draft.

`specverify.backends.adapt.eagle3_programs` has the contract. The methods of one program share its cache: the exporter
gives them one module, and ExecuTorch's memory plan shares mutable buffers. The caches are static. A row is written to
the slot of its position, so that a rejected token is overwritten before any row may see it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from specverify.backends.adapt.eagle3_programs import (
    KV_STRATEGY,
    DraftMetadata,
    Metadata,
    TargetMetadata,
    constants,
)
from specverify.backends.adapt.export.executorch_program import (
    SlottedDecoder,
    check_network,
    quiet_export,
    rotate,
)
from specverify.backends.adapt.models import open_network
from specverify.backends.base import Unsupported
from specverify.backends.engine.model.head import head_frequencies
from specverify.reference.architecture import Checkpoint
from specverify.reference.draft.eagle3 import EMBEDDING, LAYER_PREFIX, Eagle3, layer_prefix
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft_files import open_head

HIDDEN = -1e9
"""The number that is added to the score of a slot that a row does not see."""


@dataclass(frozen=True)
class Lengths:
    """The lengths that a pair of programs is exported for; see `specverify.backends.adapt.eagle3_programs.Metadata`."""

    max_seq_len: int = 1024
    max_prefill_chunk: int = 128
    num_speculative_tokens: int = 8


class TargetRows(nn.Module):
    """The target with its cache: rows in, final rows and states out."""

    places: Tensor

    def __init__(self, network: Any, reads: HiddenStates, slots: int) -> None:
        super().__init__()
        self.decoder = SlottedDecoder(network, slots)
        self.reads = reads
        self.register_buffer("places", torch.arange(slots))

    def forward(self, tokens: Tensor, input_pos: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream after the last layer, [T, hidden], and the states that the draft reads, [T, width]."""
        streams = self.decoder.streams(tokens[0], input_pos, input_pos, self.visible(input_pos))
        return streams[-1], torch.cat([streams[layer + 1] for layer in self.reads.layers], -1)

    def visible(self, input_pos: Tensor) -> Tensor:
        """The mask [T, slots]: 0 for the slots up to a row's position, HIDDEN for others."""
        return torch.where(self.places[None] <= input_pos[:, None], 0.0, HIDDEN)

    def logits(self, rows: Tensor) -> Tensor:
        """The logits [rows, vocabulary] of rows of the stream after the last layer."""
        scores: Tensor = self.decoder.head(self.decoder.model.norm(rows))
        return scores


class TargetMethod(nn.Module):
    """A method of the target's program."""

    def __init__(self, rows: TargetRows) -> None:
        super().__init__()
        self.rows = rows


class LastRow(TargetMethod):
    """`target_prefill` and `target_decode`: logits and states of the last token."""

    def forward(self, tokens: Tensor, input_pos: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [1, vocabulary] and states [1, width]."""
        rows, states = self.rows(tokens, input_pos)
        return self.rows.logits(rows[-1:]), states[-1:]


class LastLogits(TargetMethod):
    """`target_prefill` with states of all tokens."""

    def forward(self, tokens: Tensor, input_pos: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [1, vocabulary] and states [T, width]."""
        rows, states = self.rows(tokens, input_pos)
        return self.rows.logits(rows[-1:]), states


class AllRows(TargetMethod):
    """`target_verify`: logits and states of all tokens."""

    def forward(self, tokens: Tensor, input_pos: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [1, T, vocabulary] and states [1, T, width]."""
        rows, states = self.rows(tokens, input_pos)
        return self.rows.logits(rows)[None], states[None]


class DraftRows(nn.Module):
    """The layers of an EAGLE-3 head with their cache.

    Args:
        draft: The words of the head.
        weights: float32, by their published names.
        embedding: The target's embedding, [vocabulary, hidden], for a head without its own.
        target_head: The target's head, for a head without its own.
        slots: Slots of the cache.
    """

    places: Tensor
    turns: Tensor

    def __init__(
        self, draft: Eagle3, weights: Mapping[str, Tensor], embedding: Tensor, target_head: Tensor, slots: int
    ) -> None:
        super().__init__()
        self.words = draft
        state = {EMBEDDING: embedding, "lm_head.weight": target_head, **weights}
        self.names = {name for name in state if name not in ("d2t", "t2d")}
        for name in self.names:
            self.register_buffer(name.replace(".", "_"), state[name].detach().clone())
        turns, self.magnitude = head_frequencies(draft.layer)
        self.register_buffer("turns", turns)
        self.register_buffer("places", torch.arange(slots))
        for layer in range(draft.layers):
            for kind in ("keys", "values"):
                cache = torch.zeros(draft.layer.kv_heads, slots, draft.layer.head_dim)
                self.register_buffer(f"{kind}_{layer}", cache)

    def of_target(self, states: Tensor) -> Tensor:
        """The target's states [T, width] as rows hold them, [T, hidden]."""
        if "fc.weight" not in self.names:
            return states
        if "input_norm.weight" in self.names:
            states = self.norm(states, "input_norm")
        if "fc_norm.0.weight" in self.names:
            parts = states.chunk(self.words.reads.parts, -1)
            states = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], -1)
        return self.linear(states, "fc")

    def forward(self, tokens: Tensor, states: Tensor, input_pos: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [1, draft vocabulary] of the last of the rows, and the state [1, hidden] that a row below it holds."""
        angles = torch.cat([input_pos[:, None].double() * self.turns] * 2, -1)
        cos, sin = (angles.cos() * self.magnitude).float(), (angles.sin() * self.magnitude).float()
        mask = torch.where(self.places[None] <= input_pos[:, None], 0.0, HIDDEN)
        normed_states = self.norm(states, f"{LAYER_PREFIX}.hidden_norm")
        embedded = self.norm(self.weight(EMBEDDING)[tokens[0]], f"{LAYER_PREFIX}.input_layernorm")
        x = torch.cat([embedded, normed_states], -1)
        stream = normed_states if self.words.norm_before_residual else states
        for layer in range(self.words.layers):
            if layer:
                x = self.norm(stream, f"{layer_prefix(layer)}.input_layernorm")
            stream = stream + self.attend(layer, x, cos, sin, input_pos, mask)
            stream = stream + self.feed_forward(
                layer, self.norm(stream, f"{layer_prefix(layer)}.post_attention_layernorm")
            )
        last = stream[-1:]
        normed = self.norm(last, "norm")
        return self.linear(normed, "lm_head"), normed if self.words.norm_output else last

    def attend(self, layer: int, x: Tensor, cos: Tensor, sin: Tensor, input_pos: Tensor, mask: Tensor) -> Tensor:
        """The output of the attention of `layer` on its input `x` [T, ...], [T, hidden]."""
        sizes = self.words.layer
        prefix = f"{layer_prefix(layer)}.self_attn"
        queries, keys, values = (
            self.linear(x, f"{prefix}.{part}_proj").view(len(x), heads, -1).transpose(0, 1)
            for part, heads in (("q", sizes.heads), ("k", sizes.kv_heads), ("v", sizes.kv_heads))
        )
        held_keys, held_values = getattr(self, f"keys_{layer}"), getattr(self, f"values_{layer}")
        held_keys.index_copy_(1, input_pos, rotate(keys, cos, sin))
        held_values.index_copy_(1, input_pos, values)
        group = sizes.heads // sizes.kv_heads
        scores = rotate(queries, cos, sin) @ held_keys.repeat_interleave(group, 0).transpose(1, 2)
        law = torch.softmax(scores * sizes.head_dim**-0.5 + mask, -1)
        output = law @ held_values.repeat_interleave(group, 0)
        return self.linear(output.transpose(0, 1).reshape(len(x), -1), f"{prefix}.o_proj")

    def feed_forward(self, layer: int, x: Tensor) -> Tensor:
        """The feed-forward block of `layer` of its normed input."""
        gate, up = (self.linear(x, f"{layer_prefix(layer)}.mlp.{part}_proj") for part in ("gate", "up"))
        return self.linear(functional.silu(gate) * up, f"{layer_prefix(layer)}.mlp.down_proj")

    def weight(self, name: str) -> Tensor:
        """The weight of a published name."""
        tensor: Tensor = getattr(self, name.replace(".", "_"))
        return tensor

    def linear(self, x: Tensor, name: str) -> Tensor:
        """`x` through the projection `name`, with its bias if it has one."""
        bias = self.weight(f"{name}.bias") if f"{name}.bias" in self.names else None
        return functional.linear(x, self.weight(f"{name}.weight"), bias)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """`x` through the root mean square norm `name`."""
        return (
            x
            * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.words.layer.norm_eps)
            * self.weight(f"{name}.weight")
        )


class DraftMethod(nn.Module):
    """A method of the draft's program."""

    def __init__(self, rows: DraftRows) -> None:
        super().__init__()
        self.rows = rows


class DraftPrefill(DraftMethod):
    """`draft_prefill`: rows beside the target's states."""

    def forward(self, tokens: Tensor, states: Tensor, input_pos: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [1, draft vocabulary] and state [1, hidden] of the last of T rows with states [1, T, width]."""
        outputs: tuple[Tensor, Tensor] = self.rows(tokens, self.rows.of_target(states[0]), input_pos)
        return outputs


class DraftDecode(DraftMethod):
    """`draft_decode`: one row beside the draft's own state."""

    def forward(self, tokens: Tensor, state: Tensor, input_pos: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [1, draft vocabulary] and state [1, hidden] of a row with `state` [1, hidden]."""
        outputs: tuple[Tensor, Tensor] = self.rows(tokens, state, input_pos)
        return outputs


TARGET = {"target_prefill": LastRow, "target_decode": LastRow, "target_verify": AllRows}
"""The module of each method of a target."""

DRAFT = {"draft_prefill": DraftPrefill, "draft_decode": DraftDecode}
"""The module of each method of a draft."""


def save_executorch_eagle3(
    checkpoint: str | Path,
    head: str | Path,
    target_file: Path,
    draft_file: Path,
    prefill_states: str = "last",
    max_seq_len: int = Lengths.max_seq_len,
    max_prefill_chunk: int = Lengths.max_prefill_chunk,
    num_speculative_tokens: int = Lengths.num_speculative_tokens,
) -> tuple[Path, Path]:
    """Write a checkpoint and its EAGLE-3 head as two programs of ExecuTorch in float32, for a batch of one.

    Args:
        checkpoint: The directory of the target.
        head: The directory of the head, in any layout that `--draft` reads.
        target_file: Where the target's program is written.
        draft_file: Where the draft's program is written.
        prefill_states: The tokens of which `target_prefill` hands over states: `last` or `all`.
        max_seq_len: Slots of the caches.
        max_prefill_chunk: The most tokens of a call of the prefill methods.
        num_speculative_tokens: The most drafted tokens of a step.

    The package `executorch` must be installed.

    Raises:
        Unsupported: The exporter does not know the family, its windows or its rotary embedding, or the head is none of
            EAGLE-3.
        UnreadableCheckpoint: The head cannot be read, or was not made for the target.
        OSError: A file cannot be written.
    """
    network = open_network(checkpoint)
    opened_head = open_head(head, Checkpoint(str(checkpoint), "", network.config.vocab_size, 0))
    words = opened_head.words
    if not isinstance(words, Eagle3):
        raise Unsupported(f"save_executorch_eagle3 writes EAGLE-3 heads, and {head} holds a head of {words.WORD}")
    weights = {name: torch.tensor(values) for name, values in opened_head.weights.items()}
    lengths = Lengths(max_seq_len, max_prefill_chunk, num_speculative_tokens)
    save_target(network, words.reads, target_file, lengths, prefill_states)
    save_draft(network, words, weights, draft_file, lengths)
    return target_file, draft_file


def save_target(
    network: Any,
    reads: HiddenStates,
    file: Path,
    lengths: Lengths = Lengths(),
    prefill_states: str = "last",
    methods: Mapping[str, type[TargetMethod]] = TARGET,
    rows: type[TargetRows] = TargetRows,
) -> Path:
    """Write the program of a target whose draft reads the states `reads`; see `save_executorch_eagle3`.

    `methods` has the module of each method, and `rows` is the module with the cache, which all methods share.
    """
    check_network(network, "save_executorch_eagle3")
    if reads.place != "residual":
        raise Unsupported(f"save_executorch_eagle3 hands over the residual stream, and the head reads the {reads}")
    config = network.config
    shared = _metadata(reads, config.hidden_size, lengths)
    meta = TargetMetadata(**shared, vocab_size=config.vocab_size, prefill_states=prefill_states)
    if prefill_states == "all":
        methods = {**methods, "target_prefill": LastLogits}
    module = rows(network, reads, lengths.max_seq_len)
    longest = {
        "target_prefill": lengths.max_prefill_chunk,
        "target_decode": 1,
        "target_verify": lengths.num_speculative_tokens + 1,
    }
    inputs = {method: (_ids(longest[method]), torch.arange(longest[method])) for method in methods}
    return _save({method: kind(module) for method, kind in methods.items()}, inputs, meta, file)


def save_draft(
    network: Any,
    draft: Eagle3,
    weights: Mapping[str, Tensor],
    file: Path,
    lengths: Lengths = Lengths(),
    methods: Mapping[str, type[DraftMethod]] = DRAFT,
) -> Path:
    """Write the program of a head with these weights, by their published names; see `save_executorch_eagle3`."""
    floats = {name: tensor.float() for name, tensor in weights.items() if name not in ("d2t", "t2d")}
    embedding = network.get_input_embeddings().weight
    vocab_size = len(embedding)
    module = DraftRows(draft, floats, embedding, network.get_output_embeddings().weight, lengths.max_seq_len)
    d2t = weights["d2t"].tolist() if "d2t" in weights else [0] * vocab_size
    hidden_size = network.config.hidden_size
    meta = DraftMetadata(
        **_metadata(draft.reads, hidden_size, lengths),
        target_vocab_size=vocab_size,
        draft_vocab_size=len(d2t),
        d2t=tuple(d2t),
    )
    chunk = lengths.max_prefill_chunk
    inputs = {
        "draft_prefill": (_ids(chunk), torch.zeros(1, chunk, meta.width), torch.arange(chunk)),
        "draft_decode": (_ids(1), torch.zeros(1, module.weight(EMBEDDING).shape[1]), torch.arange(1)),
    }
    return _save({method: kind(module) for method, kind in methods.items()}, inputs, meta, file)


def _metadata(reads: HiddenStates, hidden_size: int, lengths: Lengths) -> dict[str, Any]:
    return {
        "hidden_state_layers": reads.layers,
        "hidden_state_size": hidden_size,
        "kv_strategy": KV_STRATEGY,
        "max_seq_len": lengths.max_seq_len,
        "max_prefill_chunk": lengths.max_prefill_chunk,
        "num_speculative_tokens": lengths.num_speculative_tokens,
        "max_batch_size": 1,
    }


def _ids(count: int) -> Tensor:
    return torch.zeros(1, count, dtype=torch.long)


def _save(methods: Mapping[str, nn.Module], inputs: Mapping[str, Sequence[Tensor]], meta: Metadata, file: Path) -> Path:
    """Write a program of `methods`, each traced with its longest `inputs`; the number of tokens may be any up to it."""
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
    from executorch.exir.passes import MemoryPlanningPass
    from torch.export import Dim, export

    def dynamic_shapes(method: str) -> Any:
        longest = inputs[method][0].shape[1]
        if longest == 1:
            return None
        tokens = Dim("tokens", min=1, max=longest)
        return tuple([{1: tokens}] * (len(inputs[method]) - 1) + [{0: tokens}])

    with quiet_export(), torch.no_grad():
        programs = {}
        for method, module in methods.items():
            shapes = dynamic_shapes(method)
            programs[method] = export(module.eval(), tuple(inputs[method]), dynamic_shapes=shapes, strict=True)
        edge = to_edge_transform_and_lower(
            programs,
            constant_methods=constants(meta),
            compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
        )
        plan = MemoryPlanningPass(alloc_graph_input=False, share_mutable_buffers=True)
        config = ExecutorchBackendConfig(memory_planning_pass=plan, emit_mutable_buffer_names=True)
        file.write_bytes(edge.to_executorch(config=config).buffer)
    return file
