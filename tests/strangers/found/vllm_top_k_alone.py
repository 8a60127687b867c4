"""vllm 0.32.0 on a CPU: a request with top-k and without top-p ends the engine where it drafts tokens.

The first step of a request has no drafted token, and `apply_top_k_only` asks for the largest top-k of its drafted
tokens. Found by lossless.completes. Exit code 1 where top-k alone fails and top-k with top-p does not, 0 otherwise.
"""

import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"

import torch
import vllm
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
config = LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None)


def end(checkpoint: str, **settings: float) -> str:
    engine = vllm.LLM(
        checkpoint,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=1,
        speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2},
    )
    request = vllm.SamplingParams(temperature=1.0, max_tokens=4, seed=1, ignore_eos=True, detokenize=False, **settings)
    try:
        (answer,) = engine.generate([{"prompt_token_ids": [3, 1, 4]}], request, use_tqdm=False)
        return f"{len(answer.outputs[0].token_ids)} tokens"
    except RuntimeError as why:
        return f"RuntimeError: {why}"
    finally:
        engine.llm_engine.engine_core.shutdown()


def end_in_a_process(checkpoint: str, **settings: float) -> str:
    """Like `end`: behind an engine with n-grams, no second one opens in the same process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(end, checkpoint, **settings).result()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as checkpoint:
        LlamaForCausalLM(config).save_pretrained(checkpoint)
        both = end_in_a_process(checkpoint, top_k=5, top_p=0.9)
        alone = end_in_a_process(checkpoint, top_k=5)
    print("vllm", vllm.__version__, f"top-k with top-p: {both}; top-k alone: {alone}")
    sys.exit(int(alone.startswith("RuntimeError") and not both.startswith("RuntimeError")))
