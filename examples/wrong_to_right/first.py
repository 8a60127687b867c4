"""The first try: it returns the whole sequence, as `model.generate` gives it."""

import torch

from specverify.adapt import blackbox


def generate(prompt_ids, max_new_tokens, model, stops=()):
    tokens = list(prompt_ids)
    for _ in range(max_new_tokens):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens


open_ = blackbox(generate)
