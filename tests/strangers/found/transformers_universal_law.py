"""transformers 5.23.0: sampled generation with an assistant of another tokenizer does not draw from the target's law.

The head of the assistant is cut to the shared words in the order of `get_vocab()`, and its scores are read in the order
of ids. Found by lossless.distribution. Exit code 1 where the first token is drawn from another law, else 0.
"""

import sys

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS, DRAWS = 6, 200


def model(words: int) -> LlamaForCausalLM:
    sizes = {"vocab_size": words, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    ends = {"bos_token_id": None, "eos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**sizes, **ends, num_attention_heads=2, initializer_range=1.0)).eval()


def tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({text: token for token, text in enumerate(texts)}, unk_token=texts[0]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words)


torch.manual_seed(0)
target, texts, prompt, shares = model(WORDS), [str(token) for token in range(WORDS)], torch.tensor([[1, 2]]), []
law = target(prompt).logits[0, -1].softmax(-1)
for _ in range(6):  # the order of get_vocab() is another in each tokenizer
    how = {"assistant_model": model(WORDS + 1), "assistant_tokenizer": tokenizer(["other", *texts[::-1]])}
    how |= {"tokenizer": tokenizer(texts), "pad_token_id": 0, "attention_mask": torch.ones_like(prompt), "top_k": 0}
    drawn = [int(target.generate(prompt, max_new_tokens=2, do_sample=True, **how)[0, 2]) for _ in range(DRAWS)]
    shares.append(round(drawn.count(int(law.argmax())) / DRAWS, 2))
print("transformers", transformers.__version__, f"likeliest token: law {law.max():.2f}, drawn {shares}")
sys.exit(int(max(abs(float(law.max()) - share) for share in shares) > 0.2))
