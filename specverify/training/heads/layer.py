"""The decoder layer of a head under training.

Row i of step 0 holds a true state. In step k of the training-time test row i holds its own output of step k - 1, stands
at position i + k, and sees the rows up to i of step 0 and row i of steps 1 to k: the path that it would have in a tree.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from specverify.reference.draft.layer_head import HeadLayer


def _wide(x: Tensor) -> Tensor:
    """`x` in float32, or in float64 if it is."""
    return x if x.dtype == torch.float64 else x.float()


class Norm(nn.Module):
    """The root mean square norm, in float32 whatever the dtype of its input."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., width], normed."""
        wide = _wide(x)
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight


@dataclass
class Paths:
    """The keys and values that rows see.

    Attributes:
        keys, values: Of the true rows, [B, T, kv_heads, head_dim].
        steps: For each step above, the keys and values of the rows' own paths, [B, R, kv_heads, head_dim] each.
    """

    keys: Tensor
    values: Tensor
    steps: list[tuple[Tensor, Tensor]]


class GatedBlock(nn.Module):
    """A gated feed-forward block from rows [..., hidden] to rows [..., hidden]."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, False) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, False)

    @property
    def block(self) -> "GatedBlock":
        """The block through which every row goes."""
        return self

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        added: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return added


class Experts(nn.Module):
    """Experts as in Llama 4, in the place of a gated block; see `specverify.reference.draft.eagle1`.

    Every expert but the shared one begins at zero, so that the layer begins as one with a gated block alone. No loss
    balances the experts.

    Args:
        hidden: The length of a row.
        inner: The width of an expert.
        experts: The number of experts, the shared one apart.
        taken: The number of experts that a row goes through, the shared one apart.
    """

    def __init__(self, hidden: int, inner: int, experts: int, taken: int) -> None:
        super().__init__()
        self.taken = taken
        self.router = nn.Linear(hidden, experts, False)
        self.gate_up = nn.Parameter(torch.empty(experts, hidden, 2 * inner))
        self.down = nn.Parameter(torch.zeros(experts, inner, hidden))
        self.shared_expert = GatedBlock(hidden, inner)
        nn.init.normal_(self.gate_up, std=hidden**-0.5)

    @property
    def block(self) -> GatedBlock:
        """The block through which every row goes."""
        return self.shared_expert

    def forward(self, x: Tensor) -> Tensor:
        """`x` [B, R, hidden] through the experts: [B, R, hidden]."""
        scores = _wide(self.router(x))
        best, chosen = scores.topk(self.taken, -1)
        factors = torch.zeros_like(scores).scatter(-1, chosen, torch.sigmoid(best))
        added: Tensor = self.shared_expert(x)
        rows = x.flatten(0, -2)
        by_expert = factors.flatten(0, -2).T[..., None].to(x.dtype) * rows  # [experts, B * R, hidden]
        gate, up = (by_expert @ self.gate_up.to(x.dtype)).chunk(2, -1)
        mixed = ((functional.silu(gate) * up) @ self.down.to(x.dtype)).sum(0)
        return added + mixed.view_as(added)


class DecoderLayer(nn.Module):
    """A Llama layer whose attention reads rows of `width` and whose stream is `hidden` wide.

    Args:
        sizes: The sizes of the layer.
        width: The length of the rows that attention reads.
        hidden: The length of a state.
        rotated: Whether the layer has rotary embedding.
        experts: The number of experts in place of the gated block; 0 for the block.
        taken: The number of experts that a row goes through, beside the shared one.
    """

    def __init__(
        self, sizes: HeadLayer, width: int, hidden: int, *, rotated: bool = True, experts: int = 0, taken: int = 1
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.rotated = rotated
        wide, narrow = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, out, False) for out in (wide, narrow, narrow))
        self.o_proj = nn.Linear(wide, hidden, False)
        inner = sizes.intermediate_size
        self.feed_forward: GatedBlock | Experts
        self.feed_forward = Experts(hidden, inner, experts, taken) if experts else GatedBlock(hidden, inner)
        self.post_attention_layernorm = Norm(hidden, sizes.norm_eps)

    def keys_and_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [B, R, kv_heads, head_dim] of rows [B, R, width] at positions int64 [B, R]."""
        keys, values = (self._heads(project(x)) for project in (self.k_proj, self.v_proj))
        return self._rotate(keys, positions), values

    def forward(self, x: Tensor, residual: Tensor, positions: Tensor, paths: Paths, visible: Tensor) -> Tensor:
        """The outputs [B, R, hidden] of rows.

        Args:
            x: The rows that attention reads, [B, R, width].
            residual: [B, R, hidden].
            positions: int64 [B, R].
            paths: What the rows see; the rows' own keys and values are the last of `steps`, or among the true rows.
            visible: bool [B, R, T]; the true rows that each row sees.
        """
        batch, rows = x.shape[:2]
        group = self.sizes.heads // self.sizes.kv_heads
        queries = self._rotate(self._heads(self.q_proj(x)), positions)
        # [B, kv_heads, group * R, head_dim]: the queries that share a KV head stand side by side.
        shared = queries.view(batch, rows, -1, group, self.sizes.head_dim).permute(0, 2, 3, 1, 4)
        flat = shared.reshape(batch, -1, group * rows, self.sizes.head_dim) * self.sizes.head_dim**-0.5
        scores = flat @ paths.keys.permute(0, 2, 3, 1)
        scores = _wide(scores).masked_fill(~visible.repeat(1, group, 1)[:, None], float("-inf"))
        path_keys = [_by_query(keys, group) for keys, _ in paths.steps]
        scores = torch.cat([scores, *(_wide((flat * keys).sum(-1, keepdim=True)) for keys in path_keys)], -1)
        law = functional.softmax(scores, -1).to(flat.dtype)
        true = paths.keys.shape[1]
        mixed = law[..., :true] @ paths.values.transpose(1, 2).to(flat.dtype)
        for step, (_, values) in enumerate(paths.steps):
            mixed = mixed + law[..., true + step, None] * _by_query(values, group)
        mixed = mixed.view(batch, -1, group, rows, self.sizes.head_dim).permute(0, 3, 1, 2, 4).reshape(batch, rows, -1)
        stream: Tensor = residual + self.o_proj(mixed)
        added: Tensor = self.feed_forward(self.post_attention_layernorm(stream))
        return stream + added

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.sizes.head_dim)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """`x` [B, R, heads, head_dim] turned by half split: dimension i turns with i + head_dim / 2."""
        if not self.rotated:
            return x
        width = self.sizes.head_dim
        turns = self.sizes.theta ** (-torch.arange(0, width, 2, dtype=torch.float64, device=x.device) / width)
        angles = (positions.double()[..., None] * turns).repeat(1, 1, 2)[:, :, None]
        first_half, second_half = x.chunk(2, -1)
        return x * angles.cos().to(x.dtype) + torch.cat([-second_half, first_half], -1) * angles.sin().to(x.dtype)


class FurtherLayer(DecoderLayer):
    """A plain Llama layer on the output of the layer before; it begins as the identity.

    The arguments are those of `DecoderLayer`, whose rows are as wide as a state.
    """

    def __init__(
        self, sizes: HeadLayer, hidden: int, *, rotated: bool = True, experts: int = 0, taken: int = 1
    ) -> None:
        super().__init__(sizes, hidden, hidden, rotated=rotated, experts=experts, taken=taken)
        self.input_layernorm = Norm(hidden, sizes.norm_eps)
        nn.init.zeros_(self.o_proj.weight)
        nn.init.zeros_(self.feed_forward.block.down_proj.weight)


def _by_query(x: Tensor, group: int) -> Tensor:
    """Keys or values [B, R, kv_heads, head_dim], repeated for each query: [B, kv_heads, group * R, head_dim]."""
    return x.transpose(1, 2).repeat(1, 1, group, 1)
