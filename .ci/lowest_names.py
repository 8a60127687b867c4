"""Look every name that we take from torch and transformers up in the lowest versions that pyproject.toml names.

`.ci/lowest` installs them and runs tests, 5.4 GB and many minutes. This reads their Python files alone, out of wheels
for macOS, which are small (77 MB in all, deleted at the end), and finds a name that came later before a machine does.

    python .ci/lowest_names.py                    # download the wheels
    python .ci/lowest_names.py --wheels FOLDER    # they are there

A name is looked up where it is imported, and where it is an attribute of a module. It may be missing inside a `try`
that catches ImportError, in a file that asks `hasattr` for it, below an `if hasattr(module, "Name")` that asks for
another name of the same release, and in a ready adapter, which is then not available.
Exit codes: 0 all are there; 1 one is not; 3 the wheels cannot be had.
"""

import argparse
import ast
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("backends", "specverify", "properties", "reports", "reference")
PACKAGES = ("torch", "transformers")
ADAPTERS = ROOT / "backends/adapt/engines"
ELSEWHERE = {"torch.npu": "torch_npu", "torch.return_types": "compiled code"}
"""Names that no Python file holds, and what adds them."""

SETTINGS, SETTINGS_CLASS = "install_config_module(", "torch.utils._config_module"
"""A module of settings calls the first on itself as it is imported, and then has the methods of the second's class."""

ALL_PRESENT, MISSING, UNCHECKED = 0, 1, 3


class Wheel:
    """The Python files of a wheel."""

    def __init__(self, file: Path) -> None:
        self._archive = zipfile.ZipFile(file)
        self._files = {name for name in self._archive.namelist() if name.endswith((".py", ".pyi"))}

    @cache  # noqa: B019 - a wheel lives as long as the program
    def source(self, module: str) -> str | None:
        """The text of a module, its stub if it is compiled; None if there is none."""
        path = module.replace(".", "/")
        for file in (f"{path}.py", f"{path}/__init__.py", f"{path}.pyi", f"{path}/__init__.pyi"):
            if file in self._files:
                return self._archive.read(file).decode()
        return None

    @cached_property
    def _defined(self) -> set[str]:
        """Every name that any file defines at its outermost level."""
        names: set[str] = set()
        for file in self._files:
            names.update(re.findall(r"^(?:class |def |async def )?(\w+)\b", self._archive.read(file).decode(), re.M))
        return names

    @cache  # noqa: B019
    def defines(self, module: str, name: str) -> bool:
        """Whether a module has the name: as a submodule, in its text, or in any file where it imports with a star."""
        if self.source(f"{module}.{name}") is not None:
            return True
        text = self.source(module) or ""
        if SETTINGS in text and module != SETTINGS_CLASS:
            text += self.source(SETTINGS_CLASS) or ""
        if re.search(rf"\b{re.escape(name)}\b", text):
            return True
        opaque = module == "torch" or "import *" in text or "_LazyModule" in text or "__getattr__" in text
        stubs = (self.source("torch._C") or "") + (self.source("torch._C._VariableFunctions") or "")
        return opaque and (name in self._defined or bool(re.search(rf"\b{re.escape(name)}\b", stubs)))


@dataclass(frozen=True)
class Use:
    """A name that a line of ours takes from a module."""

    place: str
    module: str
    name: str


def uses_in(file: Path, wheels: dict[str, Wheel]) -> Iterator[Use]:
    """The names that a file takes from PACKAGES, but those that it may do without."""
    tree = ast.parse(file.read_text("utf-8"))
    modules = {
        alias.asname or alias.name.partition(".")[0]: alias.name if alias.asname else alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.partition(".")[0] in PACKAGES
    }
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    excused_nodes = _excused_imports(tree) | _below_version_tests(tree, modules)
    for node in imports:
        package = (node.module or "").partition(".")[0]
        if package not in PACKAGES or node in excused_nodes:
            continue
        for alias in node.names:
            yield Use(f"{file.relative_to(ROOT)}:{node.lineno}", node.module or "", alias.name)
            full = f"{node.module}.{alias.name}"
            if wheels[package].source(full) is not None:
                modules[alias.asname or alias.name] = full
    excused = _excused_attributes(tree)
    for attribute in ast.walk(tree):
        if isinstance(attribute, ast.Attribute) and attribute.attr not in excused and attribute not in excused_nodes:
            module = _module_of(attribute.value, modules, wheels)
            if module is not None:
                yield Use(f"{file.relative_to(ROOT)}:{attribute.lineno}", module, attribute.attr)


