"""A function from a prompt to tokens that takes grammars, with faults to choose from; it drafts nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from specverify.adapt import Generated, blackbox
from specverify.backends.engine.guided.guide import open_guide
from specverify.reference.grammar import Grammar


def guided(fault: str = "", **facts: Any) -> Callable[[], Any]:
    """A box that masks by the plain matcher: `unread` leaves the mask where it was, `refused` takes no grammar."""

    def generate(
        prompt_ids: list[int], max_new_tokens: int, model: Any, temperature: float = 0.0, seed: int = 0,
        stops: Sequence[int] = (), grammar: Grammar | None = None,
    ) -> Generated:  # fmt: skip
        coins, tokens, logprobs = torch.Generator().manual_seed(seed), list(prompt_ids), list[float]()
        guide = None if grammar is None else open_guide(grammar, tuple(stops))
        while len(logprobs) < max_new_tokens and not {*tokens[len(prompt_ids) :]} & {*stops}:
            row = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].double()
            if guide is not None and fault != "refused" and guide.row().any():
                row = row.masked_fill(~guide.row(), -torch.inf)
            law = (row / (temperature or 1.0)).softmax(-1)
            tokens.append(int(torch.multinomial(law, 1, generator=coins)) if temperature else int(row.argmax()))
            logprobs.append(float(row.log_softmax(-1)[tokens[-1]]))
            if guide is not None and fault != "unread":
                guide.accept_token(tokens[-1])
        return Generated(tokens[len(prompt_ids) :], logprobs)

    return blackbox(generate, logprobs="masked", **facts)


open_ = guided()
