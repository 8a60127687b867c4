"""The engine with several requests in one call: prompts are padded on the left, and each text is cut at its end."""

import torch
from my_engine import generate

from specverify.adapt import blackbox


def generate_many(requests, model):
    longest = max(len(request.prompt_ids) for request in requests)
    padding = [longest - len(request.prompt_ids) for request in requests]
    prompts = torch.tensor([[0] * (longest - len(request.prompt_ids)) + request.prompt_ids for request in requests])
    mask = torch.tensor([[0] * pads + [1] * (longest - pads) for pads in padding])
    room = max(request.max_new_tokens for request in requests)
    out = model.generate(prompts, attention_mask=mask, max_new_tokens=room, do_sample=False, pad_token_id=0)
    return [text_of(row[longest:].tolist(), request) for row, request in zip(out, requests, strict=True)]


def text_of(tokens, request):
    ends = [place for place, token in enumerate(tokens[: request.max_new_tokens]) if token in request.stops]
    return tokens[: ends[0] + 1 if ends else request.max_new_tokens]


# transformers 5.23 counts padding among the positions of Llama 4, whose attention has chunks.
open_ = blackbox(generate, generate_many=generate_many, least_window=0)
