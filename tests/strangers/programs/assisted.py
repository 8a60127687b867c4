"""transformers' assisted generation as a program of SpecVerify's protocol: python assisted.py

It knows nothing of SpecVerify but the lines of the protocol, and may run in an environment of its own.
"""

import json
import sys
from functools import lru_cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

DECLARATION = {
    "name": "transformers-assisted-program",
    "takes": ["checkpoint", "draft_checkpoint", "temperature", "top_k", "top_p", "seed", "stops"],
    # transformers 5.23 is wrong with a sliding window of one token.
    "least_window": 2,
}


@lru_cache(maxsize=64)
def opened(folder: str, role: str) -> Any:
    """A model in evaluation mode; target and draft are two objects, since generation changes their settings."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def generated(request: dict[str, Any]) -> list[int]:
    """The new tokens of one request."""
    prompt, draft = torch.tensor([request["prompt_ids"]]), request["draft_checkpoint"]
    how: dict[str, Any] = {"do_sample": False}
    if request["temperature"]:
        how = {"do_sample": True, **{name: request[name] for name in ("temperature", "top_k", "top_p")}}
        torch.manual_seed(request["seed"])
    with torch.no_grad():
        out = opened(request["checkpoint"], "target").generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=request["max_new_tokens"],
            assistant_model=None if draft is None else opened(draft, "draft"),
            eos_token_id=request["stops"] or None,
            pad_token_id=0,
            **how,
        )
    tokens: list[int] = out[0, prompt.shape[1] :].tolist()
    return tokens


def answered(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request, an error included."""
    if request["ask"] == "declare":
        return {"declaration": DECLARATION}
    try:
        return {"tokens": generated(request)}
    except Exception as why:  # an error is an answer, which the page shows
        return {"error": f"{type(why).__name__}: {why}"}


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for line in sys.stdin:
        request = json.loads(line)
        sys.stdout.write(json.dumps({"id": request["id"], **answered(request)}) + "\n")
        sys.stdout.flush()
