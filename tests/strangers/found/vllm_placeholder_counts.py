"""vllm 0.32.0: drafted tokens are counted that nobody drafted.

Beside a request that drafts, a request with one token left to prefill is padded with drafted tokens of -1, and these
count as drafted and rejected: its acceptance is lower in company than alone. The scheduler leaves -1 out of the count
only where a grammar has cut a draft. Found by acceptance.company-independent. Exit code 1 where a request of one token
has other counts beside a request that drafts, 0 otherwise.
"""

import os
import sys
import tempfile

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"

import torch
import vllm
from transformers import LlamaConfig, LlamaForCausalLM

LONG, SHORT = [3, 1, 4, 3, 1, 4, 3, 1, 4], [5]

torch.manual_seed(0)
sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
config = LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None)


def settings(most_tokens: int) -> vllm.SamplingParams:
    return vllm.SamplingParams(temperature=0.0, max_tokens=most_tokens, ignore_eos=True, detokenize=False)


def drafted_by_short(engine: vllm.LLM, in_company: bool) -> int:
    """The drafted tokens that the short request has in its counts, alone or beside the long one, which enters first."""
    inner, name = engine.llm_engine, f"short {in_company}"
    if in_company:
        inner.add_request("long", {"prompt_token_ids": LONG}, settings(30))
        inner.step()
        inner.step()
    inner.add_request(name, {"prompt_token_ids": SHORT}, settings(2))
    answers = {}
    while inner.has_unfinished_requests():
        answers.update({answer.request_id: answer.outputs[0] for answer in inner.step() if answer.finished})
    counts = answers[name].spec_decode_metrics
    return 0 if counts is None else counts.num_draft_tokens


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as checkpoint:
        LlamaForCausalLM(config).save_pretrained(checkpoint)
        engine = vllm.LLM(
            checkpoint,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=2,
            per_request_spec_decode_metrics="summary",
            disable_log_stats=False,
            speculative_config={
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 2,
                "prompt_lookup_min": 1,
            },
        )
        alone, beside = (drafted_by_short(engine, in_company) for in_company in (False, True))
        print("vllm", vllm.__version__, f"drafted tokens of a short request: {alone} alone, {beside} beside a long one")
        sys.exit(int(alone != beside))
