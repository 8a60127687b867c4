"""The third try: right, and plain. It drafts nothing, so that its text alone can agree."""

import torch

from specverify.adapt import blackbox


def generate(prompt_ids, max_new_tokens, model, stops=()):
    tokens = list(prompt_ids)
    for _ in range(max_new_tokens):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt_ids) :]


open_ = blackbox(generate)
