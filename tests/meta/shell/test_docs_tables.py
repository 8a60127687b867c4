"""What hand-written pages list is what the program has, and the files on them are judged."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from specverify.adapters.init_command import KINDS
from specverify.backends.adapt.blackbox import PARAMETERS
from specverify.backends.adapt.component import CONTRACTS
from specverify.backends.registry import open_backend
from specverify.cli import main
from specverify.properties.invariants import ALL
from specverify.properties.verdict.judge import judge
from specverify.reference.case import Case
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.family import FAMILIES
from specverify.reference.sampling import Stops
from specverify.setup.subjects import subject_of
from tests.measure.documents.pages import ROOT, blocks
from tests.models import LLAMA


def page(name: str) -> str:
    """The text of a page below docs."""
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def saved_block(name: str, file: str) -> str:
    """The block of a page whose note saves it as `file`."""
    (text,) = [block.text for block in blocks(page(name)) if block.note == f"save {file}"]
    return text


def test_the_engine_that_shows_its_steps_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened by name, it agrees where it says what it emits."""
    (tmp_path / "engine_of_a_page.py").write_text(saved_block("how_to/stages.md", "my_engine.py"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    case = Case(LLAMA, (3, 1, 4), stops=Stops(4))
    verdict = judge(case, ALL, Oracle(), subject_of(open_backend("engine_of_a_page:MyEngine")))
    assert verdict.findings == ()
    assert {verdict.outcomes[f"lossless.{name}"] for name in ("completes", "greedy-match")} == {"checked"}
    assert verdict.outcomes["cache.commit-equivalence"] == "unobserved"


TRACED = {
    "structure": ("structure.parent-range", "structure.depth-consistent", "structure.positions-are-depth"),
    "walk": ("acceptance.greedy-walk", "acceptance.path-in-tree", "acceptance.support"),
    "blocks": ("lossless.stops", "draft.fidelity"),
    "stops": ("lossless.stops",),
    "accounting": ("lossless.accounting",),
}
"""The words of the page's sentence on `trace check`, and the invariants that each means on its example."""


def test_the_trace_of_the_tutorial_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It agrees, is compared by all that the sentence beside it names, and differs where its path is another."""
    objects = re.sub(
        r"\n +", " ", saved_block("tutorials/trace.md", "run.jsonl")
    )  # the page breaks one object into lines
    file = tmp_path / "run.jsonl"
    printed = {}
    for text, code in ((objects, 0), (objects.replace('"path": [0, 1]', '"path": [0, 2]'), 1)):
        file.write_text(text)
        with pytest.raises(SystemExit) as ended:
            main(["trace", "check", str(file), "--verbose"])
        assert ended.value.code == code
        printed[code] = capsys.readouterr().out
    assert f"{file}:2: run 0, step 0, emitted.tokens" in printed[1]
    compared = printed[0].split("not asked")[0]
    text = page("tutorials/trace.md")
    sentence = text[text.index("judges such a file without the engine:") :].split(", and with")[0]
    for word, names in TRACED.items():
        assert word in sentence
        assert [name for name in names if name not in compared] == [], word


def test_the_lines_for_a_new_project_name_what_is_there() -> None:
    (block,) = [block.text for block in blocks(page("how_to/install.md")) if "mkdir my_gate" in block.text]
    words = block.split()
    assert "blackbox" in words
    assert set(re.findall(r"or ([\w, ]+); and a test", block)[0].split(", ")) | {"blackbox"} == set(KINDS)
    assert find_spec(words[words.index("--pyargs") + 1]) is not None


def test_the_tutorial_names_every_parameter_of_a_black_box() -> None:
    table = page("tutorials/black_box.md").split("| parameter | what it is given |")[1].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", table)) - {"random"} == set(PARAMETERS)


def test_the_tutorial_names_every_argument_of_every_component() -> None:
    table = page("tutorials/kernel.md").split("| kind | what it may be given | judged first by |")[1].split("\n\n")[0]
    rows = [row for line in table.splitlines() if (row := re.findall(r"`([\w.*-]+)`", line))]
    assert {row[0]: row[1:-1] for row in rows} == {kind: list(contract.offers) for kind, contract in CONTRACTS.items()}
    assert all(row[-1] in CONTRACTS[row[0]].judged_by for row in rows)


def test_the_tutorial_names_the_families_that_the_oracle_reads() -> None:
    (named,) = re.findall(r"config\.json and safetensors;\s+(.*?)\);", page("tutorials/checkpoint.md"), re.DOTALL)
    words = {word.lower().replace("openpangu-embedded", "pangu") for word in named.split(",")}
    read = {family.name for family in FAMILIES.values() if family.model_types}
    assert {re.sub("[^a-z0-9]", "", name) for name in words} == {name.replace("_", "") for name in read}
