"""Layouts on the command line: `list layouts`, `diff --layout`, and one clear line for every bad one."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from specverify.backends.base import Declaration
from specverify.backends.compositions import open_cpu
from specverify.backends.engine import backend
from specverify.backends.engine.model.causal_lm import CausalLm
from specverify.backends.registry import open_backend
from specverify.backends.shipped import ROWS
from specverify.campaign.search import Search
from specverify.cli import main
from specverify.plan import Plan
from specverify.properties.invariants import ALL
from specverify.properties.strategies.cases import cases
from specverify.properties.strategies.models import GALLERY
from specverify.properties.verdict.finding import Verdict
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.case_json import case_to_json
from specverify.reference.draft import Scripted
from specverify.reference.layout import KINDS, KvLayout
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.tree import Tree
from specverify.setup.subjects import subject_of
from tests.inprocess import in_this_process

TREE = Tree((0, 0, 0, 1), (2, 1, 3, 1))
CASE = Case(
    Seeded(GALLERY[0], 3),
    (1, 2),
    Scripted((TREE,)),
    KvLayout(kind="paged", page_size=4, pages=(2, 0, 3, 1)),
    stops=Stops(max_new_tokens=4),
)
FACTORY = """
from dataclasses import replace
from specverify.backends.compositions import open_cpu
def plain():
    backend = open_cpu()
    backend.declaration = replace(backend.declaration, name="plain", layouts=("branch", "static"))
    return backend
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "plain_engine.py").write_text(FACTORY)
    sys.modules.pop("plain_engine", None)
    return tmp_path


