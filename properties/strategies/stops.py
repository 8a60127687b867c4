"""Strategies for stops, steered to any position of an accepted block.

Stops are token budgets, end tokens, stop strings and min_tokens.
"""

from collections.abc import Sequence

from hypothesis import strategies as st

from specverify.properties.strategies.acceptance import LOOKAHEAD, accepted_path, continuation
from specverify.properties.strategies.models import can_list_ids
from specverify.properties.strategies.prompts import tokens
from specverify.reference.abilities import ENDS, Abilities
from specverify.reference.architecture import Seeded
from specverify.reference.draft import Draft
from specverify.reference.sampling import Stops

KINDS = ("none", "none", "none", "eos", "stop", "string", "max_length", "string", "eos", "stop", "max_length", "all")
"""The kinds of ends beside the budget; `none` first, where shrinking ends."""

ENDED_BY = {
    "none": (), "eos": ("eos",), "stop": ("stop_tokens",), "string": ("stop_strings",), "max_length": ("max_length",),
    "all": ENDS,
}  # fmt: skip
"""The fields of `Stops` that each kind sets beside the budget."""

EARLY = 3
"""Of so many stop strings in a long block, one is short and completed by the block's first token."""

LETTERS = "ab"
"""Letters of pieces and stop strings; few, so that partial matches are frequent before a string is complete."""


def places(draft: Draft, root: int, ahead: Sequence[int]) -> tuple[int, ...]:
    """Indices of `ahead` that fall in the longest accepted block of a scripted draft: its first four and its last.

    For other drafts the accepted blocks are not known, so all indices are returned.
    """
    if draft.trees is None:
        return tuple(range(len(ahead)))
    start = 0
    longest = range(1)
    for tree in draft.trees:
        if start == len(ahead):
            break
        accepted = len(accepted_path(tree.with_root(root), ahead[start:])) - 1
        block = range(start, min(start + accepted + 1, len(ahead)))
        longest = max(longest, block, key=len)
        root = ahead[block[-1]]
        start = block.stop
    return (*longest[:4], *longest[4:][-1:])


@st.composite
def stops_for(
    draw: st.DrawFn,
    model: Seeded,
    prompt: tuple[int, ...],
    positions: tuple[int, ...],
    within: Abilities | None = None,
) -> tuple[Stops, int]:
    """Stops, and min_tokens.

    Budgets are 1 to LOOKAHEAD. One end is steered to an index among `positions` of the greedy output. It may lie before
    min_tokens, where its token is banned or its string is ignored, or at the first place that min_tokens admits.
    """
    # Long blocks are rare: they end more often than others.
    kinds: tuple[str, ...] = KINDS if len(positions) < 4 else KINDS[2:]
    if not can_list_ids(model):
        kinds = tuple(name for name in kinds if "stop_strings" not in ENDED_BY[name])
    kind = draw(st.sampled_from([name for name in kinds if within is None or {*ENDED_BY[name]} <= {*within.stops}]))
    ahead = continuation(model, prompt)
    any_token = tokens(model.vocab_size)
    if kind in ("eos", "stop", "all"):  # the steered token ends the text where it first comes
        positions = tuple(dict.fromkeys(ahead.index(ahead[position]) for position in positions))
    late = tuple(
        position for position in positions if position - positions[0] > 1
    )  # deep in a block; rare, so drawn more often
    position = draw(st.sampled_from((*positions, *late, *late)))
    if kind == "none":
        return Stops(draw(st.one_of(st.integers(1, 6), st.integers(1, LOOKAHEAD), st.just(position + 1)))), 0
    if kind == "max_length":
        return Stops(LOOKAHEAD, max_length=len(prompt) + position + 1), 0
    budget = draw(st.one_of(st.just(LOOKAHEAD), st.integers(position + 1, LOOKAHEAD), st.integers(1, LOOKAHEAD)))
    ending = (ahead[position] if draw(st.integers(0, 5)) else draw(any_token),)
    eos = ending if kind == "eos" else (draw(any_token),) if kind == "all" else ()
    stop = ending if kind in ("stop", "all") else ()
    # A string that a block's first token completes lies far before its end.
    early = kind == "string" and len(positions) >= 4 and draw(st.integers(0, EARLY - 1)) == EARLY - 1
    position = positions[0] if early else position
    strings, pieces = draw(texts(ahead, position, model.vocab_size, early)) if kind in ("string", "all") else ((), ())
    length = len(prompt) + draw(st.integers(1, LOOKAHEAD)) if kind == "all" else 0
    stops = Stops(budget, eos, stop, strings, pieces, length)
    postpones = within is None or "min_tokens" in within.processed
    has_min_tokens = postpones and draw(st.integers(0, 2)) == 2 and len({*eos, *stop}) < model.vocab_size
    return stops, draw(st.integers(position, position + 2)) if has_min_tokens else 0


@st.composite
def texts(
    draw: st.DrawFn, ahead: Sequence[int], position: int, vocab: int, short: bool = False
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Stop strings, and the text piece of each token id; the first string is completed by the token `ahead[position]`.

    A piece has no letter, one or several. If the piece of `ahead[position]` has none, the string is drawn at random. A
    string may begin several pieces before, in the middle of one. With `short` it is one string of as few letters as
    possible.
    """
    distinct_pieces = draw(st.lists(st.text(LETTERS, max_size=3), min_size=2, max_size=5))
    pieces = tuple(distinct_pieces[token % len(distinct_pieces)] for token in range(vocab))
    length_before = len("".join(pieces[token] for token in ahead[:position]))
    piece = pieces[ahead[position]]
    if piece:
        end = length_before + draw(st.integers(1, len(piece)))
        text = "".join(pieces[token] for token in ahead)[:end]
        # Suffix lengths whose first occurrence in the text is at its end: a shorter match would end the text earlier.
        lengths = [size for size in range(1, end + 1) if text.find(text[-size:]) == end - size]
        strings = [text[-draw(st.sampled_from(lengths[: 1 if short else 4])) :]]
    else:
        strings = [draw(st.text(LETTERS, min_size=1, max_size=1 if short else 5))]
    if not short and draw(st.integers(0, 3)) == 3:
        strings.append(draw(st.text(LETTERS, min_size=1, max_size=5)))
    return tuple(strings), pieces
