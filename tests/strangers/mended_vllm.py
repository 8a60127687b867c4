"""vLLM with two faults of 0.32.0 on CPUs corrected: settings of drafted tokens are filled in, and top-k needs none.

`vllm.utils.cpu_triton_utils._expand_kernel_impl` fills a copy of its output where that is no int64, as temperature and
top-p are none. Here its caller repeats each request's setting for each of its drafted tokens, as its docstring says.
`apply_top_k_only` asks for the largest top-k of drafted tokens where there are none; here such a step is left alone.
"""

from collections.abc import Callable
from typing import Any

import torch

from specverify.backends.adapt.blackbox import BlackBox
from specverify.backends.adapt.engines import vllm as adapter
from specverify.backends.adapt.installed import module_of


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """`x[request]` for each drafted token of each request; `cu_num_tokens` are the requests' ends."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    rows = torch.where(x == replace_from, x.new_full((), replace_to), x) if replace_from != replace_to else x
    return rows.repeat_interleave(counts, output_size=num_tokens)


def top_k_of_any_rows(apply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`apply_top_k_only`, which takes logits of no rows too."""

    def apply_top_k_only(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return apply(logits, k) if len(logits) else logits

    return apply_top_k_only


def mended(open_backend: Callable[[], BlackBox]) -> Callable[[], BlackBox]:
    """The backend with the correction in place before its first engine is opened."""

    def open_mended() -> BlackBox:
        backend = open_backend()
        open_engine = adapter.open_llm

        def open_llm(checkpoint: str, dtype: str, setting: str, speculation: dict[str, Any] | None) -> adapter.OpenLlm:
            module_of("vllm")
            sampler = module_of("vllm.v1.sample.rejection_sampler")
            sampler.expand_batch_to_tokens = expand_batch_to_tokens
            truncation = module_of("vllm.v1.sample.ops.topk_topp_sampler")
            truncation.apply_top_k_only = top_k_of_any_rows(truncation.apply_top_k_only)
            return open_engine(checkpoint, dtype, setting, speculation)

        adapter.open_llm = open_llm
        return backend

    return open_mended


open_draft_model = mended(adapter.open_draft_model)
open_probabilistic = mended(adapter.open_probabilistic)
open_eagle3 = mended(adapter.open_eagle3)
open_ngram = mended(adapter.open_ngram)
