"""Ready adapters: their rows, how they are named and opened, and what is said where their engine is absent."""

import ast
import json
import re
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from specverify.backends import registry
from specverify.backends.adapters import ADAPTERS, FOLDER, Adapter
from specverify.backends.admission import Misshapen, check_declaration
from specverify.backends.base import Unavailable
from specverify.backends.registry import UnknownBackend, open_backend, shipped_names, why_unavailable
from specverify.backends.shipped import ROWS
from specverify.cli import main
from specverify.commands.doctor_checks import examine
from specverify.commands.subjects import backends
from specverify.plan import DEFAULT_CASES, default_cases
from specverify.reports.pages.tables import rows_table
from tests.inprocess import in_this_process

ROOT = Path(__file__).resolve().parents[3]
FILES = ROOT / FOLDER.replace(".", "/")
HERE = [adapter.name for adapter in ADAPTERS if adapter.why_not_installed() is None]


def source(adapter: Adapter) -> ast.Module:
    return ast.parse((FILES / f"{adapter.factory.partition(':')[0]}.py").read_text())


def test_names_and_factories_are_told_apart() -> None:
    assert len(set(shipped_names())) == len(ROWS) + len(ADAPTERS)
    assert len({adapter.factory for adapter in ADAPTERS}) == len(ADAPTERS)
    assert all(":" not in name for name in shipped_names()), "a colon means a module of a user's"


def test_every_file_of_the_folder_has_a_row() -> None:
    named = {adapter.factory.partition(":")[0] for adapter in ADAPTERS}
    assert {file.stem for file in FILES.glob("*.py")} - {"__init__"} == named


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)
def test_a_row_says_where_its_factory_is(adapter: Adapter) -> None:
    """The file is read and not imported, so that rows of absent engines are held too."""
    names = {
        name
        for node in source(adapter).body
        for name in (
            [target.id for target in node.targets if isinstance(target, ast.Name)] if isinstance(node, ast.Assign)
            else [node.name] if isinstance(node, ast.FunctionDef) else []
        )
    }  # fmt: skip
    assert adapter.attribute in names


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)
def test_a_row_names_an_extra_of_ours(adapter: Adapter) -> None:
    _, _, section = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")
    extras = re.findall(r"^([\w-]+) = \[", section.partition("\n[")[0], re.MULTILINE)
    assert "dev" in extras
    assert adapter.extra in extras or not adapter.imports or adapter.hint
    assert bool(adapter.extra or adapter.hint) == bool(adapter.imports)


@pytest.mark.parametrize("name", HERE)
def test_an_engine_that_is_here_opens_under_its_name(name: str) -> None:
    row = next(adapter for adapter in ADAPTERS if adapter.name == name)
    declared = open_backend(name).declaration
    assert (declared.name, declared.device) == (name, row.device)


def test_an_engine_that_is_absent_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    row = replace(ADAPTERS[0], name="gone", extra="gone-extra", imports=("json", "no_such_engine"))
    monkeypatch.setattr(registry, "ADAPTERS", (row,))
    line = "gone needs no_such_engine, which is not installed: pip install -e '.[gone-extra]'"
    with pytest.raises(Unavailable) as error:
        open_backend("gone")
    assert str(error.value) == line
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
    _, _, section = (
        (ROOT / "docs" / "tutorials" / "black_box.md").read_text().partition("Some engines need no adapter of yours.")
    )
    paragraph = section.partition("Where an engine is absent")[0]
    assert set(re.findall(r"[\w-]+", paragraph)) >= {adapter.extra for adapter in ADAPTERS if adapter.extra}


def test_lists_have_them() -> None:
    reasons = {row["name"]: row["unavailable"] for row in backends()}
    assert list(reasons) == [*shipped_names(), "openai:URL", "command:PROGRAM", "pkg.module:factory"]
    assert {name for name in reasons if reasons[name] is None} >= set(HERE)
    assert {f"backend {adapter.name}" for adapter in ADAPTERS} <= {row["name"] for row in examine()}


def test_a_slow_engine_may_have_fewer_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_cases("hf-generate") == DEFAULT_CASES
    monkeypatch.setattr("specverify.plan.SHIPPED_BACKENDS", (replace(ADAPTERS[0], cases=7),))
    assert default_cases("hf-generate") == 7


SCRIPTS = ROOT / "tests" / "strangers" / "found"


def test_each_script_of_a_fault_is_named_by_an_adapter_as_left_out_or_known() -> None:
    sentences = [sentence for adapter in ADAPTERS for sentence in adapter.excluded]
    sentences += [fault.sentence for adapter in ADAPTERS for fault in adapter.known]
    named = {script for sentence in sentences for script in re.findall(r"\w+\.py", sentence)}
    assert named == {file.name for file in SCRIPTS.glob("*.py")}


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda row: row.name)
def test_an_adapter_whose_file_names_a_script_leaves_its_fault_out(adapter: Adapter) -> None:
    file = adapter.factory.partition(":")[0]
    if "tests/strangers/found" in (FILES / f"{file}.py").read_text():
        assert any(row.excluded for row in ADAPTERS if row.factory.startswith(f"{file}:"))
    for sentence in adapter.excluded:
        region, _, why = sentence.partition(": ")
        assert region
        assert re.search(r"\d+\.\d+", why), "the version with which the fault was seen"


def test_every_verdict_names_what_an_adapter_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    in_this_process(monkeypatch)
    (tmp_path / "partial.py").write_text(
        "import torch\n"
        "from specverify.adapt import blackbox\n\n\n"
        "@torch.no_grad()\n"
        "def generate(prompt_ids, max_new_tokens, model):\n"
        "    text = list(prompt_ids)\n"
        "    for _ in range(max_new_tokens):\n"
        "        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))\n"
        "    return text[len(prompt_ids):]\n\n\n"
        'open_ = blackbox(generate, excluded=("top_p: ignored (1.2.0)", "windows: it stops"))\n'
    )
    files = ("--json", "told.json", "--junit", "told.xml", "--html", "told.html")
    with pytest.raises(SystemExit):
        main(["diff", "--backend", "partial:open_", "--cases", "3", *files])
    printed = " ".join(capfd.readouterr().out.split())
    assert "NOT JUDGED: top_p, windows" in printed
    assert "left out top_p: ignored (1.2.0)" in printed
    content = json.loads((tmp_path / "told.json").read_text())
    assert content["excluded"] == ["top_p: ignored (1.2.0)", "windows: it stops"]
    assert 'name="excluded"' in (tmp_path / "told.xml").read_text()
    page = (tmp_path / "told.html").read_text()
    assert "not judged: top_p, windows" in page
    assert "windows: it stops" in page


@pytest.mark.parametrize("excluded", ["top_p: ignored", ("top_p",), (3,)])
def test_what_is_left_out_is_said_with_its_reason(excluded: object) -> None:
    declaration = replace(open_backend("cpu-eager").declaration, excluded=excluded)  # type: ignore[arg-type]
    with pytest.raises(Misshapen, match=r"declaration\.excluded"):
        check_declaration(declaration)


def test_the_list_of_backends_names_what_is_left_out() -> None:
    rows = [row for row in backends() if row["excluded"]]
    assert {row["name"] for row in rows} == {adapter.name for adapter in ADAPTERS if adapter.excluded}
    table = " ".join(rows_table("backends", rows).split())
    assert "not judged: windows of one token" in table
