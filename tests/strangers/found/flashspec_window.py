"""flashspec 0.3.1: generation fails on a model with a sliding window of transformers 5.23.0.

The engine crops a `DynamicCache` after a rejection. transformers 5.23.0 refuses to crop a layer with a window unless
`activate_past_recording` was called, and flashspec asks for transformers>=4.40 without an upper bound. Found by
lossless.completes. Exit code 1 where the call fails, 0 where it does not.
"""

import sys
from importlib.metadata import version

import torch
import transformers
from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
from flashspec.engine.hf_drafter import HuggingFaceDrafter
from flashspec.engine.verifier import TargetModel
from transformers import MistralConfig, MistralForCausalLM

torch.manual_seed(3)
sizes = {"vocab_size": 73, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "sliding_window": 4}
heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": None, "eos_token_id": None}
target, draft = (MistralForCausalLM(MistralConfig(**sizes, **heads)).eval() for _ in range(2))
cpu, greedy = torch.device("cpu"), SamplingConfig(gamma=3, temperature=0.0, variant="greedy")
config = FlashSpecConfig(
    device="cpu", dtype="float32", drafter_strategy="bandit", bandit=BanditConfig(n_arms=1), sampling=greedy
)
drafter = HuggingFaceDrafter("draft", cpu, temperature=0.0, model=draft)
engine = SpeculativeEngine(config, [drafter], TargetModel("target", cpu, torch.float32, model=target))
print("flashspec", version("flashspec"), "with transformers", transformers.__version__)
try:
    print(engine.generate(torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]]), 8).output_ids.tolist())
except RuntimeError as why:
    print(why)
    sys.exit(1)
