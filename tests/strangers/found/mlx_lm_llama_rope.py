"""mlx-lm 0.32.2: a Llama that transformers 5 saved runs with another rotary embedding.

transformers 5 writes `rope_parameters`, and mlx-lm's llama.py reads `rope_theta` and `rope_scaling` alone, so that the
base is 10000 and nothing is scaled, whatever the file says; its qwen3.py reads `rope_parameters`. Found by
lossless.greedy-match. Exit code 1 where the greedy text differs, 0 where it does not.
"""

import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import torch
import transformers
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(3)
sizes = {"vocab_size": 73, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "initializer_range": 1.0}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None}
rope = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, rope_parameters=rope)).eval()
prompt = [31, 7, 5, 31, 7, 9, 31, 7]
with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    model.save_pretrained(folder)
    opened, _ = load_model(Path(folder))
    tokens = [int(token) for token, _ in generate_step(mx.array(prompt), opened, max_tokens=8)]
    text = torch.tensor([prompt])
    for _ in range(8):
        text = torch.cat([text, model(text, use_cache=False).logits[:, -1:].argmax(-1)], 1)
print("mlx-lm", version("mlx-lm"), "with a checkpoint of transformers", transformers.__version__)
print("transformers", text[0, len(prompt) :].tolist())
print("mlx-lm      ", tokens)
sys.exit(int(tokens != text[0, len(prompt) :].tolist()))
