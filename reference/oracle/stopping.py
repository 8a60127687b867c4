"""Stopping: the first token that ends the output, also inside an accepted block."""

from specverify.reference.grammar import Grammar
from specverify.reference.oracle.language import is_closed
from specverify.reference.sampling import Stops

Block = tuple[int, ...]


def finish_reason(
    output: Block, stops: Stops, prompt: int = 0, min_tokens: int = 0, grammar: Grammar | None = None
) -> str | None:
    """Why an output that ends with `output[-1]` is complete: eos, stop, grammar or length; None while it may go on.

    A token of `Stops.eos` ends the output as `eos`, also where it is a stop token or completes a stop string; `eos` and
    `stop` come before `grammar`, which means that no token may follow, and that before `length`. The first `min_tokens`
    tokens end the output by length alone.

    Args:
        output: The emitted tokens, at least one.
        stops: The request's stops.
        prompt: Number of tokens in the prompt.
        min_tokens: The request's `Sampling.min_tokens`.
        grammar: The request's grammar.
    """
    if len(output) > min_tokens:
        if output[-1] in stops.eos:
            return "eos"
        if output[-1] in stops.stop_tokens or completes(output, stops):
            return "stop"
    if is_closed(grammar, stops.eos, output):
        return "grammar"
    return "length" if len(output) >= stops.room(prompt) else None


def completes(output: Block, stops: Stops) -> bool:
    """Whether a stop string ends inside the text of the last token of `output`, which is not empty."""
    if not stops.stop_strings:
        return False
    text_before = len("".join(stops.pieces[token] for token in output[:-1]))
    text = "".join(stops.pieces[token] for token in output)
    # Every end inside the last token's text: a token may carry characters after the stop string.
    return any(text[:end].endswith(stops.stop_strings) for end in range(text_before + 1, len(text) + 1))


def clip(
    block: Block,
    emitted: Block,
    stops: Stops,
    prompt: int = 0,
    min_tokens: int = 0,
    grammar: Grammar | None = None,
) -> tuple[Block, str | None]:
    """The part of `block` that is still output after `emitted`, and why the output ends with this part, or None."""
    emitted_part: Block = ()
    for token in block:
        emitted_part += (token,)
        reason = finish_reason(emitted + emitted_part, stops, prompt, min_tokens, grammar)
        if reason is not None:
            return emitted_part, reason
    return emitted_part, None
