"""Ready adapters: their rows, how they are named and opened, and what is said where their engine is absent."""

import ast
import re
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from specverify.backends import registry
from specverify.backends.adapters import ADAPTERS, FOLDER, Adapter
from specverify.backends.base import Unavailable
from specverify.backends.registry import UnknownBackend, open_backend, shipped_names, why_unavailable
from specverify.backends.shipped import ROWS
from specverify.commands.doctor_checks import examine
from specverify.commands.subjects import backends
from specverify.plan import DEFAULT_CASES, default_cases

ROOT = Path(__file__).resolve().parents[3]
FILES = ROOT / FOLDER.replace(".", "/")
HERE = [one.name for one in ADAPTERS if one.why_not_installed() is None]


def source(adapter: Adapter) -> ast.Module:
    return ast.parse((FILES / f"{adapter.factory.partition(':')[0]}.py").read_text())


def test_names_and_factories_are_told_apart() -> None:
    assert len(set(shipped_names())) == len(ROWS) + len(ADAPTERS)
    assert len({one.factory for one in ADAPTERS}) == len(ADAPTERS)
    assert all(":" not in name for name in shipped_names()), "a colon means a module of a user's"


def test_every_file_of_the_folder_has_a_row() -> None:
    named = {one.factory.partition(":")[0] for one in ADAPTERS}
    assert {file.stem for file in FILES.glob("*.py")} - {"__init__"} == named


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda one: one.name)
def test_a_row_says_where_its_factory_is(adapter: Adapter) -> None:
    """The file is read and not imported, so that rows of absent engines are held too."""
    made = {
        name
        for node in source(adapter).body
        for name in (
            [one.id for one in node.targets if isinstance(one, ast.Name)] if isinstance(node, ast.Assign)
            else [node.name] if isinstance(node, ast.FunctionDef) else []
        )
    }  # fmt: skip
    assert adapter.attribute in made


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda one: one.name)
def test_a_row_names_an_extra_of_ours(adapter: Adapter) -> None:
    _, _, section = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")
    extras = re.findall(r"^([\w-]+) = \[", section.partition("\n[")[0], re.MULTILINE)
    assert "dev" in extras
    assert adapter.extra in extras or not adapter.imports or adapter.hint
    assert bool(adapter.extra or adapter.hint) == bool(adapter.imports)


@pytest.mark.parametrize("name", HERE)
def test_an_engine_that_is_here_opens_under_its_name(name: str) -> None:
    row = next(one for one in ADAPTERS if one.name == name)
    declared = open_backend(name).declaration
    assert (declared.name, declared.device) == (name, row.device)


def test_an_engine_that_is_absent_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    row = replace(ADAPTERS[0], name="gone", extra="gone-extra", imports=("json", "no_such_engine"))
    monkeypatch.setattr(registry, "ADAPTERS", (row,))
    line = "gone needs no_such_engine, which is not installed: pip install -e '.[gone-extra]'"
    with pytest.raises(Unavailable) as told:
        open_backend("gone")
    assert str(told.value) == line
    assert why_unavailable("gone") == line
    assert find_spec("json") is not None
    monkeypatch.setattr(registry, "ADAPTERS", (replace(row, hint="ask its author"),))
    assert why_unavailable("gone") == "gone needs no_such_engine, which is not installed: ask its author"


def test_an_engine_that_cannot_be_imported_is_unavailable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken_engine.py").write_text("raise RuntimeError('no such\\ninstruction')\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr("specverify.backends.adapters.FOLDER", "broken_engine")
    monkeypatch.setattr(Adapter, "module", "broken_engine")
    monkeypatch.setattr(registry, "ADAPTERS", (replace(ADAPTERS[0], name="broken"),))
    assert why_unavailable("broken") == "broken cannot be imported: RuntimeError: no such instruction"


def test_an_unknown_name_is_answered_with_the_nearest_and_where_all_are_listed() -> None:
    with pytest.raises(UnknownBackend, match=r"did you mean hf-generate.*`specverify list backends` names all"):
        open_backend("hf-generated")
    assert {row.name for row in ROWS} < set(shipped_names())


def test_the_tutorial_names_every_extra_of_an_engine() -> None:
    _, _, told = (
        (ROOT / "docs" / "tutorials" / "black_box.md").read_text().partition("Some engines need no adapter of yours.")
    )
    paragraph = told.partition("Where an engine is absent")[0]
    assert set(re.findall(r"[\w-]+", paragraph)) >= {one.extra for one in ADAPTERS if one.extra}


def test_lists_have_them() -> None:
    told = {row["name"]: row["unavailable"] for row in backends()}
    assert list(told) == [*shipped_names(), "openai:URL", "command:PROGRAM", "pkg.module:factory"]
    assert {name for name in told if told[name] is None} >= set(HERE)
    assert {f"backend {one.name}" for one in ADAPTERS} <= {row["name"] for row in examine()}


def test_a_slow_engine_may_have_fewer_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_cases("hf-generate") == DEFAULT_CASES
    monkeypatch.setattr("specverify.plan.SHIPPED_BACKENDS", (replace(ADAPTERS[0], cases=7),))
    assert default_cases("hf-generate") == 7
