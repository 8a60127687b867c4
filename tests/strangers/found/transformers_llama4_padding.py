"""transformers 5.23.0: Llama 4 gives a prompt that is padded on the left another text than the same prompt alone.

In layers without rotation, queries are scaled by their position (`attn_temperature_tuning`). The position is the column
of the forward, and so counts the padding too. Found by lossless.greedy-match on a batch of `generate`, of which one
prompt is shorter. Exit code 1 where the text differs, 0 where it does not.
"""

import sys

import torch
import transformers
from transformers import Llama4ForCausalLM, Llama4TextConfig

torch.manual_seed(3)
sizes = {"vocab_size": 73, "hidden_size": 16, "intermediate_size": 24, "intermediate_size_mlp": 24, "head_dim": 4}
heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": 2, "no_rope_layers": [1, 0]}
tuning = {"attn_temperature_tuning": True, "floor_scale": 4, "attn_scale": 8.0, "initializer_range": 1.0}
experts = {"moe_layers": [], "num_local_experts": 1, "interleave_moe_layer_step": 0}
config = Llama4TextConfig(**sizes, **heads, **tuning, **experts, bos_token_id=None, eos_token_id=None, pad_token_id=0)
model = Llama4ForCausalLM(config).eval()

with torch.no_grad():
    texts = []
    for pads in (0, 9):
        prompt, mask = torch.tensor([[0] * pads + [31, 7, 5]]), torch.tensor([[0] * pads + [1] * 3])
        out = model.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False)
        texts.append(out[0, pads + 3 :].tolist())

print("transformers", transformers.__version__)
print("alone ", texts[0])
print("padded", texts[1])
sys.exit(int(texts[0] != texts[1]))
