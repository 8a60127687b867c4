"""SGLang's Triton kernels as components: tree builder, greedy verification, chain sampling and extend attention.

On a machine without a GPU they run in Triton's interpreter: set TRITON_INTERPRET=1 before Triton is imported.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
from sglang.kernels.ops.speculative.reject_sampling import chain_speculative_sampling_triton
from sglang.kernels.ops.speculative.spec_tree import sgl_build_tree_kernel_triton, verify_tree_greedy_triton
from torch import Tensor

from specverify.adapt import component


def build(parent: Tensor, committed: int) -> dict[str, Tensor]:
    """`sgl_build_tree_kernel_triton`: node i + 1 is the i-th selected candidate, child k of whatever chose it.

    Each node is a candidate with an index of its own, `topk` wide: candidate c has the parent that stands at place
    c // topk of the parent list, place 0 for the root.
    """
    nodes = len(parent)
    topk = nodes
    # Place k of the list holds the candidate index of node k; node n is child n of the list's place parent[n].
    index = torch.tensor([[int(up) * topk + node for node, up in enumerate(parent.tolist()) if node]])
    listed = torch.tensor([[-1, *index[0].tolist()]])
    rows = torch.full((3, 1, nodes), -1, dtype=torch.long)
    mask = torch.ones(nodes * (committed + nodes), dtype=torch.bool)
    positions = torch.zeros(nodes, dtype=torch.long)
    sgl_build_tree_kernel_triton(
        listed, index, torch.tensor([committed]), mask, positions, rows[0], rows[1], rows[2], topk, nodes, nodes
    )
    order, child, sibling = rows[:, 0]
    return {
        "mask": mask.view(nodes, committed + nodes),
        "position": positions,
        # -1 is its word for none; ours is the root, which is nobody's child and nobody's sibling.
        "next_token": child.clamp(min=0),
        "next_sibling": sibling.clamp(min=0),
        "retrieve_index": order,
    }


def verify(tokens: Tensor, next_token: Tensor, next_sibling: Tensor, best: Tensor) -> tuple[list[int], int]:
    """`verify_tree_greedy_triton` for one request."""
    nodes = len(tokens)
    none = torch.full((nodes,), -1)
    child, sibling = (torch.where(links > 0, links, none)[None] for links in (next_token, next_sibling))
    output_tokens, accepted, count = (
        torch.full((nodes,), -1),
        torch.full((1, nodes), -1),
        torch.zeros(1, dtype=torch.long),
    )
    order = torch.arange(nodes)[None]
    verify_tree_greedy_triton(output_tokens, accepted, count, tokens[None], order, child, sibling, best[None])
    path = accepted[0, : int(count) + 1].tolist()
    return path, int(output_tokens[path[-1]])


def chain(
    tokens: Tensor, p: Tensor, q: Tensor, accept_coins: Tensor, bonus_coin: Tensor, block: bool = False
) -> tuple[list[int], int]:
    """`chain_speculative_sampling_triton` for one request; row i of its draft laws is that of token i + 1."""
    nodes = len(tokens)
    output_tokens, accepted, count = (
        torch.full((nodes,), -1),
        torch.full((1, nodes), -1),
        torch.zeros(1, dtype=torch.long),
    )
    order = torch.arange(nodes)[None]
    # Its draft laws have a row less than the target's; it reads none behind the last.
    drafts, coins = torch.cat([q[1:], torch.zeros_like(q[:1])])[None], accept_coins[1:].float()[None]
    if nodes == 1:
        coins = torch.zeros(1, 1)
    chain_speculative_sampling_triton(
        output_tokens, accepted, count, tokens[None], order, None, None, coins, bonus_coin.float()[None],
        p[None].float(), drafts.float().contiguous(), 1.0, 1.0, True, block_verification=block,
    )  # fmt: skip
    path = accepted[0, : int(count) + 1].tolist()
    return path, int(output_tokens[path[-1]])


def blockwise(tokens: Tensor, p: Tensor, q: Tensor, accept_coins: Tensor, bonus_coin: Tensor) -> tuple[list[int], int]:
    """The same kernel with block verification."""
    return chain(tokens, p, q, accept_coins, bonus_coin, block=True)


def extend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, prefix: int) -> Tensor:
    """`extend_attention_fwd` with the whole mask given, prefix included."""
    rows = query.shape[1]
    keys, values = (tensor.transpose(0, 1).contiguous() for tensor in (key, value))
    out = torch.zeros_like(query.transpose(0, 1)).contiguous()
    ends = [torch.tensor([0, length]) for length in (rows, prefix, rows * (prefix + rows))]
    extend_attention_fwd(
        query.transpose(0, 1).contiguous(), keys[prefix:].contiguous(), values[prefix:].contiguous(), out, keys, values,
        ends[0], ends[1], torch.arange(prefix), mask.flatten(), True, ends[2], rows, 1.0, 1.0, sm_scale=scaling,
        skip_prefix_custom_mask=False,
    )  # fmt: skip
    return out.transpose(0, 1)


open_build = component(tree_builder=build, name="sglang-build-tree", trees="ordered")
open_verify = component(verify=verify, name="sglang-verify-greedy")
open_chain = component(sampler=chain, name="sglang-chain", trees="chains", variant_interval=200)
open_blockwise = component(
    sampler=blockwise, name="sglang-block", trees="chains", rules=("block",), variant_interval=200
)
open_extend = component(attention=extend, name="sglang-extend-attention", variant_interval=50)
