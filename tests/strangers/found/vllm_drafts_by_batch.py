"""vllm 0.32.0: an engine with Medusa heads takes drafted tokens by the batch size, and ends where it changes.

`num_speculative_tokens_per_batch_size` is taken when the engine opens; `MedusaProposer.propose` and that of suffixes
assert that the number is always the same. Exit code 1 where two requests at once end in an AssertionError and one does
not, 0 otherwise.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"

import torch
import vllm
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

HIDDEN, VOCABULARY, HEADS = 64, 32, 2

torch.manual_seed(0)
sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 1}
config = LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None)


def save_heads(folder: Path) -> None:
    fields = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": HIDDEN, "vocab_size": VOCABULARY}
    (folder / "config.json").write_text(json.dumps({**fields, "num_heads": HEADS, "num_hidden_layers": 1}))
    weights = {f"blocks.{head}.layers.0.weight": torch.zeros(HIDDEN, HIDDEN) for head in range(HEADS)}
    weights |= {f"lm_heads.{head}.weight": torch.randn(VOCABULARY, HIDDEN) for head in range(HEADS)}
    save_file(weights, folder / "model.safetensors")


def end(engine: vllm.LLM, requests: int) -> str:
    settings = vllm.SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
    try:
        engine.generate([{"prompt_token_ids": [3, 1, 4]}] * requests, settings, use_tqdm=False)
        return "texts"
    except AssertionError:
        return "AssertionError"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as checkpoint, tempfile.TemporaryDirectory() as heads:
        LlamaForCausalLM(config).save_pretrained(checkpoint)
        save_heads(Path(heads))
        engine = vllm.LLM(
            checkpoint,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=2,
            speculative_config={
                "method": "medusa",
                "model": heads,
                "num_speculative_tokens": HEADS,
                "num_speculative_tokens_per_batch_size": [(1, 1, HEADS), (2, 2, 1)],
            },
        )
        alone, together = end(engine, 1), end(engine, 2)
    print("vllm", vllm.__version__, f"one request: {alone}; two at once: {together}")
    sys.exit(int(alone == "texts" and together == "AssertionError"))
