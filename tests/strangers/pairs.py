"""Pairs of functions from a prompt to tokens, one speculating and one plain, with faults to choose from.

Neither shows more than tokens, or tokens and log-probabilities.
"""

import random
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specverify.adapt import Declaration, blackbox, transformers_model
from specverify.reference.case import Case
from specverify.reference.trace import Emitted, Stage, Step, Trace

sys.path.insert(0, str(Path(__file__).resolve().parent))
chain: Any = import_module("black_boxes").chain


def law(model: Any, tokens: list[int], temperature: float) -> Tensor:
    """The law of the next token, float64 [vocabulary]."""
    row: Tensor = (model(torch.tensor([tokens]), use_cache=False).logits[0, -1].double() / temperature).softmax(-1)
    return row


def drawn(prompt_ids: list[int], max_new_tokens: int, model: Any, temperature: float = 0.0, seed: int = 0) -> list[int]:
    """The target alone, token by token."""
    coins, tokens = torch.Generator().manual_seed(seed), list(prompt_ids)
    for _ in range(max_new_tokens):
        p = law(model, tokens, temperature or 1.0)
        tokens.append(int(torch.multinomial(p, 1, generator=coins)) if temperature else int(p.argmax()))
    return tokens[len(prompt_ids) :]


def speculating(fault: str = "") -> Any:
    """A chain of drafted tokens with a fault of sampling; it decodes greedily without fault."""

    def generate(
        prompt_ids: list[int], max_new_tokens: int, model: Any, draft_model: Any, temperature: float, seed: int
    ) -> list[int]:
        if not temperature or fault == "greedy":
            return drawn(prompt_ids, max_new_tokens, model)
        tokens: list[int] = chain(prompt_ids, max_new_tokens, model, draft_model, temperature, seed, fault)
        return tokens

    return blackbox(generate, name=f"speculating{'-' if fault else ''}{fault}")


def best(prompt_ids: list[int], max_new_tokens: int, model: Any) -> list[int]:
    """The target's arg-max, token by token."""
    return drawn(prompt_ids, max_new_tokens, model)


def second_best(prompt_ids: list[int], max_new_tokens: int, model: Any) -> list[int]:
    """Greedy, but the second token is the second best one."""
    tokens = drawn(prompt_ids, min(1, max_new_tokens), model)
    if max_new_tokens > 1:
        tokens.append(int(law(model, prompt_ids + tokens, 1.0).topk(2).indices[1]))
    return tokens + drawn(prompt_ids + tokens, max_new_tokens - len(tokens), model)


def unsteady(prompt_ids: list[int], max_new_tokens: int, model: Any) -> list[int]:
    """Greedy, but the last token is another one now and then, by a coin that no seed reaches."""
    tokens = drawn(prompt_ids, max_new_tokens, model)
    return [*tokens[:-1], (tokens[-1] + random.SystemRandom().randrange(2)) % model.config.vocab_size]


class Numbered:
    """Greedy decoding that shows log-probabilities; `chosen` picks each token from the row of logits."""

    def __init__(self, name: str, chosen: Callable[[Any], int]) -> None:
        self.declaration = Declaration(
            name=name,
            device="cpu",
            reveals=frozenset({Stage.EMITTED}),
            dtypes=("float32",),
            layout_settings=(),
            stops=("max_new_tokens",),
            soft_caps="published",
        )
        self._chosen = chosen

    def run(self, case: Case) -> Trace:
        """Run the case token by token."""
        model, tokens, logprobs = transformers_model(case.model, case.dtype), list(case.prompt), []
        with torch.no_grad():
            for _ in range(case.stops.max_new_tokens):
                row = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
                tokens.append(self._chosen(row))
                logprobs.append(float(row.double().log_softmax(-1)[tokens[-1]]))
        output = tuple(tokens[len(case.prompt) :])
        return Trace((Step(case.prefix, emitted=Emitted(output, None, tuple(logprobs))),), output, "length")


def other_of_a_tie(row: Any) -> int:
    """The best token, or the second best where the two lie within a few roundings of each other."""
    best = row.topk(2)
    return int(best.indices[1 if float(best.values[0] - best.values[1]) < 2e-6 else 0])


def noisy(row: Any) -> int:
    """The second best token wherever it is within one tenth of the best."""
    best = row.topk(2)
    return int(best.indices[1 if float(best.values[0] - best.values[1]) < 0.1 else 0])


plain = blackbox(drawn, name="plain")
plain_greedy = blackbox(
    lambda prompt_ids, max_new_tokens, model: drawn(prompt_ids, max_new_tokens, model), name="argmax"
)
right, hot, bonus, greedy = (speculating(fault) for fault in ("", "hot", "bonus", "greedy"))
parting, wavering = blackbox(second_best), blackbox(unsteady)


def numbered() -> Numbered:
    """Greedy with log-probabilities."""
    return Numbered("numbered", lambda row: int(row.argmax()))


def tied() -> Numbered:
    """The same, which takes the other token of a tie."""
    return Numbered("tied", other_of_a_tie)


def loose() -> Numbered:
    """The same, which takes the other token of what is no tie."""
    return Numbered("loose", noisy)
