"""A case whose grammar cannot be used is refused by `replay` in one line, with exit code 2."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from specverify.cli import main
from specverify.reference.case_json import case_to_json
from specverify.reference.grammar import Grammar
from specverify.reports import bundle
from tests.cases import CORPUS

CASE = bundle.load(CORPUS / "grammar-mask-of-parent.json").case


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", "(a", "sampling.grammar.text: the group is not closed"),
        ("regex", "\u20ac", "sampling.grammar: no token of the vocabulary begins a text of the language"),
        ("json_schema", '{"type": "string"}', "llguidance does not; add a pattern"),
    ],
    ids=["does not compile", "no byte fallback", "libraries differ"],
)
def test_a_grammar_that_cannot_be_used(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str, text: str, message: str
) -> None:
    assert CASE.sampling.grammar is not None
    grammar = Grammar(kind, text, CASE.sampling.grammar.words)
    case = replace(CASE, sampling=replace(CASE.sampling, grammar=grammar))
    (tmp_path / "case.json").write_text(json.dumps(case_to_json(case)))
    with pytest.raises(SystemExit) as end:
        main(["replay", str(tmp_path / "case.json")])
    line = capfd.readouterr().err.strip()
    assert end.value.code == 2
    assert "\n" not in line
    assert message in line
