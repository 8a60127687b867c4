"""vLLM's rejection sampler as components: its greedy walk along a chain, and its sampled one.

vLLM for CPUs runs C++ kernels for its Triton ones; the sampler around them is the same.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, rejection_sample

from specverify.adapt import component

# A CPU without Triton gets C++ kernels for the same names; the worker of an engine would register them.
current_platform.import_kernels()
current_platform.register_triton_kernel_overrides()


def rejected(tokens: Tensor, logits: Tensor, bonus: int, drafts: Tensor | None, **settings: Any) -> list[int]:
    """The tokens that `rejection_sample` gives for one request: those that it accepts, and one more."""
    count = len(tokens) - 1
    metadata: Any = SimpleNamespace(generators={}, **settings)
    sampled_tokens = rejection_sample(
        tokens[1:].contiguous(), [count], count, torch.tensor([count], dtype=torch.int32), drafts,
        logits[:count].contiguous(), torch.tensor([[bonus]], dtype=torch.int32), metadata,
    )  # fmt: skip
    return [token for token in sampled_tokens[0].tolist() if token != PLACEHOLDER_TOKEN_ID]


def walked(tokens: list[int]) -> tuple[list[int], int]:
    """The rows of a chain, root first, whose tokens were given, and the token after them."""
    return list(range(len(tokens))), tokens[-1]


def greedy(tokens: Tensor, logits: Tensor) -> tuple[list[int], int]:
    """`rejection_sample` for a greedy request."""
    best = int(logits[-1].argmax())
    if len(tokens) == 1:
        return [0], best
    return walked(rejected(tokens, logits.float(), best, None, all_greedy=True, all_random=False))


def sampled(tokens: Tensor, p: Tensor, q: Tensor) -> tuple[list[int], int]:
    """`rejection_sample` for a sampled request; vLLM draws the token after the last drafted one before it is called."""
    bonus = int(torch.multinomial(p[-1], 1))
    if len(tokens) == 1:
        return [0], bonus
    settings = {"all_greedy": False, "all_random": True, "temperature": torch.ones(1)}
    return walked(rejected(tokens, p.float().log(), bonus, q[1:].float().contiguous(), **settings))


open_greedy = component(verify=greedy, name="vllm-greedy", trees="chains")
open_sampled = component(sampler=sampled, name="vllm-sampled", trees="chains")
