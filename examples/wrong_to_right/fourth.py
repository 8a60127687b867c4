"""The last try: it drafts, verifies a block in one forward, and tells its counts."""

import torch

from specverify.adapt import Generated, blackbox

BLOCK = 4


def best(model, tokens):
    """The most probable token after each token."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0].argmax(-1).tolist()


def drafted(draft_model, tokens, count):
    block = []
    for _ in range(count):
        block.append(best(draft_model, tokens + block)[-1])
    return block


def generate(prompt_ids, max_new_tokens, model, draft_model, stops=()):
    tokens, end = list(prompt_ids), len(prompt_ids) + max_new_tokens
    proposed = accepted = 0
    while len(tokens) < end and not (len(tokens) > len(prompt_ids) and tokens[-1] in stops):
        block = drafted(draft_model, tokens, min(BLOCK, end - len(tokens) - 1)) if draft_model is not None else []
        right = best(model, tokens + block)[len(tokens) - 1 :]
        proposed += len(block)
        for token, due in zip([*block, None], right, strict=True):
            tokens.append(due)
            accepted += token == due
            if token != due or due in stops:
                break
    return Generated(tokens[len(prompt_ids) :], proposed=proposed, accepted=accepted)


open_ = blackbox(generate)
