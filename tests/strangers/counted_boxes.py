"""An engine of chains that is right in every token and counts what it accepts; its draft may be degraded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specverify.adapt import Chains, Generated, blackbox

LENGTH = 3
"""Drafted tokens of a chain."""

DEGRADED = ("stale", "forgetful", "untempered", "bonus counted")
"""Faults that leave every token's law as it is.

`stale`: the draft's cache lacks the last token. `forgetful`: from the second drafted token on, the draft does not see
those before it. `untempered`: the draft draws at temperature 1, whatever the request asks. `bonus counted`: the
target's own token counts as accepted.
"""


def law_after(model: Any, tokens: list[int], temperature: float) -> Tensor:
    """The law of the next token, float64 [vocabulary]; all mass on the best one at temperature 0."""
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].double()
    if not temperature:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).double()
    law: Tensor = (logits / temperature).softmax(-1)
    return law


def speculating(
    chains: Chains, fault: str = "", first_drafted: bool = True, trims: bool = False
) -> Callable[..., Generated]:
    """A function that speculates as `chains` say.

    The first token is drafted, or the target's own. Where it `trims`, no more tokens are drafted than there is room for
    beside one of the target's.
    """

    def generate(
        prompt_ids: list[int], max_new_tokens: int, model: Any, draft_model: Any, temperature: float, seed: int
    ) -> Generated:
        coins, tokens = torch.Generator().manual_seed(seed), list(prompt_ids)
        proposed = bonuses = 0
        by_position = [0] * chains.tokens

        def draw(weights: Tensor) -> int:
            return int(torch.multinomial(weights, 1, generator=coins))

        if not first_drafted:
            tokens.append(draw(law_after(model, tokens, temperature)))
        while len(tokens) < len(prompt_ids) + max_new_tokens:
            drafted_tokens: list[int] = []
            proposals: list[Tensor] = []
            room = len(prompt_ids) + max_new_tokens - len(tokens)
            count = min(chains.tokens, room - 1) if trims else chains.tokens
            for _ in range(count if draft_model is not None else 0):
                text = [*(tokens[:-1] if fault == "stale" and len(tokens) > 1 else tokens), *drafted_tokens]
                if fault == "forgetful":
                    text = tokens
                heat = 1.0 if fault == "untempered" and temperature else temperature
                q = law_after(draft_model, text, 0.0 if chains.choice == "best" else heat)
                proposals.append(q)
                drafted_tokens.append(draw(q))
            proposed += len(drafted_tokens)
            for place, (token, q) in enumerate(zip(drafted_tokens, proposals, strict=True)):
                p = law_after(model, tokens, temperature)
                if chains.rule == "match":
                    tokens.append(draw(p))
                    if tokens[-1] != token:
                        break
                elif float(torch.rand((), generator=coins)) < float(p[token] / q[token]):
                    tokens.append(token)
                else:
                    tokens.append(draw((p - q).clamp(min=0)))
                    break
                by_position[place] += 1
            else:
                tokens.append(draw(law_after(model, tokens, temperature)))
                bonuses += 1
        new_tokens = tokens[len(prompt_ids) :][:max_new_tokens]
        if fault == "bonus counted":
            return Generated(new_tokens, None, proposed + bonuses, sum(by_position) + bonuses)
        return Generated(new_tokens, None, proposed, sum(by_position), by_position)

    return generate


def counted(
    choice: str, rule: str = "rejection", fault: str = "", first_drafted: bool = True, trims: bool = False
) -> Any:
    """The engine as a black box that declares its chains."""
    chains = Chains(LENGTH, choice, rule)
    return blackbox(speculating(chains, fault, first_drafted, trims), name="counted", chains=chains)


open_counted, open_stale = counted("best"), counted("best", fault="stale")
