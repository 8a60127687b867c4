"""The grammar of `diff --model --grammar FILE`, for the output of every prompt.

The file is read where the command line is, so that a grammar that cannot be used is told before anything is opened. The
words come later, from the tokenizer of the checkpoint, in the process that makes the cases.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from specverify.reference.grammar import LIBRARIES, LONGEST, Grammar
from specverify.reference.malformed import Malformed
from specverify.setup.errors import MissingInput, UnusableInput
from specverify.setup.grammar_text import plain_text

KIND_OF = {".json": "json_schema", ".regex": "regex", ".ebnf": "ebnf"}
"""How a grammar is written, by the suffix of its file."""

BYTES = tuple(f"{byte:02x}" for byte in range(256))
"""A vocabulary of single bytes, over which a grammar is tried before the tokenizer is known."""


@dataclass(frozen=True)
class GivenGrammar:
    """A grammar without words.

    Attributes:
        file: The file that holds the grammar, as the user named it.
        kind: One of `specverify.reference.grammar.KINDS`.
        text: The grammar, as `specverify.setup.grammar_text.plain_text` leaves it.
        library: The library by which the engine computes its masks, one of LIBRARIES.
        after: The texts behind which the grammar begins; empty where it holds from the first token on.
        budget: The most output tokens before the first of these texts is forced; 0 for any number.
    """

    file: str
    kind: str
    text: str
    library: str
    after: tuple[str, ...] = ()
    budget: int = 0

    def over(self, words: tuple[str, ...]) -> Grammar:
        """The grammar over a vocabulary.

        Raises:
            UnusableInput: The text is not of the dialect, or no token of the vocabulary begins a text of the language.
        """
        from specverify.reference.oracle.language import legal_after

        try:
            grammar = Grammar(self.kind, self.text, words, self.library)
            closed = legal_after(grammar, (), ()).is_closed
        except Malformed as why:
            raise UnusableInput(f"--grammar {self.file}: {why}") from None
        if closed:
            raise UnusableInput(f"--grammar {self.file}: no token of the vocabulary begins a text of the language")
        return grammar


def read_grammar(file: str, library: str) -> GivenGrammar:
    """Read a grammar, and try it over single bytes.

    Raises:
        UnusableInput: The file is absent, of an unknown kind or no text, or its grammar is not of the dialect.
        MissingInput: The library is not installed.
    """
    path = Path(file)
    kind = KIND_OF.get(path.suffix.lower())
    if kind is None:
        raise UnusableInput(
            f"--grammar {file}: the suffix says how a grammar is written: .json (a JSON schema), .regex or .ebnf"
        )
    try:
        if path.stat().st_size > 4 * LONGEST:
            raise UnusableInput(f"--grammar {file}: longer than {LONGEST} characters")
        # An editor ends a file with a line break, which is no character of the grammar.
        text = path.read_bytes().decode().rstrip("\r\n")
    except OSError as why:
        raise UnusableInput(f"--grammar {file}: {why.strerror or why}") from None
    except UnicodeDecodeError:
        raise UnusableInput(f"--grammar {file}: not UTF-8 text") from None
    if library != LIBRARIES[0] and find_spec(library) is None:
        raise MissingInput(
            f"--grammar-library {library} is not installed: pip install 'specverify-decoding[grammars]', "
            f"or --grammar-library {LIBRARIES[0]}"
        )
    try:
        text = plain_text(kind, text)
    except Malformed as why:
        raise UnusableInput(f"--grammar {file}: {why}") from None
    grammar = GivenGrammar(file, kind, text, library)
    grammar.over(BYTES)
    return grammar
