"""vllm 0.32.0: tokens of a draft model that draws its proposals do not follow the seed of the request.

`compute_probs_and_sample_next_token` draws from torch's global generator (its comment says "Consider seeds"), so that
a request with a seed drafts other tokens each time, and has another text. Found by lossless.deterministic. Exit code 1
where equal generators give the target the same token and the draft another, 0 otherwise.
"""

import os
import sys
from types import SimpleNamespace

os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"

import torch
import vllm
from vllm.v1.sample.ops.topk_topp_sampler import random_sample
from vllm.v1.spec_decode.llm_base_proposer import compute_probs_and_sample_next_token

ROWS, VOCABULARY, SEED = 64, 1000, 7


def generators() -> dict[int, torch.Generator]:
    return {row: torch.Generator().manual_seed(SEED) for row in range(ROWS)}


def drafted() -> list[int]:
    settings = SimpleNamespace(all_greedy=False, all_random=True, temperature=torch.ones(ROWS), generators=generators())
    drawn, _ = compute_probs_and_sample_next_token(torch.zeros(ROWS, VOCABULARY), settings)
    tokens: list[int] = drawn.tolist()
    return tokens


def sampled() -> list[int]:
    tokens: list[int] = random_sample(torch.full((ROWS, VOCABULARY), 1 / VOCABULARY), generators()).tolist()
    return tokens


if __name__ == "__main__":
    target_repeats = sampled() == sampled()
    draft_repeats = drafted() == drafted()
    print("vllm", vllm.__version__, f"one seed, twice: the target's tokens repeat: {target_repeats},", end=" ")
    print(f"the draft's repeat: {draft_repeats}")
    sys.exit(int(target_repeats and not draft_repeats))
