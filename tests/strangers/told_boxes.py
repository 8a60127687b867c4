"""Strangers' functions that tell more than tokens, each right or with one planted error.

All decode a target from scratch; what they tell of drafts, seeds and blocks is what the tests look at.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from specverify.adapt import Generated, blackbox


def scores(model: Any, tokens: list[int]) -> Tensor:
    """Logits of the next token [vocabulary]."""
    row: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].double()
    return row


def greedy(prompt_ids: list[int], max_new_tokens: int, model: Any) -> list[int]:
    """The target's own greedy text."""
    tokens = list(prompt_ids)
    for _ in range(max_new_tokens):
        tokens.append(int(scores(model, tokens).argmax()))
    return tokens[len(prompt_ids) :]


def telling(of_draft: bool, accepted: int = 1) -> Any:
    """Greedy text with log-probabilities: the target's, or wrongly those of the draft, and counts of drafted tokens."""

    def generate(prompt_ids: list[int], max_new_tokens: int, model: Any, draft_model: Any) -> Generated:
        tokens = greedy(prompt_ids, max_new_tokens, model)
        scoring_model = draft_model if of_draft and draft_model is not None else model
        rows = [scores(scoring_model, prompt_ids + tokens[:length]).log_softmax(-1) for length in range(len(tokens))]
        logprobs = [float(row[token]) for row, token in zip(rows, tokens, strict=True)]
        return Generated(tokens, logprobs, len(tokens), min(accepted, len(tokens)))

    return blackbox(generate, name="telling")


def coupled(shifted: bool, promised: bool = True) -> Any:
    """Draws with the coin of each place, drafted tokens being taken where the target draws the same one.

    With `shifted`, a rejection spends a coin more, so that the text depends on the draft.
    """

    def generate(
        prompt_ids: list[int], max_new_tokens: int, model: Any, draft_model: Any, temperature: float, seed: int
    ) -> list[int]:
        tokens, spent = list(prompt_ids), 0

        def drawn(by: Any, place: int) -> int:
            if not temperature:
                return int(scores(by, tokens).argmax())
            law = (scores(by, tokens) / temperature).softmax(-1)
            coin = torch.rand(
                (), generator=torch.Generator().manual_seed((seed * 1000 + place) % 2**63), dtype=torch.float64
            )
            return min(int((law.cumsum(-1) <= coin).sum()), len(law) - 1)

        for place in range(max_new_tokens):
            drafted = None if draft_model is None else drawn(draft_model, place + spent)
            tokens.append(drawn(model, place + spent))
            spent += shifted and drafted is not None and drafted != tokens[-1]
        return tokens[len(prompt_ids) :]

    return blackbox(generate, name="coupled", same_seed=promised)


def streaming(keeps_state: bool) -> Any:
    """Greedy text in blocks of two; with `keeps_state`, a stream that was closed early spoils the next call."""
    leftovers: list[int] = []

    def generate(prompt_ids: list[int], max_new_tokens: int, model: Any) -> Iterator[list[int]]:
        tokens = greedy(prompt_ids, max_new_tokens, model)
        if leftovers:
            tokens[0] = leftovers.pop()
        try:
            for index in range(0, len(tokens), 2):
                yield tokens[index : index + 2]
        except GeneratorExit:
            if keeps_state:
                leftovers.append((tokens[0] + 1) % 3)
            raise

    return blackbox(generate, name="streaming")


def top(beyond: int) -> Any:
    """The token at rank top_k + `beyond`, so that 0 is the last one inside."""

    def generate(prompt_ids: list[int], max_new_tokens: int, model: Any, temperature: float, top_k: int) -> list[int]:
        tokens = list(prompt_ids)
        for _ in range(max_new_tokens):
            tokens.append(int(scores(model, tokens).argsort(descending=True)[max(top_k, 1) - 1 + beyond]))
        return tokens[len(prompt_ids) :]

    return blackbox(generate, name="top", dtypes=("float32", "bfloat16"))


def short(prompt_ids: list[int], max_new_tokens: int, model: Any) -> list[int]:
    """Gives up one token before the length that was asked for."""
    return greedy(prompt_ids, max_new_tokens, model)[:-1]


never = telling(of_draft=False, accepted=0)
often = telling(of_draft=False)
open_short = blackbox(short)