def _module_of(node: ast.expr, modules: dict[str, str], wheels: dict[str, Wheel]) -> str | None:
    """The module that an expression names; None for anything else."""
    if isinstance(node, ast.Name):
        return modules.get(node.id)
    if isinstance(node, ast.Attribute):
        outer = _module_of(node.value, modules, wheels)
        inner = f"{outer}.{node.attr}"
        if outer is not None and wheels[outer.partition(".")[0]].source(inner) is not None:
            return inner
    return None


def _excused_imports(tree: ast.Module) -> set[ast.AST]:
    """The imports inside a `try` that catches ImportError."""
    return {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        and any(handler.type is not None and "ImportError" in ast.unparse(handler.type) for handler in node.handlers)
        for statement in node.body
        for inner in ast.walk(statement)
    }


def _below_version_tests(tree: ast.Module, modules: dict[str, str]) -> set[ast.AST]:
    """All that runs only where `if hasattr(module, "Name")` holds, for a module of PACKAGES."""
    return {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and isinstance(node.test, ast.Call)
        and ast.unparse(node.test.func) == "hasattr"
        and ast.unparse(node.test.args[0]) in modules
        for statement in node.body
        for inner in ast.walk(statement)
    }


def _excused_attributes(tree: ast.Module) -> set[str]:
    """The names for which `hasattr` or `getattr` asks somewhere in the file."""
    return {
        node.args[1].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("hasattr", "getattr")
        and len(node.args) > 1
        and isinstance(node.args[1], ast.Constant)
        and isinstance(node.args[1].value, str)
    }


def download(folder: Path) -> str | None:
    """Download the wheels of the lowest versions; returns why that failed, or None."""
    bounds = re.findall(rf'"({"|".join(PACKAGES)})>=([\w.]+)"', (ROOT / "pyproject.toml").read_text())
    pins = [f"{name}=={version if version.count('.') > 1 else version + '.0'}" for name, version in bounds]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    command += ["--python-version", "3.10", "--platform", "macosx_11_0_arm64", *pins]
    ended = subprocess.run(command, capture_output=True, text=True)
    return None if ended.returncode == 0 else ended.stderr.strip()[-300:]


def missing_names(wheels: dict[str, Wheel], files: list[Path]) -> list[Use]:
    """The uses of names that the wheels lack."""
    return [
        use
        for file in files
        for use in uses_in(file, wheels)
        if not {use.module, f"{use.module}.{use.name}"} & ELSEWHERE.keys()
        and not wheels[use.module.partition(".")[0]].defines(use.module, use.name)
    ]


def main() -> int:
    """Print each missing name; see the module's docstring for the exit code."""
    parser = argparse.ArgumentParser(description="Look up names in the lowest versions of torch and transformers.")
    parser.add_argument("--wheels", type=Path, help="folder of the wheels (default: download them)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.wheels or Path(scratch)
        why = None if options.wheels else download(folder)
        if why is not None:
            print(f"lowest names: not checked: {why}")
            return UNCHECKED
        wheels = {name: Wheel(next(folder.glob(f"{name}-*.whl"))) for name in PACKAGES}
        files = sorted(
            file
            for room in ROOMS
            for file in (ROOT / room).rglob("*.py")
            if not _below_a_link(file) and ADAPTERS not in file.parents
        )
        missing = missing_names(wheels, files)
    for use in missing:
        print(f"{use.place}: {use.module} has no {use.name} in the lowest version")
    print(f"lowest names: {len(files)} files, {len(missing)} names missing")
    return MISSING if missing else ALL_PRESENT


def _below_a_link(file: Path) -> bool:
    """Whether a file is reached through one of the links of `specverify`, so that it is another room's."""
    return any(parent.is_symlink() for parent in file.parents)


if __name__ == "__main__":
    raise SystemExit(main())
