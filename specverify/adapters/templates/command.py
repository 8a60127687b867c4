"""A program as a backend of SpecVerify, asked in lines of JSON.

It imports nothing of SpecVerify, may live in an environment of its own, and shows a protocol that any language can
speak. The engine below is plain greedy decoding with transformers, so that this file runs as it stands. Put your
engine's call in its place, and run after each change:

    specverify check-adapter 'command:python FILE'
"""

import json
import sys
from functools import lru_cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()  # what a program writes to standard error is passed on

DECLARATION = {
    "name": "mine",
    # What each request holds beside prompt_ids and max_new_tokens, and so what cases ask for: add draft_checkpoint,
    # temperature, top_k, top_p, min_p, seed.
    "takes": ["checkpoint", "stops"],
}
"""The program's description of itself before the first request."""


@lru_cache(maxsize=64)
def opened(folder: str) -> Any:
    """The model in a directory with config.json, safetensors and a tokenizer."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def generated(request: dict[str, Any]) -> list[int]:
    """The new token ids of one request, without the prompt; a token of `stops` ends the text and is returned."""
    prompt, model = request["prompt_ids"], opened(request["checkpoint"])
    tokens = list(prompt)
    # From here on: your engine.
    for _ in range(request["max_new_tokens"]):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        if tokens[-1] in request["stops"]:
            break
    return tokens[len(prompt) :]


def answered(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one line: the declaration, tokens, or an error in words, which the page shows."""
    if request["ask"] == "declare":
        return {"declaration": DECLARATION}
    try:
        return {"tokens": generated(request)}
    except Exception as why:
        return {"error": f"{type(why).__name__}: {why}"}


if __name__ == "__main__":
    # Standard output belongs to the protocol: what the engine prints goes to standard error.
    out, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        out.write(json.dumps({"id": request["id"], **answered(request)}) + "\n")
        out.flush()
