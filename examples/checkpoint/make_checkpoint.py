"""Write a small checkpoint with random weights; token n of its tokenizer is the word n."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from specverify.adapt import words_tokenizer

VOCABULARY = 64

config = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.5,
    bos_token_id=None,
    eos_token_id=None,
)
logging.disable_progress_bar()
torch.manual_seed(0)
folder = sys.argv[1]
LlamaForCausalLM(config).save_pretrained(folder)
words_tokenizer([str(token) for token in range(VOCABULARY)]).save_pretrained(folder)
