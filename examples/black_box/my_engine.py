"""An engine as a black box: a function from a prompt to tokens. Put your own call in its place."""

import torch

from specverify.adapt import blackbox


def generate(prompt_ids, max_new_tokens, model, draft_model, stops=()):
    prompt = torch.tensor([prompt_ids])
    how = {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "eos_token_id": list(stops) or None}
    out = model.generate(prompt, max_new_tokens=max_new_tokens, assistant_model=draft_model, do_sample=False, **how)
    return out[0, len(prompt_ids) :]


open_ = blackbox(generate, least_window=2)  # transformers 5.23 is wrong with a sliding window of one token
