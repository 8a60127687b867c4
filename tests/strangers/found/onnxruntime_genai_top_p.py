"""onnxruntime-genai 0.18.0: sampled tokens lie outside the nucleus of top_p, where a vocabulary has 101 tokens.

The nucleus is that of the engine's own logits; with 19 tokens none lay outside. Found by lossless.support. Exit code 1
where a token lies outside, 0 where none does.
"""

import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnxruntime_genai as genai
import torch
from onnxruntime_genai.models.builder import create_model, parse_extra_options
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.manual_seed(3)
TOKENS, TOP_P, TEMPERATURE, DRAWS = 101, 0.5, 0.1, 400
folder, words = Path(tempfile.mkdtemp()), {str(token): token for token in range(TOKENS)}
sizes = {"vocab_size": TOKENS, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 16}
config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, bos_token_id=0, eos_token_id=TOKENS - 1)
LlamaForCausalLM(config).save_pretrained(folder / "in")
PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "0"))).save_pretrained(folder / "in")
arguments = ("", str(folder / "in"), str(folder / "out"), "fp32", "cpu", str(folder / "cache"))
create_model(*arguments, **parse_extra_options(*arguments, ["hf_remote=false"]))
model, ranks = genai.Model(str(folder / "out")), []
for seed in range(DRAWS):
    how = genai.GeneratorParams(model)
    how.set_search_options(do_sample=True, temperature=TEMPERATURE, top_p=TOP_P, top_k=0, random_seed=seed)
    generator = genai.Generator(model, how)
    generator.append_tokens([3, 1, 4])
    logits = np.array(generator.get_logits(), np.float64).ravel()[-TOKENS:]
    generator.generate_next_token()
    ranks.append(int((logits > logits[generator.get_next_tokens()[0]]).sum()))
chance = np.sort(np.exp((logits - logits.max()) / TEMPERATURE))[::-1]
num_kept = int(np.searchsorted(chance.cumsum() / chance.sum(), TOP_P)) + 1
print(
    "onnxruntime-genai", version("onnxruntime-genai"), sum(rank >= num_kept for rank in ranks), "of", DRAWS, "outside"
)
sys.exit(int(max(ranks) >= num_kept))
