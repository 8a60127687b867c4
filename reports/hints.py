"""The sentence of each mistake of an adapter that `specverify.properties.adapter_mistakes` names."""

_PARAMETER = (
    "The engine refuses this value of `{0}`. Take `{0}` out of the function's parameters, and say so in `excluded`."
)

HINTS = {
    "prompt-returned": "The output begins with the prompt. Return the new tokens alone: `output[len(prompt_ids):]`.",
    "last-prompt-token-returned": (
        "The output begins with the last token of the prompt. Cut one token more: the first new token follows the "
        "whole prompt."
    ),
    "first-token-missing": (
        "The first new token is missing: the output is the right one from its second token on. Cut one token less."
    ),
    "ending-token-missing": (
        "The token that ends the output is missing. Return it too: a request that ends at a token ends with that token."
    ),
    "ending-token-twice": "The token that ends the output stands there twice. Return it once.",
    "ending-ignored": (
        "The output runs on behind the token that ends it. Hand the parameter `stops` on to the engine, or take it out "
        "of the function's parameters if the engine has none."
    ),
    "padding-returned": (
        "Behind the token that ends it, the output is filled up to `max_new_tokens` with one token. Cut the padding "
        "off."
    ),
    "token-too-many": "The output has one token more than `max_new_tokens` allows.",
    "token-too-few": "The output has one token less than `max_new_tokens` asks for.",
    "limit-counts-prompt": (
        "The engine counts the prompt's tokens against `max_new_tokens`. Ask it for "
        "`len(prompt_ids) + max_new_tokens` tokens in all."
    ),
    "token-before-prompt": (
        "The engine read one more token before the prompt, as a tokenizer adds it (BOS). Hand over token ids, or "
        "switch special tokens off."
    ),
    "token-behind-prompt": (
        "The engine read one more token behind the prompt, as a tokenizer or a chat template adds it. Hand over token "
        "ids, or switch special tokens off."
    ),
    "token-before-output": (
        "Every output begins with one and the same token, and the right output follows it. Cut that token off."
    ),
    "first-prompt-token-missing": (
        "The output is that of the prompt without its first token. Is it taken for a special token?"
    ),
    "last-prompt-token-missing": "The output is that of the prompt without its last token.",
    "draft-in-place-of-target": ("The output is the draft model's own text. Are target and draft the wrong way round?"),
    "tokens-renamed": (
        "Every token is renamed in one and the same way: the output is written in the ids of another tokenizer."
    ),
    "drawn-though-greedy": (
        "With another seed the engine gives another text, though the request is greedy. Hand temperature 0 on to the "
        "engine, or switch its sampling off."
    ),
    "greedy-though-drawn": (
        "At every temperature the engine gives the greedy text. Hand the parameter `temperature` on to the engine."
    ),
    "refused-top-k": _PARAMETER.format("top_k"),
    "refused-top-p": _PARAMETER.format("top_p"),
    "refused-min-p": _PARAMETER.format("min_p"),
    "refused-temperature": (
        "The engine refuses this temperature. Declare the highest that it takes: `max_temperature=2.0`."
    ),
    "refused-stops": _PARAMETER.format("stops"),
    "refused-prompt": (
        "The engine refuses so short a prompt. Declare the fewest tokens that it takes: `least_prompt=2`."
    ),
    "refused-length": (
        "The engine refuses so many tokens. Declare the most of prompt and output together: `longest=2048`."
    ),
    "refused-window": (
        "The engine refuses this sliding window. Declare the narrowest: `least_window=2`, or 0 for models without."
    ),
    "refused-head": "The engine refuses heads of this width. Declare what widths are multiples of: `head_multiple=16`.",
    "refused-rope": 'The engine refuses this rotary embedding. Declare those that it takes: `ropes=("default",)`.',
    "refused-family": 'The engine refuses this model. Declare the families that it loads: `families=("llama",)`.',
}
"""A mistake in one or two sentences: what the texts show, and what to change in the adapter."""
