"""A small engine of a project of its own: greedy decoding, with tokens looked up in the text so far as the draft.

Where none are found, the last token is drafted again. Two faults and a crash can be planted by the variable
SMALL_ENGINE: `unverified` takes the first token that was looked up as it is, `endless` ignores stops, `broken` raises.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch

from specverify.adapt import Generated, blackbox

WINDOW = 3


def looked_up(tokens: list[int]) -> list[int]:
    """The tokens that followed the last token where it stood before."""
    earlier = [index for index, token in enumerate(tokens[:-1]) if token == tokens[-1]]
    return tokens[earlier[-1] + 1 : earlier[-1] + 1 + WINDOW] if earlier else []


def generate(prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()) -> Generated:
    """The target's greedy text; every drafted token is verified in one forward."""
    planted = os.environ.get("SMALL_ENGINE", "").split(",")
    tokens, proposed, accepted = list(prompt_ids), 0, 0
    while len(tokens) < len(prompt_ids) + max_new_tokens:
        continuation = looked_up(tokens)
        draft = continuation or tokens[-1:]
        logits = model(torch.tensor([tokens + draft]), use_cache=False).logits[0].double()
        best = logits[len(tokens) - 1 :].argmax(-1).tolist()
        num_accepted = 0
        while num_accepted < len(draft) and draft[num_accepted] == best[num_accepted]:
            num_accepted += 1
        proposed, accepted = proposed + len(draft), accepted + num_accepted
        if "unverified" in planted and continuation and not num_accepted:
            num_accepted, best = 1, [draft[0], *best[1:]]
        if "broken" in planted and len(draft) > 1:
            raise IndexError(f"index {len(tokens)} is out of bounds for dimension 0 with size {len(draft)}")
        for token in best[: num_accepted + 1]:
            tokens.append(int(token))
            is_last = token in stops and "endless" not in planted
            if is_last or len(tokens) == len(prompt_ids) + max_new_tokens:
                return Generated(tokens[len(prompt_ids) :], proposed=proposed, accepted=accepted)
    return Generated(tokens[len(prompt_ids) :], proposed=proposed, accepted=accepted)


open_ = blackbox(generate, least_window=2)
