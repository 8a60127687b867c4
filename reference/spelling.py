"""Spelling: the words of a tokenizer, where an engine reads the words of its grammars from there.

A tokenizer is loaded with an engine, so that drawn vocabularies of one size have one spelling.
"""

import itertools
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from specverify.reference.case import Case

LETTERS = ("a", "b", "c", "ab", "bb", "bc", "ba", "aba", "~")
DIGITS = ("0", "1", ".", "10", "01", "1.", ".0")
BRACKETS = ("(", ")", "((", "a)", "b(", "))")
LISTS = ("2", ",", "x", "12", "x1", ",x")
JSON = ("[", "]", '"a"', ",1", "null", "nu", "ll", '"', "[1")
PIECES = (
    "é", "b€", b"\xe2", b"\x82", b"\xac", "€a", "€", b"\xc3", b"\xa9", b"\xe2\x82", "éa", b"\xacb", "z", "za", b"\xff"
)  # fmt: skip

WORDS: tuple[bytes, ...] = tuple(
    word.encode() if isinstance(word, str) else word for word in (*LETTERS, *DIGITS, *BRACKETS, *LISTS, *JSON, *PIECES)
)
"""Words that spell the languages of drawn grammars, those of few words first, and some that none of them has."""

REPEATED = "ab01,"
"""The letters of which further words are made."""


@dataclass(frozen=True)
class Spelling:
    """The words of a tokenizer.

    Attributes:
        words: The bytes of each token id in hexadecimal digits, no two alike; empty for `end` alone.
        end: The token id that ends a text.
    """

    words: tuple[str, ...]
    end: int


def byte_letters() -> dict[str, int]:
    """The byte of each letter of byte-level BPE (GPT-2): printable Latin-1 as it is, the others from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other_bytes = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + number): byte for number, byte in enumerate(other_bytes)}


@lru_cache(maxsize=64)
def usual_spelling(vocab: int) -> Spelling:
    """The spelling of drawn vocabularies of `vocab` tokens, in an order of ids that says nothing.

    It has the first of WORDS, then texts of REPEATED from two letters on.
    """
    lengths = itertools.count(2)
    texts = ("".join(letters).encode() for length in lengths for letters in itertools.product(REPEATED, repeat=length))
    further_words = (text for text in texts if text not in WORDS)
    words = [b"", *itertools.islice(itertools.chain(WORDS, further_words), vocab - 1)]
    Random(vocab).shuffle(words)
    return Spelling(tuple(word.hex() for word in words), words.index(b""))


def spelling_of(case: Case) -> Spelling:
    """The spelling of a case: that of its grammars, or the usual one where no request has any."""
    requests = [case.alone(number) for number in range(1 if case.session is None else 1 + len(case.session.mates))]
    guided = next((request for request in requests if request.sampling.grammar is not None), None)
    if guided is None or guided.sampling.grammar is None:
        return usual_spelling(case.model.vocab_size)
    words = guided.sampling.grammar.words
    return Spelling(words, guided.stops.eos[0] if guided.stops.eos else words.index(""))
