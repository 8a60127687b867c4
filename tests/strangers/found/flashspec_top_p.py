"""flashspec 0.3.1: `SamplingConfig.top_p` is ignored by the lossless variants, and its text says that 1.0 disables it.

At a top_p of 0.01 the nucleus is the likeliest token alone, so that a sampled text is the greedy one. The engine hands
top_p to its lossy variant alone. Found while its adapter was declared. Exit code 1 where
a sampled text leaves the nucleus, 0 where none does.
"""

import sys
from importlib.metadata import version

import torch
from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
from flashspec.engine.ngram import NgramDrafter
from flashspec.engine.verifier import TargetModel
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(3)
sizes = {"vocab_size": 17, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, bos_token_id=None, eos_token_id=None)
model, cpu = LlamaForCausalLM(config).eval(), torch.device("cpu")


def text(**sampling: float) -> list[int]:
    """Tokens after one prompt."""
    how = SamplingConfig(seed=5, variant="rejection" if sampling["temperature"] else "greedy", **sampling)
    settings = FlashSpecConfig(
        device="cpu", dtype="float32", drafter_strategy="bandit", bandit=BanditConfig(n_arms=1), sampling=how
    )
    engine = SpeculativeEngine(settings, [NgramDrafter()], TargetModel("target", cpu, torch.float32, model=model))
    tokens: list[int] = engine.generate(torch.tensor([[3, 1, 4, 1]]), 8).output_ids[0].tolist()
    return tokens


print("flashspec", version("flashspec"))
print("greedy     ", text(temperature=0.0))
print("top_p 0.01 ", text(temperature=1.0, top_p=0.01))
sys.exit(int(text(temperature=0.0) != text(temperature=1.0, top_p=0.01)))
