"""Ids that cases once had stay theirs: files written by every earlier version, with the id that it gave them.

Each line of the golden file was read by the first version that knew all its fields, which computed the same id. Never
write a line anew: a changed id is a changed meaning of every saved case. A younger field gets a line of its own.
"""

import importlib
import json
import pkgutil
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specverify import reference
from specverify.reference.architecture import Architecture, Checkpoint, Seeded
from specverify.reference.case import Case
from specverify.reference.case_json import case_from_json, case_to_json, short_json
from specverify.reference.draft import LanguageModel
from specverify.reference.files.json_types import plain
from specverify.reference.malformed import Malformed
from specverify.reference.tree import RankTree

LINES = (Path(__file__).parent / "golden" / "case_ids.jsonl").read_text(encoding="utf-8").splitlines()
SAVED: dict[str, dict[str, Any]] = {line["of"]: line["case"] for line in map(json.loads, LINES)}


def younger(word: type) -> list[Field[Any]]:
    """Fields of a dataclass that files leave out at their default."""
    return [field for field in fields(word) if field.metadata.get("omit_default")]


def words() -> Iterator[type]:
    """Every dataclass of `reference` that a case may hold; traces stand in no case."""
    for module in (module for module in pkgutil.iter_modules(reference.__path__) if module.name != "trace"):
        for word_type in vars(importlib.import_module(f"specverify.reference.{module.name}")).values():
            if (
                isinstance(word_type, type)
                and is_dataclass(word_type)
                and word_type.__module__ == f"specverify.reference.{module.name}"
            ):
                yield word_type


def below(word: Any) -> Iterator[Any]:
    """A word, and all words inside it."""
    yield word
    for field in fields(word):
        value = getattr(word, field.name)
        for part in value if isinstance(value, tuple) else (value,):
            if is_dataclass(part):
                yield from below(part)


def test_a_saved_case_reads_and_writes_as_it_was_saved_and_keeps_its_id() -> None:
    for name, content in SAVED.items():
        case = case_from_json(content)
        assert case.id == content["id"], name
        assert json.loads(json.dumps(case_to_json(case))) == content, name
    assert len({content["id"] for content in SAVED.values()}) == len(SAVED), "one id each"


def test_a_saved_case_keeps_its_id_without_its_defaults() -> None:
    for name, content in SAVED.items():
        case = case_from_json(content)
        short = json.loads(json.dumps(short_json(case)))
        assert case_from_json(short) == case, name
        assert (short["id"], short["schema"]) == (content["id"], content["schema"])
        assert "layout" not in short or short["layout"], name
    assert set(short_json(Case(Seeded(Architecture("llama", 16, 8, 8, 2, 1, 4, (0,)), 1), (3,)))) == {
        *("schema", "id", "model", "prompt")
    }


def test_every_younger_field_is_written_by_some_saved_case_and_left_out_by_others() -> None:
    saved_words = [word for content in SAVED.values() for word in below(case_from_json(content))]
    younger_fields = {(word, field.name) for word in words() for field in younger(word)}
    assert len(younger_fields) >= 32, "as many as were released"
    for word, name in sorted(younger_fields, key=str):
        default = next(field.default for field in younger(word) if field.name == name)
        at_default = {getattr(saved_word, name) == default for saved_word in saved_words if type(saved_word) is word}
        assert at_default == {True, False}, f"a saved case is missing for {word.__name__}.{name}"


def test_an_id_that_is_another_cases_is_refused() -> None:
    first, second = list(SAVED.values())[:2]
    with pytest.raises(Malformed, match=rf"^id: {second['id']} is not the digest of this case \({first['id']}\)"):
        case_from_json({**first, "id": second["id"]})


def test_where_a_checkpoint_lay_is_no_part_of_the_id() -> None:
    case = case_from_json(SAVED["checkpoint"])
    assert isinstance(case.model, Checkpoint)
    moved = replace(case.model, source="elsewhere")
    assert replace(case, model=moved).id == case.id
    assert replace(case, model=replace(moved, digest="sha256:" + "00" * 32)).id != case.id

    def drafted_by(model: Checkpoint) -> Case:
        return replace(case, draft=LanguageModel(model, RankTree((0, 0), (0, 0))))

    assert drafted_by(moved).id == drafted_by(case.model).id != case.id


def test_words_become_what_json_holds() -> None:
    value = {1: (2, np.int64(3)), "a": [{2.5: None}], "b": np.float32(0.5)}
    assert plain(value) == {"1": [2, 3], "a": [{"2.5": None}], "b": 0.5}
    assert json.loads(json.dumps(plain(value))) == plain(value)


def test_a_complaint_about_a_file_is_one_line_of_160_characters_at_most() -> None:
    content = SAVED["scripted"]
    for size in (1, *range(90, 105), 300):
        with pytest.raises(Malformed) as error:
            case_from_json({**content, "dtype": "x" * size})
        line, full_line = error.value.why, f"'{'x' * size}' is not one of ['float64', 'float32', 'bfloat16', 'float16']"
        assert line == (full_line if len(full_line) <= 160 else f"{full_line[:157]}...")
