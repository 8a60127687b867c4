"""dejavuu 0.2.0: with `tree=True`, greedy text leaves the model's own where layers have a sliding window.

`dejavuu.core.tree.mask` shows every committed column to every node, and transformers takes a mask of four axes as it
is, so that a layer with a window attends to the tokens before it. Found by attention.context-exact. Exit code 1 where
the text differs, 0 where it does not.
"""

import sys
import tempfile
from importlib.metadata import version

import torch
import transformers
from dejavuu.core.engine import generate
from dejavuu.decoders.hf import HFBackend
from dejavuu.drafters import make_drafter
from transformers import MistralConfig, MistralForCausalLM

torch.manual_seed(3)
sizes = {"vocab_size": 73, "hidden_size": 20, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 4}
heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 3, "initializer_range": 1.0}
model = MistralForCausalLM(MistralConfig(**sizes, **heads, bos_token_id=None, eos_token_id=None)).eval()
prompt = [31, 7, 5, 31, 7, 9, 31, 7]
with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    model.save_pretrained(folder)
    tokens = generate(HFBackend(folder, "cpu"), prompt, 8, make_drafter("token_recycling"), tree=True).tokens
    text = torch.tensor([prompt])
    for _ in range(8):
        text = torch.cat([text, model(text, use_cache=False).logits[:, -1:].argmax(-1)], 1)
print("dejavuu", version("dejavuu"), "with transformers", transformers.__version__)
print("from scratch", text[0, len(prompt) :].tolist())
print("dejavuu     ", tokens)
sys.exit(int(tokens != text[0, len(prompt) :].tolist()))
