"""transformers 5.23.0: `generate` leaves the model's own greedy text where a sliding window is one token wide.

The cache of a layer with a window keeps the last `sliding_window - 1` columns, `keys[:, :, -sliding_window + 1 :]`. For
a window of 1 that slice is `[0:]`, so that every column stays and is attended. Found by lossless.draft-independent on
`generate` as a black box. Exit code 1 where the text differs, 0 where it does not.
"""

import sys

import torch
import transformers
from transformers import MistralConfig, MistralForCausalLM

torch.manual_seed(3)
sizes = {"vocab_size": 73, "hidden_size": 20, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 4}
heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 1, "initializer_range": 1.0}
config = MistralConfig(**sizes, **heads, bos_token_id=None, eos_token_id=None, pad_token_id=0)
model = MistralForCausalLM(config).eval()

with torch.no_grad():
    prompt = torch.tensor([[31, 7, 5]])
    generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    text = prompt
    for _ in range(8):
        text = torch.cat([text, model(text, use_cache=False).logits[:, -1:].argmax(-1)], 1)

print("transformers", transformers.__version__)
print("from scratch", text[0, 3:].tolist())
print("generate    ", generated[0, 3:].tolist())
sys.exit(int(generated.tolist() != text.tolist()))
