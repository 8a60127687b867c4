"""Strangers' functions from a prompt to tokens: transformers' own, and a small speculation with faults to choose from.

The speculation drafts a chain of two tokens, runs both models from scratch, and shows nothing but tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specverify.adapt import Generated, blackbox


def assisted(
    prompt_ids: list[int], max_new_tokens: int, model: Any, draft_model: Any, temperature: float = 0.0, top_k: int = 0,
    top_p: float = 1.0, stops: Sequence[int] = (),
) -> Generated:  # fmt: skip
    """transformers' assisted generation, with its raw log-probabilities and its counts of drafted tokens."""
    prompt = torch.tensor([prompt_ids])
    sampled = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    how = sampled if temperature else {"do_sample": False}
    # Without a mask, transformers takes each token 0 for padding.
    rows: list[int] = []

    def count(_: Any, inputs: Any, named: dict[str, Any]) -> None:
        rows.append((named["input_ids"] if "input_ids" in named else inputs[0]).shape[1])

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens, assistant_model=draft_model,
            eos_token_id=list(stops) or None, pad_token_id=0, return_dict_in_generate=True, output_logits=True, **how,
        )  # fmt: skip
    finally:
        hook.remove()
    tokens = out.sequences[0, len(prompt_ids) :]
    logprobs = torch.cat(out.logits).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    # The first forward reads the prompt, each later one the last token; the other rows are drafted tokens.
    proposed = sum(rows) - len(prompt_ids) - (len(rows) - 1)
    return Generated(tokens, logprobs, proposed, len(tokens) - len(rows))


DEPTH = 2
"""Tokens of a drafted chain."""


def law(model: Any, tokens: list[int], temperature: float) -> Tensor:
    """The law of the next token, float64 [vocabulary]."""
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].double()
    row: Tensor = (logits / temperature).softmax(-1)
    return row


def chain(
    prompt_ids: list[int], max_new_tokens: int, model: Any, draft_model: Any, temperature: float, seed: int,
    fault: str = "",
) -> Generated:  # fmt: skip
    """Speculative sampling on a chain (Leviathan et al. 2023, algorithm 1), with one planted `fault` or none.

    `apart` is no fault: the draft has a generator of its own.
    """
    coins, tokens = torch.Generator().manual_seed(seed), list(prompt_ids)
    # The draft may have a generator of its own: with another seed, or wrongly with the same one.
    draft_coins = torch.Generator().manual_seed(seed + (fault == "apart")) if fault in ("apart", "shared") else coins
    proposed = accepted = 0
    hot = temperature * (1.5 if fault == "hot" else 1.0)

    def drawn(weights: Tensor, by: torch.Generator = coins) -> int:
        return int(torch.multinomial(weights, 1, generator=by))

    while len(tokens) < len(prompt_ids) + max_new_tokens:
        drafted_tokens: list[int] = []
        proposal: list[Tensor] = []
        for _ in range(DEPTH if draft_model is not None else 0):
            # The wrong proposal is drawn from one law and judged by another.
            proposal.append(law(draft_model, tokens + drafted_tokens, temperature))
            drafted = (
                law(draft_model, tokens + drafted_tokens, 2 * temperature) if fault == "proposal" else proposal[-1]
            )
            drafted_tokens.append(drawn(drafted, draft_coins))
        proposed += len(drafted_tokens)
        for token, q in zip(drafted_tokens, proposal, strict=True):
            p = law(model, tokens, hot)
            if float(torch.rand((), generator=coins)) >= float(p[token] / q[token]):
                tokens.append(drawn((p - q).clamp(min=0)) if fault != "residual" else drawn(p))
                break
            tokens.append(token)
            accepted += 1
        else:
            tokens.append(drawn(law(model, tokens, 1.0 if fault == "bonus" else hot)))
    return Generated(tokens[len(prompt_ids) :][:max_new_tokens], None, proposed, accepted)


SHARING = ("generators", "reseeded", "noise")
"""The ways in which `sharing` uses a random number twice."""


def inverse(weights: Tensor, coin: Tensor) -> int:
    """The token that `coin` draws from `weights`, by their cumulative sums in the order of ids."""
    sums = weights.cumsum(0)
    return min(int(torch.searchsorted(sums, coin * sums[-1], right=True)), len(weights) - 1)


