"""Modules imported from changed source: with one mutant in it, or with a note at every statement that runs."""

import ast
import importlib.util
import linecache
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType

from tests.measure.mutation.generate import Mutant

KEPT_MODULES = tuple(f"specverify.backends{suffix}" for suffix in ("", ".base", ".flags", ".registry"))
"""Modules under `specverify.backends` that know nothing of the engine, and that whoever judges it holds on to."""

Reached = set[tuple[str, int]]
"""Statements that ran: the module, and the line."""

NOTED = "__statement_reached__"


def source_of(module: str) -> tuple[Path, str]:
    """File and text of a module, found without importing it or its packages' siblings."""
    root = Path(__file__).resolve().parents[3].joinpath(*module.split("."))
    path = root / "__init__.py" if root.is_dir() else root.with_suffix(".py")
    return path, path.read_text(encoding="utf-8")


class Changed(MetaPathFinder, Loader):
    """Imports some modules from other code than their file's.

    Triton reads a kernel's source again, so a mutant's text lies in `linecache` under a name that no file has.
    """

    def __init__(self, code: Callable[[str], CodeType | None], extra: dict[str, object] | None = None) -> None:
        self._code = code
        self._extra = extra or {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for a module whose code is another's; None leaves it to the other finders."""
        if not fullname.startswith(("specverify.backends.", "specverify.reference.")) or self._code(fullname) is None:
            return None
        file, _ = source_of(fullname)
        package = [str(file.parent)] if file.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(fullname, file, loader=self, submodule_search_locations=package)

    def exec_module(self, module: ModuleType) -> None:
        """Run the other code as the module's own."""
        code = self._code(module.__name__)
        assert code is not None
        vars(module).update(self._extra)
        exec(code, vars(module))


def install_mutant(mutant: Mutant) -> None:
    """From now on the mutant's module is imported with the mutant in it."""
    file, source = source_of(mutant.module)
    text = mutant.applied(source)
    name = f"<mutant of {file.name}>"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    code = compile(text, name, "exec")
    sys.meta_path.insert(0, Changed(lambda module: code if module == mutant.module else None))


def install_notes(modules: Sequence[str]) -> Reached:
    """From now on `modules` are imported with a note before each statement; what ran so far is in the set."""
    reached: Reached = set()
    codes: dict[str, CodeType] = {}
    for module in modules:
        file, source = source_of(module)
        tree = ast.fix_missing_locations(_Noting(module).visit(ast.parse(source)))
        codes[module] = compile(tree, str(file), "exec")
    sys.meta_path.insert(0, Changed(codes.get, {NOTED: reached.add}))
    return reached


class _Noting(ast.NodeTransformer):
    """Puts a call before every statement of every block, but for a docstring, which stays first."""

    def __init__(self, module: str) -> None:
        self._module = module

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                setattr(
                    node, name, [noted_statement for statement in block for noted_statement in self._noted(statement)]
                )
        return node

    def _noted(self, statement: ast.stmt) -> list[ast.stmt]:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return [statement]
        place = ast.Tuple([ast.Constant(self._module), ast.Constant(statement.lineno)], ast.Load())
        call = ast.Call(ast.Name(NOTED, ast.Load()), [place], [])
        return [ast.copy_location(ast.Expr(call), statement), statement]


def forget(room: str, kept_modules: tuple[str, ...] = KEPT_MODULES) -> None:
    """Forget what was imported of a room, and what holds on to it, so that this process imports it anew."""
    for name in list(sys.modules):
        below = name == room or name.startswith(room + ".")
        if (below and name not in kept_modules and not name.startswith(OWN_PREFIX)) or name in HOLDING:
            del sys.modules[name]


HOLDING = (
    "specverify.setup.subjects",
    "specverify.selftest.hunt",
    "specverify.commands.doctor_checks",
    "specverify.selftest.clean_runs",
    "specverify.pytest_plugin",
)
"""Modules of ours that import the engine, directly or not, and that a child needs again."""

OWN_PREFIX = "tests.measure.mutation.bench"
"""Modules that run where others are forgotten."""
