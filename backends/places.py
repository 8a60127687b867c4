"""Places in a user's module, `file:line`, for messages about an adapter.

A file is named as it lies below the current folder where it does, else by its whole path.
"""

import ast
import inspect
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType

BACKENDS_FOLDER = Path(__file__).parent
"""The folder of our backends, whose frames say nothing about a user's module."""

LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))
"""The folders of installed packages: a frame in them is named only where no other is left."""


def short(file: str | Path) -> str:
    """A file as it lies below the current folder, if it does."""
    path = Path(file)
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):  # it lies elsewhere, or the current folder was removed
        return str(path)


def error_place(why: BaseException) -> str:
    """Where an error was raised, as ` (file:line)` with a blank in front; empty where no frame is a user's.

    An error of syntax names the line that cannot be read. Otherwise it is the innermost frame outside of our code, and
    outside of installed packages if there is such a frame.
    """
    if isinstance(why, SyntaxError) and why.filename:
        return f" ({short(why.filename)}:{why.lineno})"
    frames = [frame for frame in traceback.extract_tb(why.__traceback__) if _is_strange(frame.filename)]
    user_frames = [frame for frame in frames if not any(folder in Path(frame.filename).parents for folder in LIBRARIES)]
    for frame in reversed(user_frames or frames):
        return f" ({short(frame.filename)}:{frame.lineno})"
    return ""


def _is_strange(file: str) -> bool:
    """Whether a file of a frame is neither ours nor the import system's."""
    return (
        not file.startswith("<frozen")
        and "importlib" not in Path(file).parts
        and BACKENDS_FOLDER not in Path(file).parents
    )


def function_at(function: object) -> str:
    """Where a function or method is written, as `file:line`; empty for one without source, such as a built-in."""
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return "" if code is None else f"{short(code.co_filename)}:{code.co_firstlineno}"


def definition_place(module: ModuleType, attribute: str) -> str:
    """Where a module defines a name, as `file:line`; the file alone where no line of its top level does."""
    file = getattr(module, "__file__", None)
    if file is None:
        return module.__name__
    try:
        body = ast.parse(Path(file).read_text()).body
    except (OSError, SyntaxError, UnicodeDecodeError):  # no source, such as a compiled module
        return short(file)
    lines = [node.lineno for node in body if attribute in _names(node)]
    return f"{short(file)}:{lines[-1]}" if lines else short(file)


def _names(node: ast.stmt) -> set[str]:
    """The names that a statement of a module's top level defines."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name for alias in node.names}
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)}
