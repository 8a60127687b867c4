"""The measure of unseen faults: a patch of the engine is found by default draws, and no other patch is taken."""

import difflib
import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from specverify.reference.case import Case
from specverify.reference.case_json import case_to_json
from specverify.reference.draft import Scripted
from specverify.reference.tree import Tree
from specverify.reports import bundle
from specverify.setup.errors import MissingInput
from tests.measure import holdout
from tests.measure.__main__ import main
from tests.measure.child import run_child
from tests.measure.holdout import ROOT, apply_patch, check_patch, copy_checkout
from tests.models import LLAMA

CASE = Case(LLAMA, (1, 2, 3), Scripted((Tree((0, 0, 1), (3, 5, 6)),)))
LOWERING = "backends/engine/lower_tree.py"


def patch_of(folder: Path, file: str, old: str, new: str) -> Path:
    """A git diff that replaces `old`, which stands once in `file`, by `new`."""
    before = (ROOT / file).read_text()
    assert before.count(old) == 1
    changed = before.replace(old, new).splitlines(keepends=True)
    lines = difflib.unified_diff(before.splitlines(keepends=True), changed, f"a/{file}", f"b/{file}")
    patch = folder / "unseen.diff"
    patch.write_text("".join(lines))
    return patch


@pytest.mark.slow
def test_a_fault_in_a_patch_is_found_by_default_draws(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    patch = patch_of(
        tmp_path, LOWERING, "        position=position + depth,\n", "        position=position + row_numbers,\n"
    )
    file = tmp_path / "figures.json"
    with pytest.raises(SystemExit) as ended:
        main(["holdout", str(patch), "--cases", "60", "--seed", "3", "--json", str(file)])
    assert ended.value.code == 0, capfd.readouterr()
    figures = json.loads(file.read_text())
    (row,) = figures["rows"]
    assert (figures["found"], figures["hunts"], row["outcome"], row["patch"]) == (1, 1, "found", "unseen")
    assert 1 <= row["case"] <= 60
    assert row["stage"] == "lowered"
    assert row["shrunk"]


def test_the_checkout_stays_as_it_is(tmp_path: Path) -> None:
    before = (ROOT / LOWERING).read_text()
    copy = tmp_path / "copy"
    copy_checkout(copy)
    apply_patch(patch_of(tmp_path, LOWERING, "        depth=depth,\n", "        depth=depth * 1,\n"), copy)
    assert "depth * 1" in (copy / LOWERING).read_text()
    assert (ROOT / LOWERING).read_text() == before
    assert (copy / "specverify" / "backends").is_symlink()


REFUSED = {
    "reference/oracle/decoder.py": "a fault is planted in the engine alone",
    "backends/faults/__init__.py": "a fault is planted in the engine alone",
    "properties/tally.py": "a fault is planted in the engine alone",
    "tests/cases.py": "a fault is planted in the engine alone",
    "": "it names no file",
}


@pytest.mark.parametrize("file", REFUSED)
def test_a_patch_of_anything_but_the_engine_is_refused(file: str, tmp_path: Path) -> None:
    patch = tmp_path / "other.diff"
    patch.write_text(f"--- a/{file}\n+++ b/{file}\n@@ -1 +1 @@\n-x\n+y\n" if file else "words\n")
    with pytest.raises(MissingInput, match=REFUSED[file]):
        check_patch(patch)


def test_a_patch_that_does_not_apply_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    patch = tmp_path / "stale.diff"
    patch.write_text(f"--- a/{LOWERING}\n+++ b/{LOWERING}\n@@ -1 +1 @@\n-no such line\n+another\n")
    with pytest.raises(SystemExit) as ended:
        main(["holdout", str(patch)])
    assert ended.value.code == 3
    printed = capfd.readouterr()
    assert "does not apply" in printed.err
    assert printed.err.count("\n") == 1


def test_a_run_that_could_not_judge_is_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdout, "copy_checkout", lambda copy: copy.mkdir())
    monkeypatch.setattr(holdout, "apply_patch", lambda patch, copy: None)
    patch = patch_of(tmp_path, LOWERING, "        depth=depth,\n", "        depth=depth * 1,\n")
    figures = holdout.measure([patch], "no-such-backend", 5, [0])
    assert figures["unfinished"]
    assert (figures["found"], figures["rows"][0]["outcome"]) == (0, "not judged")
    assert "no backend is called" in figures["rows"][0]["shrunk"]


@pytest.mark.parametrize(("agrees", "outcome"), [(True, "found"), (False, "not judged")])
def test_a_finding_that_the_checkout_has_without_the_patch_is_no_find(
    agrees: bool, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = {"case": case_to_json(CASE), "invariant": "cache.isolation", "stage": "committed"}

    def run(command: list[str], folder: Path, environment: dict[str, str]) -> CompletedProcess[str]:
        if "replay" in command:
            assert environment["PYTHONPATH"] == str(ROOT)
            assert bundle.load(command[command.index("replay") + 1]).case == CASE
            return CompletedProcess(command, 0 if agrees else 1, "", "")
        assert environment["PYTHONPATH"] == str(tmp_path / "copy")
        (folder / "run.json").write_text(json.dumps({"cases": 4, "findings": [finding]}))
        return CompletedProcess(command, 1, "", "")

    monkeypatch.setattr(holdout, "run_child", run)
    hunted = holdout.hunt("unseen", tmp_path / "copy", "cpu-eager", 9, 0)
    assert (hunted.outcome, hunted.case) == (outcome, 4 if agrees else 0)
    assert ("without the patch" in hunted.shrunk) != agrees


@pytest.mark.parametrize(("fault", "agrees"), [((), True), (("--fault", "tree-masked-as-chain"), False)])
def test_the_case_of_a_finding_runs_on_the_checkout(
    fault: tuple[str, ...], agrees: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdout, "run_child", lambda command, *rest: run_child([*command, *fault], *rest))
    assert holdout.agrees_unchanged(CASE, "cpu-eager", tmp_path) == agrees


def test_an_interrupted_measure_keeps_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdout, "copy_checkout", lambda copy: copy.mkdir())
    monkeypatch.setattr(holdout, "apply_patch", lambda patch, copy: None)
    patch = patch_of(tmp_path, LOWERING, "        depth=depth,\n", "        depth=depth * 1,\n")

    def hunt(name: str, copy: Path, backend: str, cases: int, seed: int) -> holdout.Hunted:
        if seed:
            raise KeyboardInterrupt
        return holdout.Hunted(name, seed, "found", 7, "cache.isolation", "committed", "a case", 1.0)

    monkeypatch.setattr(holdout, "hunt", hunt)
    lines: list[str] = []
    figures = holdout.measure([patch], "cpu-eager", 9, [0, 1], lines.append)
    assert lines == [f"{patch.stem}, seed 0: found at case 7 by cache.isolation"]
    assert (figures["hunts"], figures["found"], figures["unfinished"]) == (1, 1, True)
