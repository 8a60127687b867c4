"""transformers 5.23.0: `generate` with early exit raises AttributeError on a Llama 4 text model.

`EarlyExitCandidateGenerator` reads the layers as `getattr(model, model.base_model_prefix)`. `Llama4ForCausalLM` has the
prefix `language_model` and holds its layers as `model`. Found by lossless.completes on `generate` as a black box. Exit
code 1 where the call fails, 0 where it does not.
"""

import sys

import torch
import transformers
from transformers import Llama4ForCausalLM, Llama4TextConfig

torch.manual_seed(3)
sizes = {"vocab_size": 17, "hidden_size": 16, "intermediate_size": 24, "intermediate_size_mlp": 24, "head_dim": 4}
heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "moe_layers": []}
ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
model = Llama4ForCausalLM(Llama4TextConfig(**sizes, **heads, **ends)).eval()

prompt = torch.tensor([[3, 1, 4]])
how = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 4, "do_sample": False}
print("transformers", transformers.__version__)
print("plain     ", model.generate(prompt, **how)[0, 3:].tolist())
try:
    print("early exit", model.generate(prompt, assistant_early_exit=1, **how)[0, 3:].tolist())
except AttributeError as why:
    print("early exit", why)
    sys.exit(1)
