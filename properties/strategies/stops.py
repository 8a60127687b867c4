"""Stops: budgets, end tokens, stop strings and the tokens before them, steered to any position of an accepted block."""

from hypothesis import strategies as st

from properties.strategies.acceptance import LOOKAHEAD, accepted_path, continuation
from properties.strategies.prompts import tokens
from reference.architecture import Seeded
from reference.draft import Draft
from reference.sampling import Stops

KINDS = ("none", "none", "none", "eos", "stop", "string", "max_length", "string", "eos", "stop", "all")
"""The kinds of ends beside the budget; `none` first, where shrinking ends."""

LETTERS = "ab"
"""Of pieces and stop strings; few, so that strings begin again and again before one is complete."""


def places(draft: Draft, root: int, ahead: tuple[int, ...]) -> tuple[int, ...]:
    """Indices of `ahead` in the longest block that a scripted draft gets accepted: its first four and its last.

    Of other drafts nothing is known, so all indices.
    """
    if draft.trees is None:
        return tuple(range(len(ahead)))
    start, longest = 0, range(1)
    for tree in draft.trees:
        if start == len(ahead):
            break
        accepted = len(accepted_path(tree.rooted(root), ahead[start:])) - 1
        block = range(start, min(start + accepted + 1, len(ahead)))
        longest = max(longest, block, key=len)
        root, start = ahead[block[-1]], block.stop
    return (*longest[:4], *longest[4:][-1:])


@st.composite
def stops_for(draw: st.DrawFn, model: Seeded, prompt: tuple[int, ...], where: tuple[int, ...]) -> tuple[Stops, int]:
    """Stops, and min_tokens.

    Budgets are 1 to LOOKAHEAD. One end is steered to an index of greedy decoding among `where`; if it lies before
    min_tokens, it is banned, or its text passed over; it may also be the first that they let through.
    """
    # Long blocks are rare: they end more often than others.
    kind = draw(st.sampled_from(KINDS if len(where) < 4 else KINDS[2:]))
    ahead, other = continuation(model, prompt), tokens(model.vocab_size)
    if kind in ("eos", "stop", "all"):  # the steered token ends the text where it first comes
        where = tuple(dict.fromkeys(ahead.index(ahead[at]) for at in where))
    late = tuple(one for one in where if one - where[0] > 1)  # deep in a block, which few are
    at = draw(st.sampled_from((*where, *late, *late)))
    if kind == "none":
        return Stops(draw(st.one_of(st.integers(1, 6), st.integers(1, LOOKAHEAD), st.just(at + 1)))), 0
    if kind == "max_length":
        return Stops(LOOKAHEAD, max_length=len(prompt) + at + 1), 0
    budget = draw(st.one_of(st.just(LOOKAHEAD), st.integers(at + 1, LOOKAHEAD), st.integers(1, LOOKAHEAD)))
    ending = (ahead[at] if draw(st.integers(0, 5)) else draw(other),)
    eos = ending if kind == "eos" else (draw(other),) if kind == "all" else ()
    stop = ending if kind in ("stop", "all") else ()
    strings, pieces = draw(texts(ahead, at, model.vocab_size)) if kind in ("string", "all") else ((), ())
    length = len(prompt) + draw(st.integers(1, LOOKAHEAD)) if kind == "all" else 0
    made = Stops(budget, eos, stop, strings, pieces, length)
    wanted = draw(st.integers(0, 2)) == 2 and len({*eos, *stop}) < model.vocab_size
    return made, draw(st.integers(at, at + 2)) if wanted else 0


@st.composite
def texts(draw: st.DrawFn, ahead: tuple[int, ...], at: int, vocab: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Stop strings and the pieces of a vocabulary; the first string is first complete inside the piece of `ahead[at]`.

    If that piece has letters: pieces have none, one or several. A string may begin some pieces before, in the middle.
    """
    few = draw(st.lists(st.text(LETTERS, max_size=3), min_size=2, max_size=5))
    pieces = tuple(few[token % len(few)] for token in range(vocab))
    before = len("".join(pieces[token] for token in ahead[:at]))
    own = pieces[ahead[at]]
    if own:
        end = before + draw(st.integers(1, len(own)))
        text = "".join(pieces[token] for token in ahead)[:end]
        new = [size for size in range(1, end + 1) if text.find(text[-size:]) == end - size]
        strings = [text[-draw(st.sampled_from(new[:4])) :]]
    else:
        strings = [draw(st.text(LETTERS, min_size=1, max_size=5))]
    if draw(st.integers(0, 3)) == 3:
        strings.append(draw(st.text(LETTERS, min_size=1, max_size=5)))
    return tuple(strings), pieces
