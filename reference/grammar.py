"""Grammar: the language that a guided request writes its output in.

A grammar is read in a dialect that is the same in every implementation. Syntax on which the libraries xgrammar and
llguidance differ is refused, and CONVENTIONS keeps an example of each difference. Some of it is read where the grammar
names its library (`specverify.reference.oracle.language.by_library`).
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from specverify.reference.malformed import Malformed
from specverify.reference.rules import OMIT_DEFAULT

KINDS = ("regex", "json_schema", "ebnf")
"""How a grammar is written."""

LIBRARIES = ("plain", "xgrammar", "llguidance")
"""Libraries by which an engine computes its masks; `plain` is code of the engine's own."""

LONGEST = 65536
"""Most characters of a grammar."""


@dataclass(frozen=True)
class Grammar:
    r"""A language of byte strings, and the bytes of every token.

    The output of a request, without the prompt and without its end token, is a beginning of a text of the language. An
    end token (`Stops.eos`) is legal where the text is complete, and nowhere else. Where no token is legal any more, the
    output ends with finish reason `grammar`. After a token that is not legal a node is refused: the grammar has no
    legal tokens for it, and its row is processed as if there were no grammar.

    The dialects, all of which match the whole text:

    - `regex`: characters, escapes (`\n`, `\t`, and a backslash before punctuation), `[a-z]`, `[^a-z]`, groups, `|`,
      `*`, `+`, `?`, `{m}`, `{m,}` and `{m,n}`.
    - `json_schema`: a JSON text without white space, its properties in the schema's order. `type` is object, array,
      boolean, null, integer with `minimum` 0, or string with a `pattern` `^regex$`; also `enum`, `const` and `anyOf`.
    - `ebnf`: rules `name ::= expression`, the first to be used is `root`; literals in double quotes, classes, names,
      groups, `|` and the repetitions of `regex`. A rule may call itself, but not before it has matched a character.

    A grammar with `markers` begins behind the first of them that the output holds, as the answer of a model that
    reasons begins behind the end of its reasoning (vLLM, SGLang: the reasoning's end token). Before, every token is
    legal, end tokens too, and no node is refused. With a `budget` the first marker is forced, token by token, from that
    output token on: no other token is legal there.

    Attributes:
        kind: One of KINDS.
        text: The grammar.
        words: The bytes of each token id in hexadecimal digits; empty for a token without text, which is never legal.
        library: One of LIBRARIES.
        markers: Sequences of token ids; empty for a grammar that holds from the first output token on.
        budget: The most output tokens before the first marker is forced; 0 for any number.
    """

    kind: str
    text: str
    words: tuple[str, ...]
    library: str = field(default="plain", metadata=OMIT_DEFAULT)
    markers: tuple[tuple[int, ...], ...] = field(default=(), metadata=OMIT_DEFAULT)
    budget: int = field(default=0, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise Malformed("kind", f"{self.kind!r} is none of {', '.join(KINDS)}")
        if self.library not in LIBRARIES:
            raise Malformed("library", f"{self.library!r} is none of {', '.join(LIBRARIES)}")
        if len(self.text) > LONGEST:
            raise Malformed("text", f"{len(self.text)} characters; at most {LONGEST} may stand here")
        if any("\ud800" <= char <= "\udfff" for char in self.text):
            raise Malformed("text", "holds half a surrogate pair, which is no character")
        for i, word in enumerate(self.words):
            if len(word) % 2 or not set(word) <= set("0123456789abcdef"):
                raise Malformed(f"words[{i}]", f"{word[:40]!r} is not bytes in lower-case hexadecimal digits")
        if not any(self.words):
            raise Malformed("words", "no token has any text")
        for i, marker in enumerate(self.markers):
            if not marker:
                raise Malformed(f"markers[{i}]", "holds no token: leave out a grammar's markers to begin at once")
            if not all(0 <= token < len(self.words) for token in marker):
                raise Malformed(f"markers[{i}]", f"{marker} holds a token outside the vocabulary of {len(self.words)}")
        if self.budget < 0:
            raise Malformed("budget", f"{self.budget} is not a number of tokens (0 or more)")
        if self.budget and not self.markers:
            raise Malformed("budget", "forces the first marker, and there is none")

    @property
    def token_bytes(self) -> tuple[bytes, ...]:
        """The bytes of each token id."""
        return tuple(map(bytes.fromhex, self.words))


class Convention(NamedTuple):
    """A difference between the two libraries, for which a grammar that names neither is refused.

    Attributes:
        kind: The kind of the grammar.
        grammar: A grammar on which they differ.
        text: A text that one of them takes.
        xgrammar: Whether xgrammar takes it.
        llguidance: Whether llguidance takes it.
    """

    kind: str
    grammar: str
    text: str
    xgrammar: bool
    llguidance: bool


CONVENTIONS = (
    Convention("regex", ".", "\n", True, False),
    Convention("regex", r"\d", "\u0663", False, True),
    Convention("json_schema", '{"type": "string"}', '"\\/"', True, False),
    Convention("json_schema", '{"type": "string"}', '"\x7f"', True, False),
    Convention("json_schema", '{"type": "string", "maxLength": 2}', '"\\n"', False, True),
    Convention("json_schema", '{"oneOf": [{"const": 1}, {"type": "integer"}]}', "1", True, False),
    Convention("json_schema", '{"type": "integer"}', "-0", False, True),
)
"""The known differences; a slow test asks both libraries for each."""
