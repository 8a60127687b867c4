"""Guided prompts: a given grammar over the words of a tokenizer, as bytes."""

import re
from dataclasses import replace
from typing import Any

from specverify.checkpoints.prompts import tokenizer_of
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Checkpoint
from specverify.reference.malformed import Malformed
from specverify.reference.sampling import Sampling
from specverify.reference.spelling import byte_letters
from specverify.setup.errors import UnusableInput
from specverify.setup.given_grammar import GivenGrammar


def check_guides(within: Abilities | None, after: tuple[str, ...] = ()) -> None:
    """Raise UnusableInput if a backend with the abilities `within` declares no grammars, or none behind a text."""
    if within is not None and "grammar" not in within.processed:
        raise UnusableInput("--grammar: the backend declares no grammars, so that no prompt would be judged under one")
    if within is not None and after and "grammar_markers" not in within.processed:
        raise UnusableInput("--grammar-after: the backend declares no grammars that begin behind a text")


def check_ends(within: Abilities | None, ends: tuple[int, ...]) -> None:
    """Raise UnusableInput if a backend that reads words from a tokenizer has no token with which a text may end."""
    if within is not None and within.grammar_words == "tokenizer" and not ends:
        raise UnusableInput("--grammar: the checkpoint names no end token, with which the backend ends a complete text")


def guide(sampling: Sampling, grammar: GivenGrammar, checkpoint: Checkpoint) -> Sampling:
    """`sampling` under the grammar, over the words of the checkpoint's tokenizer.

    Raises:
        UnusableInput: The checkpoint has no tokenizer of bytes, or the settings already ban tokens.
    """
    tokenizer = tokenizer_of(checkpoint.source, "whose words a grammar reads")
    words = words_of(tokenizer, checkpoint.vocab_size, str(checkpoint.source))
    markers = tuple(_marker(tokenizer, text) for text in grammar.after)
    try:
        over_words = replace(grammar.over(words), markers=markers, budget=grammar.budget)
        return replace(sampling, grammar=over_words)
    except Malformed as why:
        raise UnusableInput(f"--grammar {grammar.file}: {why}") from None


def _marker(tokenizer: Any, text: str) -> tuple[int, ...]:
    """The token ids of the text behind which a grammar begins."""
    tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
    if not tokens:
        raise UnusableInput(f"--grammar-after {text!r}: the tokenizer makes no token of it")
    return tokens


BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A piece that stands for one byte (SentencePiece's byte fallback)."""

SPACE = "\u0120"
"""The space in byte-level BPE, by which such a vocabulary is known; a few bytes of no text may be missing from it."""


def words_of(tokenizer: Any, size: int, name: str) -> tuple[str, ...]:
    """The bytes of each of `size` token ids in hexadecimal digits; empty for special tokens and ids without a token.

    Args:
        tokenizer: A tokenizer of transformers.
        size: Number of token ids that the model scores.
        name: What a complaint calls the tokenizer.

    Raises:
        UnusableInput: The tokenizer is not one of bytes, and has no pieces for single bytes.
    """
    pieces = {token: piece for piece, token in tokenizer.get_vocab().items() if token < size}
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
    byte_of, texts = byte_letters(), {token: piece for token, piece in pieces.items() if token not in special}
    if any(SPACE in piece for piece in texts.values()) and set("".join(texts.values())) <= set(byte_of):
        spelled = {token: bytes(map(byte_of.__getitem__, piece)) for token, piece in texts.items()}
    elif {f"<0x{byte:02X}>" for byte in range(256)} <= set(texts.values()):
        spelled = {token: _fallback(piece) for token, piece in texts.items()}
    else:
        raise UnusableInput(f"{name}: the tokenizer has no bytes to fall back on: a grammar needs every word as bytes")
    return tuple(spelled.get(token, b"").hex() for token in range(size))


def _fallback(piece: str) -> bytes:
    match = BYTE.fullmatch(piece)
    return bytes.fromhex(match[1]) if match else piece.replace("\u2581", " ").encode()
