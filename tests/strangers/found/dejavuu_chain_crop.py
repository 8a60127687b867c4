"""dejavuu 0.2.0: `generate` without a tree fails at its first step on a model of transformers 5.23.0.

`HFBackend.rollback_kv` calls `DynamicCache.crop(committed)`. transformers 5.23.0 refuses a positive length, and dejavuu
asks for transformers>=4.45 without an upper bound. Found by lossless.completes on dejavuu's chain path; its tree path
gathers rows and runs. Exit code 1 where the call fails, 0 where it does not.
"""

import sys
import tempfile
from importlib.metadata import version

import torch
import transformers
from dejavuu.core.engine import generate
from dejavuu.decoders.hf import HFBackend
from dejavuu.drafters import make_drafter
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(3)
sizes = {"vocab_size": 17, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, bos_token_id=None, eos_token_id=None)
print("dejavuu", version("dejavuu"), "with transformers", transformers.__version__)
with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    backend = HFBackend(folder, "cpu")
    print("tree path ", generate(backend, [3, 1, 4, 1], 6, make_drafter("pld"), tree=True).tokens)
    try:
        print("chain path", generate(backend, [3, 1, 4, 1], 6, make_drafter("pld")).tokens)
    except ValueError as why:
        print("chain path", why)
        sys.exit(1)
