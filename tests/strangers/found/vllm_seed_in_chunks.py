"""vllm 0.32.0 on a CPU: a request with a seed ends the engine where its prompt is prefilled in chunks.

Behind a chunk that does not end the prompt the drawn token is thrown away, and the offset of the request's generator is
set back by one draw; a CPU's generator has no offset. Found by lossless.completes. Exit code 1 where a request with a
seed fails and one without does not, 0 otherwise.
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


def end(checkpoint: str, seed: int | None) -> str:
    engine = vllm.LLM(
        checkpoint,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=1,
        enable_chunked_prefill=True,
        max_num_batched_tokens=16,
    )
    request = vllm.SamplingParams(temperature=1.0, max_tokens=4, seed=seed, ignore_eos=True, detokenize=False)
    try:
        (answer,) = engine.generate([{"prompt_token_ids": [3, 1, 4, 1] * 6}], request, use_tqdm=False)
        return f"{len(answer.outputs[0].token_ids)} tokens"
    except RuntimeError as why:
        return f"RuntimeError: {why}"
    finally:
        engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as checkpoint:
        LlamaForCausalLM(config).save_pretrained(checkpoint)
        unseeded, seeded = end(checkpoint, None), end(checkpoint, 1)
    print("vllm", vllm.__version__, f"without a seed: {unseeded}; with a seed: {seeded}")
    sys.exit(int(seeded.startswith("RuntimeError") and not unseeded.startswith("RuntimeError")))
