"""Where the output ends: the first token that stops it, whatever block it came in."""

from reference.sampling import Stops

Block = tuple[int, ...]


def ending(output: Block, stops: Stops, prompt: int = 0, min_tokens: int = 0) -> str | None:
    """Why an output that ends with `output[-1]` is complete: eos, stop or length; None while it may go on.

    A token that is both an end of text and a request's stop token, or completes a stop string, ends it as `eos`; each
    of them beats `length`. The first `min_tokens` tokens end it by length alone.

    Args:
        output: What has been emitted, its last token included.
        stops: The request's.
        prompt: Tokens in the prompt.
        min_tokens: The request's.
    """
    if len(output) > min_tokens:
        if output[-1] in stops.eos:
            return "eos"
        if output[-1] in stops.stop_tokens or completes(output, stops):
            return "stop"
    return "length" if len(output) >= stops.room(prompt) else None


def completes(output: Block, stops: Stops) -> bool:
    """Whether a stop string ends inside the text of the last token of `output`, which is not empty."""
    if not stops.stop_strings:
        return False
    before = len("".join(stops.pieces[token] for token in output[:-1]))
    text = "".join(stops.pieces[token] for token in output)
    return any(text[:end].endswith(stops.stop_strings) for end in range(before + 1, len(text) + 1))


def clipped(
    block: Block, emitted: Block, stops: Stops, prompt: int = 0, min_tokens: int = 0
) -> tuple[Block, str | None]:
    """The part of `block` that is still output after `emitted`, and why the output ends with it, token by token."""
    kept: Block = ()
    for token in block:
        kept += (token,)
        why = ending(emitted + kept, stops, prompt, min_tokens)
        if why is not None:
            return kept, why
    return kept, None
