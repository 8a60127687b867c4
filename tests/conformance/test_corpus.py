"""The corpus: the smallest case of each planted fault, and cases for lines of the engine that few drawn cases reach."""

import json
from pathlib import Path

import pytest

from specverify.backends import faults
from specverify.backends.base import Unavailable
from specverify.properties.invariants import ALL
from specverify.properties.verdict.judge import judge
from specverify.pytest_plugin import BackendUnderTest
from specverify.reference.case_json import short_json
from specverify.reference.oracle.decoder import Oracle
from specverify.reports import bundle
from specverify.reports.writing import flat_json
from specverify.setup.subjects import open_planted, subject_of
from tests.tiers import each, gated

CORPUS = sorted((Path(__file__).parent.parent / "corpus").glob("*.json"))

CASES = sorted((Path(__file__).parent.parent / "corpus" / "cases").glob("*.json"))
"""Named by what they exercise; `tests/meta/faults/test_corpus_cases.py` says which errors each one shows."""


@pytest.mark.parametrize("file", each([*CORPUS, *CASES], 3), ids=lambda file: file.stem)
def test_clean_backend_passes(backend: BackendUnderTest, file: Path) -> None:
    backend.check(bundle.load(file).case)


QUICK = gated(CORPUS, lambda index: bundle.load(CORPUS[index]).backend != "triton-interpreted")
"""An interpreted kernel takes ten seconds for a case."""


@pytest.mark.parametrize("file", QUICK, ids=lambda file: file.stem)
def test_faulty_engine_fails_where_it_was_planted(file: Path) -> None:
    saved = bundle.load(file)
    assert saved.fault is not None
    assert saved.backend is not None
    try:
        subject = subject_of(open_planted(saved.backend, saved.fault))
    except Unavailable as why:
        pytest.skip(str(why))
    # Variants run a case again in another form: those of the finding's own invariant are enough.
    invariants = [invariant for invariant in ALL if invariant.every == 1 or invariant.name == saved.invariant]
    verdict = judge(saved.case, invariants, Oracle(), subject)
    assert not verdict.internal
    assert verdict.first is not None
    assert verdict.first.stage is saved.stage is faults.fault_named(saved.fault).stage


def test_a_file_is_as_bundle_save_writes_it() -> None:
    for file in sorted((Path(__file__).parent.parent / "corpus").rglob("*.json")):
        content = json.loads(file.read_text())
        assert content["case"] == json.loads(json.dumps(short_json(bundle.load(file).case))), file.name
        assert flat_json(content) == file.read_text(), file.name


def test_a_case_is_kept_with_the_backend_in_which_its_fault_is_planted() -> None:
    backends = {file.stem: bundle.load(file).backend for file in CORPUS}
    assert backends == {name: faults.fault_named(name).on for name in backends}


def test_every_fault_has_its_smallest_case() -> None:
    assert {file.stem for file in CORPUS} == {fault.name for fault in faults.ALL}
