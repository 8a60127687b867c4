"""transformers 5.23.0: generate(use_mtp=True) fails where a prompt has fewer tokens than there are MTP modules.

After a rejection it takes the last rows of as many tokens as there are modules, and there are not so many. Found by
lossless.completes. Exit code 1 where the prompt of one token fails and that of two does not, 0 otherwise.
"""

import sys

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import MtpModel

torch.manual_seed(0)
sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
config = LlamaConfig(**sizes, num_attention_heads=2, bos_token_id=None, eos_token_id=None)
config.num_mtp_layers = 2
model = LlamaForCausalLM(config).eval()
modules = MtpModel(model, 2).eval()
MtpModel.from_pretrained = classmethod(lambda *_, **__: modules)  # in place of weights beside the target's


def ends(tokens: int) -> str:
    prompt = torch.ones((1, tokens), dtype=torch.int64)
    how = {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "do_sample": False, "use_mtp": True}
    try:
        return str(model.generate(prompt, max_new_tokens=8, **how).shape[1] - tokens) + " new tokens"
    except RuntimeError as why:
        return f"RuntimeError: {why}"


first_end, second_end = ends(1), ends(2)
print("transformers", transformers.__version__, f"prompt of one token: {first_end}; of two: {second_end}")
sys.exit(int(first_end.startswith("RuntimeError") and not second_end.startswith("RuntimeError")))