def run_command(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    out, err = capfd.readouterr()
    assert "Traceback" not in err
    return int(ended.value.code or 0), out, err


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every forward that a command runs."""
    ran: list[str] = []
    forward = CausalLm.forward

    def count_forward(*arguments: Any, **named: Any) -> Any:
        ran.append("forward")
        return forward(*arguments, **named)

    monkeypatch.setattr(CausalLm, "forward", count_forward)
    return ran


def test_every_layout_is_listed_with_who_declares_it(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_command(capfd, "list", "layouts", "--json")
    rows = json.loads(out)
    assert code == 0
    assert [row["name"] for row in rows] == list(KINDS)
    assert all("cpu-eager" in row["backends"] and row["sentence"] for row in rows)
    code, out, _ = run_command(capfd, "list", "layouts")
    assert code == 0
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "(cpu-eager" in out
    assert re.search(r"^static +one pre-allocated buffer", out, re.MULTILINE)


def test_what_the_registry_says_is_what_a_backend_declares() -> None:
    layouts = {row.name: row.layouts for row in ROWS}
    declared: Declaration = open_backend("cpu-eager").declaration
    assert layouts["cpu-eager"] == declared.layouts
    assert backend.EngineBackend("cuda-eager", "cuda").declaration.layouts == layouts["cuda-eager"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_named_layout_is_every_cases(kind: str) -> None:
    @settings(max_examples=15, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(cases(layout=kind))
    def run(case: Case) -> None:
        assert case.layout.kind == kind
        assert (case.layout.page_size > 0) == (kind in ("paged", "prefix"))

    run()


def test_a_worker_draws_the_layout_of_its_plan() -> None:
    judged: list[Verdict] = []
    backend = subject_of(open_cpu())
    Search(Plan(layout="paged", cases=6), ALL[:1], Oracle(), backend, judged.append, lambda: False).run()
    assert [verdict.case.layout.kind for verdict in judged] == ["paged"] * 6


WRONG = {
    "unknown": (["--layout", "nope"], "no KV layout is called 'nope': known are branch, overwrite, scratch, static,"),
    "undeclared": (
        ["--layout", "paged", "--backend", "plain_engine:plain"],
        "plain_engine:plain declares no KV layout paged: it has branch, static",
    ),
    "against": (
        ["--layout", "sliding", "--against", "plain_engine:plain"],
        "plain_engine:plain declares no KV layout sliding: it has branch, static",
    ),
    "backend": (["--layout", "paged", "--backend", "nowhere:plain"], "cannot import 'nowhere'"),
    "latent rows": (["--layout", "paged,latent"], "paged,latent needs --model: drawn cases hold latent rows"),
    "checkpoint": (["--layout", "pagged", "--model", "somewhere"], "no KV layout is called 'pagged'"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_layout_is_one_line_before_any_case(
    kind: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    strangers = any("plain_engine" in word or "nowhere" in word for word in WRONG[kind][0])
    if strangers:  # asked where they are opened: in this process, for the test
        in_this_process(monkeypatch)
    else:
        monkeypatch.setattr("multiprocessing.get_context", lambda method: pytest.fail("a worker would start"))
    arguments, message = WRONG[kind]
    code, out, err = run_command(capfd, "diff", *arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"specverify: [^\n]+\n", err)
    assert message in err
    results = folder / ".specverify" / "results.jsonl"
    assert not results.exists(), "a run that is refused leaves no results"


def save_case(folder: Path, **layout: Any) -> str:
    """A case file with fields of its layout put in by hand, as somebody else's program might."""
    content = case_to_json(CASE)
    content["layout"] = {**content["layout"], **layout}
    file = folder / "case.json"
    file.write_text(json.dumps(content))
    return str(file)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "id out of range": ({"pages": [2, 0, 4, 1]}, "layout.pages[2]: page 4 is outside the pool of 4"),
    "negative id": ({"pages": [2, 0, -1, 1]}, "page"),
    "overlapping": ({"pages": [2, 0, 2, 1]}, "layout.pages[2]: page 2 is owned twice: it stands in the free list"),
    "page size 0": ({"page_size": 0}, "layout.page_size: 0 is not 1 to 128 columns"),
    "page size 129": ({"page_size": 129}, "layout.page_size: 129 is not 1 to 128 columns"),
    "no such layout": ({"kind": "pagged"}, "layout.kind: 'pagged' is not one of ['branch', 'overwrite'"),
    "pages without pages": ({"kind": "static"}, "layout.page_size: static has no pages"),
    "out of pages": ({"pages": [0]}, "layout.pages: out of pages: 1 of 4 columns, the request may need"),
    "negative overhang": ({"overhang": -1}, "overhang"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_block_table_is_one_line_before_any_forward(
    kind: str, capfd: pytest.CaptureFixture[str], folder: Path, forwards: list[str]
) -> None:
    fields, message = BAD[kind]
    code, out, err = run_command(capfd, "replay", save_case(folder, **fields))
    assert (code, out, forwards) == (2, "", [])
    assert re.fullmatch(r"specverify: [^\n]+\n", err)
    assert message in err


DECLINED: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "not declared": (["--backend", "plain_engine:plain"], {}, "plain declares no KV layout paged"),
    "a pool too small for a block": (
        [],
        {"page_size": 1, "pages": tuple(range(CASE.longest + 1))},
        f"out of pages: the request and its block may need {CASE.longest + len(TREE) + 1} pages of 1 columns, "
        f"the pool has {CASE.longest + 1}",
    ),
}


@pytest.mark.parametrize("kind", DECLINED)
def test_what_the_engine_cannot_do_is_declined_in_one_line_before_any_forward(
    kind: str, capfd: pytest.CaptureFixture[str], folder: Path, forwards: list[str]
) -> None:
    arguments, fields, message = DECLINED[kind]
    file = folder / "case.json"
    file.write_text(json.dumps(case_to_json(replace(CASE, layout=replace(CASE.layout, **fields)))))
    code, out, err = run_command(capfd, "replay", str(file), *arguments)
    assert (code, out.rstrip("\n"), forwards) == (3, f"UNJUDGED  the case is declined: {message}", [])
    assert err == ""


def test_the_good_case_runs(
    capfd: pytest.CaptureFixture[str], folder: Path, forwards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_this_process(monkeypatch)  # where its forwards are counted
    code, out, _ = run_command(capfd, "replay", save_case(folder))
    assert (code, out.split()[0]) == (0, "AGREE")
    assert forwards
    assert replace(CASE, layout=KvLayout()).longest == CASE.longest
