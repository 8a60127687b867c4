"""Where the output ends: the first token that stops it, whatever block it came in."""

from reference.sampling import Stops


def ending(output: tuple[int, ...], stops: Stops) -> str | None:
    """Why an output that ends with `output[-1]` is complete: eos, stop or length; None while it may go on.

    A token that is both an end of text and a request's stop token ends it as `eos`; either beats `length`.
    """
    if output and output[-1] in stops.eos:
        return "eos"
    if output and output[-1] in stops.stop_tokens:
        return "stop"
    return "length" if len(output) >= stops.max_new_tokens else None


def clipped(block: tuple[int, ...], emitted: tuple[int, ...], stops: Stops) -> tuple[tuple[int, ...], str | None]:
    """The part of `block` that is still output after `emitted`, and why the output ends with it, token by token."""
    kept: tuple[int, ...] = ()
    for token in block:
        kept += (token,)
        why = ending(emitted + kept, stops)
        if why is not None:
            return kept, why
    return kept, None
