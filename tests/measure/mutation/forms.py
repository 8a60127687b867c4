"""Forms of source text: what stays of a line when names are changed, by which known mutants are found again."""

import ast
import hashlib
import io
import keyword
import re
import tokenize
from functools import lru_cache

TRAILING_COMMA = re.compile(r",(?=\s*[)\]}])")
WORD = re.compile(r"""[A-Za-z_]\w*|"[^"]*"|'[^']*'|\S""")


@lru_cache(maxsize=1 << 16)
def form(signature: str, before: str, after: str) -> tuple[str, ...]:
    """A change of a line in a function, with every name that is no word of Python replaced by its place in the text.

    A function, class, parameter or module that gets another name leaves the form as it is. Parentheses are left out,
    and commas before a closing bracket: a formatter adds them to lines that it breaks, and Python 3.10 writes some that
    later versions leave out when they turn a syntax tree into text.

    >>> form("def a(b):", "return b + 1", "return b - 1") == form("def c(d):", "return d + 1", "return d - 1")
    True
    """
    names: dict[str, str] = {}
    words = WORD.findall(TRAILING_COMMA.sub("", f"{signature} \0 {before} \0 {after}"))
    return tuple(
        names.setdefault(word, f"n{len(names)}") if word.isidentifier() and not keyword.iskeyword(word) else word
        for word in words
        if word not in "()"
    )


def digest_of(words: tuple[str, ...]) -> str:
    """Eight hexadecimal digits that stand for the words of a form."""
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:8]


def bare(source: str) -> bytes:
    """`source` with blanks in place of comments and docstrings, every other byte in its place."""
    content = bytearray(source.encode())
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    spans = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            # tokenize counts letters, and the offsets of a syntax tree are bytes.
            begin = starts[row - 1] + len(token.line[:column].encode())
            spans.append((begin, begin + len(token.string.encode())))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            begin = starts[node.lineno - 1] + node.col_offset
            spans.append((begin, starts[node.end_lineno - 1] + node.end_col_offset))
    for begin, end in spans:
        content[begin:end] = re.sub(rb"[^\n]", b" ", bytes(content[begin:end]))
    return bytes(content)
