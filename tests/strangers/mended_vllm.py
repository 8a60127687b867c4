"""vLLM with faults of 0.32.0 corrected: settings of drafted tokens, top-k without any, seeds in chunks and of drafts.

`vllm.utils.cpu_triton_utils._expand_kernel_impl` fills a copy of its output where that is no int64, as temperature and
top-p are none. Here its caller repeats each request's setting for each of its drafted tokens, as its docstring says.
`apply_top_k_only` asks for the largest top-k of drafted tokens where there are none; here such a step is left alone.
Behind a chunk that does not end a prompt, `_bookkeeping_sync` sets the generator's offset back by one draw, which a
CPU's generator does not have; here the generator gets back the state that it had before the draw.
`compute_probs_and_sample_next_token` draws drafted tokens from torch's global generator; here from each request's own.
"""

from collections.abc import Callable
from typing import Any

import torch

from specverify.backends.adapt.blackbox import BlackBox
from specverify.backends.adapt.engines import vllm as adapter
from specverify.backends.adapt.engines import vllm_heads
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


def with_states_noted(sample: Callable[..., Any]) -> Callable[..., Any]:
    """`sample_tokens` of a model runner, which notes the states of all generators before anything is drawn."""

    def sample_tokens(runner: Any, *arguments: Any, **settings: Any) -> Any:
        generators = runner.input_batch.generators
        runner.states_before = {row: generator.get_state() for row, generator in generators.items()}
        return sample(runner, *arguments, **settings)

    return sample_tokens


def with_states_restored(bookkeep: Callable[..., Any]) -> Callable[..., Any]:
    """`_bookkeeping_sync` of a model runner, for which generators of tokens that are thrown away have not drawn."""

    def bookkeeping_sync(runner: Any, *arguments: Any, **settings: Any) -> Any:
        batch = runner.input_batch
        discarded_rows = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        restored = {row: batch.generators.pop(row) for row in discarded_rows if row in batch.generators}
        for row, generator in restored.items():
            generator.set_state(runner.states_before[row])
        try:
            return bookkeep(runner, *arguments, **settings)
        finally:
            batch.generators |= restored

    return bookkeeping_sync


def probs_and_next_tokens(
    logits: torch.Tensor, settings: Any, use_fp64_gumbel: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The law of each row at its request's temperature, and a token of it by the request's generator."""
    temperatures = settings.temperature
    is_greedy = temperatures < 1e-5
    probs = (logits / torch.where(is_greedy, 1.0, temperatures)[:, None]).softmax(-1, dtype=torch.float32)
    noise = torch.empty_like(probs).exponential_()
    for row, generator in settings.generators.items():
        noise[row].exponential_(generator=generator)
    return torch.where(is_greedy, probs.argmax(-1), (probs / noise).argmax(-1)), probs


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
            module_of(
                "vllm.v1.spec_decode.llm_base_proposer"
            ).compute_probs_and_sample_next_token = probs_and_next_tokens
            runner = module_of("vllm.v1.worker.gpu_model_runner").GPUModelRunner
            if not hasattr(runner, "is_mended"):
                runner.sample_tokens = with_states_noted(runner.sample_tokens)
                runner._bookkeeping_sync = with_states_restored(runner._bookkeeping_sync)
                runner.is_mended = True
            return open_engine(checkpoint, dtype, setting, speculation)

        adapter.open_llm = open_llm
        return backend

    return open_mended


open_draft_model = mended(adapter.open_draft_model)
open_probabilistic = mended(adapter.open_probabilistic)
open_eagle = mended(vllm_heads.open_eagle)
open_eagle3 = mended(vllm_heads.open_eagle3)
open_medusa = mended(vllm_heads.open_medusa)
open_mtp = mended(vllm_heads.open_mtp)
open_dflash = mended(vllm_heads.open_dflash)
open_ngram = mended(adapter.open_ngram)
open_suffix = mended(adapter.open_suffix)
