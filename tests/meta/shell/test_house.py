"""The house keeps its order: what may be imported where, what files are called, and how they begin."""

import ast
import doctest
import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from specverify.reference.layout import KINDS as LAYOUTS

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("specverify", "reference", "backends", "properties", "reports")
FILES = sorted(file for room in ROOMS for file in (ROOT / room).rglob("*.py"))
MOST_CAPTION = 100
ABSENT = re.compile(r"statistics-and-numerics|peers\.md|engines\.md|drafts\.md|design\.md|house\.md")
VAGUE = re.compile(r"(?:^|_)(utils?|helpers?|managers?|common|misc)(?:_|$)")


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def imported_names(file: Path) -> Iterator[str]:
    """Names of the modules that a file imports, wherever in it: `torch.nn`, `specverify.reference.tree`."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(file)}:{node.lineno}: a relative import"
            yield node.module or ""


def borrowed_names(module: ast.Module) -> list[str]:
    """Private attributes that a module reads, and that no class of the module makes: `super()` makes none of them."""
    inner = [node for cls in ast.walk(module) if isinstance(cls, ast.ClassDef) for node in ast.walk(cls)]
    own_names = {node.name for node in inner if isinstance(node, ast.FunctionDef)}
    own_names |= {
        node.target.id for node in inner if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    read = [node for node in ast.walk(module) if isinstance(node, ast.Attribute)]
    own_names |= {node.attr for node in read if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"}
    private = [node for node in read if re.match("_[a-z]", node.attr)]
    return [ast.unparse(node) for node in private if node.attr not in own_names or ast.unparse(node.value) == "super()"]


def outside(room: str, allowed: set[str]) -> list[str]:
    """What files of a room import from elsewhere than `allowed`, rooms among them, and the standard library."""
    return [
        f"{name_of(file)} imports {module}"
        for file in FILES
        if file.is_relative_to(ROOT / room)
        for module in imported_names(file)
        if module.removeprefix("specverify.").split(".")[0] not in allowed | sys.stdlib_module_names
    ]


def module_of(file: Path) -> str:
    """The import name of a file: rooms lie below `specverify`."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "specverify" else ("specverify", *parts))


@pytest.mark.parametrize("room", ROOMS)
def test_the_name_of_a_room_means_this_checkout(room: str) -> None:
    spec = find_spec(module_of(ROOT / room))
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).resolve() == ROOT / room / "__init__.py"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_holds_packages(room: str) -> None:
    """`specverify/py.typed` stands for all of them."""
    assert (ROOT / "specverify" / "py.typed").is_file()
    folders = {file.parent for file in FILES if file.is_relative_to(ROOT / room)}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_the_oracle_knows_numpy_and_itself() -> None:
    assert outside("reference", {"reference", "numpy", "jsonschema"}) == []


def test_what_must_hold_is_stated_without_an_engine() -> None:
    assert outside("properties", {"properties", "reference", "numpy", "scipy", "hypothesis"}) == []


def test_reports_know_facts_and_paper() -> None:
    assert outside("reports", {"reports", "properties", "reference", "numpy", "rich", "junitparser", "jinja2"}) == []


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_file_of_a_room(file: Path) -> None:
    text = file.read_text()
    opening = ast.get_docstring(ast.parse(text))
    assert opening, "a file opens with a docstring"
    caption, _, paragraphs = opening.partition("\n")
    assert len(caption) <= MOST_CAPTION, "a short caption; what more a newcomer needs goes into paragraphs below"
    assert caption.endswith("."), "a caption is a sentence on one line"
    assert not paragraphs.strip() or paragraphs.startswith("\n"), "an empty line stands between caption and paragraphs"
    assert ABSENT.search(text) is None, "a document that is not in this repository: say the fact, or its public source"
    for part in file.relative_to(ROOT).with_suffix("").parts:
        assert VAGUE.search(part) is None, f"{part} says nothing of what it holds"
    assert re.search(r"pickle\.loads?\b|torch\.load\b|import pickle\b|from pickle\b", text) is None


KINDS_OF_DRAFT = re.compile(
    r"isinstance\([^)]*\b(?:Scripted|Ngram|LanguageModel|ScriptedDraft|NgramDraft|ModelDraft)\b"
)
NAMES_OF_LAYOUTS = re.compile(rf"""\.kind (?:==|!=|in|not in) \(?["'](?:{"|".join(LAYOUTS)})""")


@pytest.mark.parametrize("pattern", [KINDS_OF_DRAFT, NAMES_OF_LAYOUTS], ids=["drafts", "layouts"])
def test_what_a_kind_is_asked_is_asked_behind_its_wall(pattern: re.Pattern[str]) -> None:
    # A condition of a search may speak of one layout by its name: that layout is what it is about.
    outside = [file for file in FILES if file.parent.name != "draft" and file.name != "conditions.py"]
    assert [name_of(file) for file in outside if pattern.search(file.read_text())] == []


@pytest.mark.parametrize("file", sorted((ROOT / "backends" / "faults").rglob("*.py")), ids=name_of)
def test_a_fault_reads_no_private_name_of_the_engine(file: Path) -> None:
    assert not borrowed_names(ast.parse(file.read_text())), "make the name public in the engine, with its contract"


def test_a_folder_without_a_module_has_no_vague_name_either() -> None:
    folders = [path for room in (*ROOMS, "tests") for path in (ROOT / room).rglob("*") if path.is_dir()]
    assert folders
    assert [name_of(path) for path in folders if VAGUE.search(path.name)] == []


def test_the_arrows_point_down() -> None:
    linter = shutil.which("lint-imports", path=str(Path(sys.executable).parent)) or shutil.which("lint-imports")
    if linter is None:
        pytest.skip("import-linter is not installed (pip install -e '.[dev]')")
    ended = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " 0 broken" in ended.stdout


def test_these_tests_see_what_they_forbid(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        "import numpy as np\ndef f():\n    from torch.nn import Module\n    import specverify.reference.tree, pickle\n"
    )
    assert sorted(imported_names(file)) == ["numpy", "pickle", "specverify.reference.tree", "torch.nn"]
    assert VAGUE.search("test_utils")
    assert VAGUE.search("helpers")
    assert VAGUE.search("common")
    assert not VAGUE.search("uncommon")
    assert KINDS_OF_DRAFT.search("if isinstance(case.draft, Scripted):")
    assert NAMES_OF_LAYOUTS.search('if case.layout.kind == "paged":')
    assert borrowed_names(
        ast.parse("class A(B):\n    def f(self):\n        return self._x + self.y + super()._g()")
    ) == [
        "self._x",
        "super()._g",
    ]
    assert not borrowed_names(ast.parse("class A(B):\n    def f(self):\n        self._x = 1\n        return self._x"))
    assert len(FILES) > 60


@pytest.mark.parametrize("file", [file for file in FILES if "\n    >>> " in file.read_text()], ids=name_of)
def test_examples_in_docstrings_are_true(file: Path) -> None:
    module = importlib.import_module(module_of(file))
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0
    assert result.failed == 0


def test_a_worker_starts_without_the_engine() -> None:
    """The judge needs no torch, so that a run does not import it once more for each worker."""
    program = "import sys, specverify.campaign.worker; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.stdout == "[]\n", ended.stderr
