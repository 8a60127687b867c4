"""vLLM with faults of 0.32.0 corrected: settings of drafted tokens, top-k without any, seeds in chunks and of drafts.

`vllm.utils.cpu_triton_utils._expand_kernel_impl` fills a copy of its output where that is no int64, as temperature and
top-p are none. Here its caller repeats each request's setting for each of its drafted tokens, as its docstring says.
`apply_top_k_only` asks for the largest top-k of drafted tokens where there are none; here such a step is left alone.
Behind a chunk that does not end a prompt, `_bookkeeping_sync` sets the generator's offset back by one draw, which a
CPU's generator does not have; here the generator gets back the state that it had before the draw.
`compute_probs_and_sample_next_token` draws drafted tokens from torch's global generator; here from each request's own.
Drafted tokens of -1 stand for none, and a CPU's `rejection_random_sample_kernel_impl` reads the probability of the
number before the row; here no coin is low enough to accept them, and they are not counted as drafted. Where the first
rule of a grammar calls itself, xgrammar's mask lacks tokens that end an inner call and go on behind it; here that rule
gets another name, and the first one calls it. Where a grammar leaves one text, llguidance's mask has the tokenizer's
own token alone; here all that spell it.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
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


def with_placeholders_rejected(sample: Callable[..., Any]) -> Callable[..., Any]:
    """A CPU's kernel of rejection sampling, for which a drafted token below 0 is none."""

    def rejection_random_sample(
        output: torch.Tensor, ends: torch.Tensor, drafted: torch.Tensor, draft_probs: torch.Tensor | None,
        target_probs: torch.Tensor, bonus: torch.Tensor, recovered: torch.Tensor, coins: torch.Tensor, *others: Any,
    ) -> Any:  # fmt: skip
        coins = torch.where(drafted < 0, torch.inf, coins)
        tokens = drafted.clamp(min=0)
        return sample(output, ends, tokens, draft_probs, target_probs, bonus, recovered, coins, *others)

    return rejection_random_sample


def with_placeholders_uncounted(update: Callable[..., Any]) -> Callable[..., Any]:
    """`update_from_output` of a scheduler, for which a drafted token below 0 is not counted as drafted."""

    def update_from_output(scheduler: Any, scheduled: Any, output: Any) -> Any:
        placeholders = {name: tokens.count(-1) for name, tokens in scheduled.scheduled_spec_decode_tokens.items()}
        scheduled.num_invalid_spec_tokens = {name: count for name, count in placeholders.items() if count}
        return update(scheduler, scheduled, output)

    return update_from_output


IN_RULES = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|\broot\b')
"""A literal, a class, or the name of the first rule."""


def with_outer_root(compile_grammar: Callable[..., Any]) -> Callable[..., Any]:
    """`compile_grammar` of xgrammar's backend, whose rules never call the first one."""

    def compile_renamed(backend: Any, kind: Any, text: str, *arguments: Any, **settings: Any) -> Any:
        if kind.name == "GRAMMAR":
            inner = IN_RULES.sub(lambda match: "inner_root" if match[0] == "root" else match[0], text)
            text = f"root ::= inner_root\n{inner}"
        return compile_grammar(backend, kind, text, *arguments, **settings)

    return compile_renamed


def with_every_spelling(fill: Callable[..., None]) -> Callable[..., None]:
    """`fill_bitmask` of llguidance's backend, which sets the bit of each token that the matcher accepts.

    The bits behind the vocabulary are set as well: xgrammar writes behind a row whose other bits are.
    """

    def fill_bitmask(grammar: Any, bitmask: torch.Tensor, row: int) -> None:
        fill(grammar, bitmask, row)
        num_behind = -grammar.vocab_size % 32
        bitmask[row].numpy().view(np.uint32)[-1] |= np.uint32((1 << 32) - (1 << (32 - num_behind)))
        matcher = grammar.ll_matcher
        if matcher.is_stopped() or not matcher.compute_ff_bytes():
            return
        accepted = [token for token in range(grammar.vocab_size) if matcher.validate_tokens([token]) == 1]
        bits = bitmask[row].numpy().view(np.uint32)
        for token in accepted:
            bits[token // 32] |= np.uint32(1 << token % 32)

    return fill_bitmask


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
                scheduler = module_of("vllm.v1.core.sched.scheduler").Scheduler
                scheduler.update_from_output = with_placeholders_uncounted(scheduler.update_from_output)
                library = module_of("vllm.v1.structured_output.backend_xgrammar").XgrammarBackend
                library.compile_grammar = with_outer_root(library.compile_grammar)
                grammar = module_of("vllm.v1.structured_output.backend_guidance").GuidanceGrammar
                grammar.fill_bitmask = with_every_spelling(grammar.fill_bitmask)
            engine = open_engine(checkpoint, dtype, setting, speculation)
            kernels: Any = torch.ops._C
            if not hasattr(runner, "has_mended_kernel"):
                kernels.rejection_random_sample_kernel_impl = with_placeholders_rejected(
                    kernels.rejection_random_sample_kernel_impl
                )
                runner.has_mended_kernel = True
            return engine

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
