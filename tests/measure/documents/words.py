"""Docstrings and tables as Markdown."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *([_cell(cell) for cell in row] for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _cell(text: str) -> str:
    words = text if re.fullmatch(r"\[[^\]]*\]\([^)]*\)", text) else escape_markup(text)
    return " ".join(words.split()).replace("|", "\\|")


def escape_markup(text: str) -> str:
    """A sentence of a table or docstring: what Markdown would take for markup outside of code is escaped."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if number % 2 else re.sub(r"([*_<\[])", r"\\\1", part) for number, part in enumerate(parts))


def docstring(documented: object) -> tuple[str, dict[str, dict[str, str]]]:
    """The paragraphs of a docstring, and its sections: each entry by its name."""
    text = inspect.getdoc(documented) or ""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if line.rstrip(":") in SECTIONS and line.endswith(":")]
    head = "\n".join(lines[: starts[0]] if starts else lines).strip()
    sections = {}
    for number, start in enumerate(starts):
        end = starts[number + 1] if number + 1 < len(starts) else len(lines)
        sections[lines[start].rstrip(":")] = _entries(lines[start + 1 : end])
    return head, sections


def _entries(lines: list[str]) -> dict[str, str]:
    """The entries of a section; a section that is one sentence has one entry without a name."""
    entries: dict[str, list[str]] = {}
    body = textwrap.dedent("\n".join(lines)).splitlines()
    for line in body:
        match = re.match(r"([\w, ]+): (.*)", line)
        if match is not None:
            for name in match[1].split(", "):
                entries[name] = [match[2]]
        elif entries:
            entries[[*entries][-1]].append(line.strip())
        elif line.strip():
            entries[""] = [line]
    # Names that share one entry, `keys, values: ...`, share the lines below it as well.
    texts: dict[str, str] = {}
    for name in entries:
        texts[name] = " ".join(entries[name]).strip()
    return texts


def paragraphs(text: str) -> str:
    """The paragraphs of a docstring as Markdown: an indented block is code, a list stays one."""
    pieces: list[str] = []
    # Lines of code with an empty line between them are one block.
    for part in _parts(inspect.cleandoc(text)):
        if part.startswith("    "):
            pieces.append(f"```python\n{textwrap.dedent(part)}\n```")
        elif part.lstrip().startswith("- "):
            pieces.append(escape_markup(part))
        else:
            pieces.append(escape_markup(" ".join(part.split())))
    return "\n\n".join(pieces) + "\n"


def _parts(text: str) -> list[str]:
    parts: list[str] = []
    for part in re.split(r"\n\s*\n", text):
        if parts and part.startswith("    ") and parts[-1].startswith("    "):
            parts[-1] += f"\n\n{part}"
        else:
            parts.append(part)
    return parts


def signature(function: Any) -> str:
    """The signature of a function or method as its source writes it."""
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(node, ast.FunctionDef)
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    return f"{node.name}({ast.unparse(node.args)}){returns}"


def annotations(kind: type) -> dict[str, str]:
    """The types of the fields of a class and its bases, as their sources write them."""
    written: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__ in ("builtins", "abc", "typing"):
            continue
        node = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(node, ast.ClassDef)
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                written[statement.target.id] = ast.unparse(statement.annotation)
    return written


def field_table(kind: type) -> str:
    """The fields of a dataclass with type, default and the sentence of its docstring."""
    assert is_dataclass(kind)
    sentences: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        sentences |= docstring(base)[1].get("Attributes", {})
    written = annotations(kind)
    return table(
        ("field", "type", "default", "what it says"),
        (
            (
                f"`{field.name}`",
                f"`{written[field.name].strip(chr(39))}`",
                _default(field),
                sentences.get(field.name, ""),
            )
            for field in fields(kind)
        ),
    )


def _default(field: "Field[Any]") -> str:
    if field.default is MISSING:
        return "required" if field.default_factory is MISSING else "made anew"
    if is_dataclass(field.default):
        return f"`{type(field.default).__name__}()`"
    text = repr(field.default)
    return f"`{text}`" if len(text) <= 40 else "all of them"
