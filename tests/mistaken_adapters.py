"""Black boxes with one mistake each of their adapter, and others with a fault that is no such mistake.

All call the target by transformers, token by token; only the last lines of each differ.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

Generate = Callable[..., list[int]]


def decode(model: Any, text: Sequence[int], most: int, stops: Sequence[int] = (), pick: Any = None) -> list[int]:
    """The greedy text after `text`; `pick` chooses the token from the scores and the number of tokens so far."""
    tokens = list(text)
    for count in range(most):
        scores = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        tokens.append(int(scores.argmax() if pick is None else pick(scores, count)))
        if tokens[-1] in stops:
            break
    return tokens[len(text) :]


def right(prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()) -> list[int]:
    return decode(model, prompt_ids, max_new_tokens, stops)


def prompt_returned(prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()) -> list[int]:
    return [*prompt_ids, *right(prompt_ids, max_new_tokens, model, stops)]


def sequence_returned(prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()) -> list[int]:
    return [*prompt_ids, *right(prompt_ids, max_new_tokens, model)]


def last_prompt_token_returned(
    prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()
) -> list[int]:
    return [prompt_ids[-1], *right(prompt_ids, max_new_tokens, model, stops)][:max_new_tokens]


def first_token_missing(prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()) -> list[int]:
    return right(prompt_ids, max_new_tokens, model, stops)[1:]


def shifted(prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()) -> list[int]:
    return right(prompt_ids, max_new_tokens + 1, model, stops)[1:]


def ending_token_missing(
    prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()
) -> list[int]:
    text = right(prompt_ids, max_new_tokens, model, stops)
    return text[:-1] if text[-1] in stops else text


def ending_token_twice(prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()) -> list[int]:
    text = right(prompt_ids, max_new_tokens, model, stops)
    return [*text, text[-1]] if text[-1] in stops else text


def ending_ignored(prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()) -> list[int]:
    return right(prompt_ids, max_new_tokens, model)


def padding_returned(prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()) -> list[int]:
    text = right(prompt_ids, max_new_tokens, model, stops)
    return text + [0] * (max_new_tokens - len(text))


def token_too_many(prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()) -> list[int]:
    return right(prompt_ids, max_new_tokens + 1, model, stops)


def token_too_few(prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()) -> list[int]:
    return right(prompt_ids, max_new_tokens, model, stops)[: max_new_tokens - 1]


def limit_counts_prompt(prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()) -> list[int]:
    return right(prompt_ids, max_new_tokens, model, stops)[: max(0, max_new_tokens - len(prompt_ids))]


def token_before_prompt(prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()) -> list[int]:
    return right([1, *prompt_ids], max_new_tokens, model, stops)


def token_behind_prompt(prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()) -> list[int]:
    return right([*prompt_ids, 2], max_new_tokens, model, stops)


def token_before_output(prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()) -> list[int]:
    return [1, *right(prompt_ids, max_new_tokens, model, stops)][:max_new_tokens]


def first_prompt_token_missing(
    prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()
) -> list[int]:
    return right(prompt_ids[1:] or prompt_ids, max_new_tokens, model, stops)


def last_prompt_token_missing(
    prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()
) -> list[int]:
    return right(prompt_ids[:-1] or prompt_ids, max_new_tokens, model, stops)


def draft_in_place_of_target(
    prompt_ids: list[int], max_new_tokens: int, model: Any, draft_model: Any, stops: Sequence[int] = ()
) -> list[int]:
    return right(prompt_ids, max_new_tokens, draft_model or model, stops)


def tokens_renamed(prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()) -> list[int]:
    """The ids of another tokenizer, in which each word has the next number."""
    vocab = model.config.vocab_size
    return [(token + 1) % vocab for token in right(prompt_ids, max_new_tokens, model, stops)]


def drawn_though_greedy(prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()) -> list[int]:
    def draw(scores: torch.Tensor, count: int) -> torch.Tensor:
        return torch.multinomial(torch.softmax(scores.float(), 0), 1)

    return decode(model, prompt_ids, max_new_tokens, stops, draw)


def greedy_though_drawn(
    prompt_ids: list[int], max_new_tokens: int, model: Any, temperature: float, stops: Sequence[int] = ()
) -> list[int]:
    return right(prompt_ids, max_new_tokens, model, stops)


MISTAKEN: dict[str, tuple[str, Generate]] = {
    generate.__name__.replace("_", "-"): (name or generate.__name__.replace("_", "-"), generate)
    for name, generate in (
        ("", prompt_returned),
        ("prompt-returned", sequence_returned),
        ("", last_prompt_token_returned),
        ("", first_token_missing),
        ("first-token-missing", shifted),
        ("", ending_token_missing),
        ("", ending_token_twice),
        ("", ending_ignored),
        ("", padding_returned),
        ("", token_too_many),
        ("", token_too_few),
        ("", limit_counts_prompt),
        ("", token_before_prompt),
        ("", token_behind_prompt),
        ("", token_before_output),
        ("", first_prompt_token_missing),
        ("", last_prompt_token_missing),
        ("", draft_in_place_of_target),
        ("", tokens_renamed),
        ("", drawn_though_greedy),
    )
}
"""Adapters with a mistake, by a name of their own: the mistake that must be named, and the function."""


def second_best_third(prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()) -> list[int]:
    """A verifier that accepts a drafted token that is only the second best, once a block."""
    return decode(model, prompt_ids, max_new_tokens, stops, lambda scores, n: scores.topk(2).indices[int(n % 3 == 2)])


def stale_row(prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()) -> list[int]:
    """A cache that kept the row of a rejected token: the third token is read as the one before."""
    tokens = list(prompt_ids)
    for count in range(max_new_tokens):
        seen_tokens = [*tokens[:-2], tokens[-1], tokens[-1]] if count > 2 else tokens
        tokens += decode(model, seen_tokens, 1)
        if tokens[-1] in stops:
            break
    return tokens[len(prompt_ids) :]


def dropped_row(prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()) -> list[int]:
    """A cache that lost its second-last row."""
    tokens = list(prompt_ids)
    for _ in range(max_new_tokens):
        tokens += decode(model, [*tokens[:-2], tokens[-1]] if len(tokens) > 4 else tokens, 1)
        if tokens[-1] in stops:
            break
    return tokens[len(prompt_ids) :]


def narrow_window(prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()) -> list[int]:
    """Attention that sees the last four positions alone."""
    tokens = list(prompt_ids)
    for _ in range(max_new_tokens):
        tokens += decode(model, tokens[-4:], 1)
        if tokens[-1] in stops:
            break
    return tokens[len(prompt_ids) :]


def scaled_scores(prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()) -> list[int]:
    """A wrong formula behind the head: a slope over the vocabulary is added to the scores."""

    def pick(scores: torch.Tensor, count: int) -> torch.Tensor:
        return (scores + torch.linspace(0, 4, len(scores))).argmax()

    return decode(model, prompt_ids, max_new_tokens, stops, pick)


def negated_scores(prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()) -> list[int]:
    """The least likely token."""
    return decode(model, prompt_ids, max_new_tokens, stops, lambda scores, n: scores.argmin())


def repeated_accepted(prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()) -> list[int]:
    """The accepted block of the third token is emitted twice."""
    text = right(prompt_ids, max_new_tokens, model, stops)
    return (text[:3] + text[2:])[:max_new_tokens]


def lost_bonus(prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()) -> list[int]:
    """The bonus token behind the second one is lost."""
    text = right(prompt_ids, max_new_tokens, model, stops)
    return text[:2] + text[3:]


def constant(prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()) -> list[int]:
    """An engine that emits one token whatever it reads."""
    return [2] * max_new_tokens


def drafted_without_check(
    prompt_ids: list[int], max_new_tokens: int, model: Any, draft_model: Any, stops: Sequence[int] = ()
) -> list[int]:
    """A verifier that takes every second token from the draft unseen."""
    tokens = list(prompt_ids)
    for count in range(max_new_tokens):
        tokens += decode(draft_model if count % 2 and draft_model is not None else model, tokens, 1)
        if tokens[-1] in stops:
            break
    return tokens[len(prompt_ids) :]


def reversed_block(prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()) -> list[int]:
    """The first accepted block is emitted from its end."""
    text = right(prompt_ids, max_new_tokens, model, stops)
    return text[:3][::-1] + text[3:]


def late_ending(prompt_ids: list[int], max_new_tokens: int, model: Any, stops: Sequence[int] = ()) -> list[int]:
    """Endings are looked for at the end of a block of four alone, so that a text may run on behind one."""
    text = right(prompt_ids, max_new_tokens, model)
    for end in range(4, len(text) + 1, 4):
        if set(text[:end]) & set(stops):
            return text[:end]
    return text


FAULTY: tuple[Generate, ...] = (
    second_best_third, stale_row, dropped_row, narrow_window, scaled_scores, negated_scores, repeated_accepted,
    lost_bonus, constant, drafted_without_check, reversed_block, late_ending,
)  # fmt: skip
"""Engines with a fault that is no mistake of an adapter."""