def sharing(
    prompt_ids: list[int], max_new_tokens: int, model: Any, draft_model: Any, temperature: float, seed: int, way: str
) -> Generated:  # fmt: skip
    """The chain of `chain`, whose draft and verifier read the same random numbers in one `way` of SHARING, or in none.

    `generators`: draft and verifier have a generator each, with one seed. `reseeded`: the library's generator is seeded
    before each step's draft, and again before its verification. `noise`: the exponentials of the draft's race decide
    the race for the token that replaces it.
    """
    tokens, step = list(prompt_ids), 0
    draft_coins, verifier_coins = torch.Generator(), torch.Generator()
    draft_coins.manual_seed(seed)
    verifier_coins.manual_seed(seed + (way != "generators"))
    proposed = accepted = 0
    while len(tokens) < len(prompt_ids) + max_new_tokens:
        step += 1
        if way == "reseeded":
            draft_coins.manual_seed(seed + step)
        drafted_tokens: list[int] = []
        proposal: list[Tensor] = []
        noises: list[Tensor] = []
        for _ in range(DEPTH if draft_model is not None else 0):
            q = law(draft_model, tokens + drafted_tokens, temperature)
            proposal.append(q)
            if way == "noise":
                noises.append(torch.empty_like(q).exponential_(generator=draft_coins))
                drafted_tokens.append(int((q / noises[-1]).argmax()))
            else:
                drafted_tokens.append(inverse(q, torch.rand((), generator=draft_coins, dtype=q.dtype)))
        if way == "reseeded":
            verifier_coins.manual_seed(seed + step)
        proposed += len(drafted_tokens)
        for place, (token, q) in enumerate(zip(drafted_tokens, proposal, strict=True)):
            p = law(model, tokens, temperature)
            if float(torch.rand((), generator=verifier_coins, dtype=p.dtype)) >= float(p[token] / q[token]):
                residual = (p - q).clamp(min=0)
                if way == "noise":
                    tokens.append(int((residual / noises[place]).argmax()))
                else:
                    tokens.append(inverse(residual, torch.rand((), generator=verifier_coins, dtype=p.dtype)))
                break
            tokens.append(token)
            accepted += 1
        else:
            bonus = law(model, tokens, temperature)
            tokens.append(inverse(bonus, torch.rand((), generator=verifier_coins, dtype=bonus.dtype)))
    return Generated(tokens[len(prompt_ids) :][:max_new_tokens], None, proposed, accepted)


def shared_by(way: str) -> Any:
    """The engine of `sharing` as a black box."""

    def generate(
        prompt_ids: list[int], max_new_tokens: int, model: Any, draft_model: Any, temperature: float, seed: int
    ) -> Generated:
        return sharing(prompt_ids, max_new_tokens, model, draft_model, temperature or 1e-6, seed, way)

    return blackbox(generate, name=f"sharing-{way or 'nothing'}")


def sampled_by(fault: str) -> Any:
    """The chain as a black box that samples, with a planted fault."""

    def generate(
        prompt_ids: list[int], max_new_tokens: int, model: Any, draft_model: Any, temperature: float, seed: int
    ) -> Generated:
        if not temperature:
            return chain(prompt_ids, max_new_tokens, model, draft_model, 1e-6, seed)
        return chain(prompt_ids, max_new_tokens, model, draft_model, temperature, seed, fault)

    return blackbox(generate, name=f"chain{'-' if fault else ''}{fault}")


open_assisted = blackbox(assisted, name="transformers-assisted", least_window=2)
right = sampled_by("")
hot = sampled_by("hot")
bonus = sampled_by("bonus")
proposal = sampled_by("proposal")
residual = sampled_by("residual")
shared = sampled_by("shared")
apart = sampled_by("apart")
shared_generators, shared_reseeded, shared_noise, unshared = map(shared_by, (*SHARING, ""))


def untyped(prompt_ids: list[int], max_new_tokens: int) -> Any:
    """Returns what is no token: the text of the prompt."""
    return " ".join(map(str, prompt_ids))


def batched(prompt_ids: list[int], max_new_tokens: int) -> Any:
    """Returns a batch of one."""
    return torch.tensor([prompt_ids])


open_untyped, open_batched = blackbox(untyped), blackbox(batched)
