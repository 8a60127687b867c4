"""Bundles: what is saved loads again, and no damaged file gives anything but one clear line."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specverify.properties.tally import Failure
from specverify.properties.verdict.finding import Finding, Verdict
from specverify.reference.architecture import Architecture, Checkpoint, Seeded
from specverify.reference.case import Case
from specverify.reference.case_json import case_from_json, case_to_json
from specverify.reference.draft import LanguageModel, Ngram, Scripted
from specverify.reference.layout import COMMITS, KINDS, POISONS, SYNCS, KvLayout
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Stage
from specverify.reference.tree import RankTree, Tree
from specverify.reports.bundle import Bundle, Unreadable, bundle_content, load, save
from specverify.reports.writing import Unwritable

MODEL = Seeded(Architecture("llama", 16, 8, 8, 2, 1, 4, (0, 5)), 1)
SHAPE = RankTree((0, 0, 0, 1), (0, 0, 1, 0))
CASES = {
    "scripted": Case(MODEL, (3, 5), Scripted((Tree((0, 2, 0), (5, 7, 8)),)), KvLayout("fast", 8, 2), stops=Stops(3)),
    "ngram": Case(MODEL, (3, 5, 3), Ngram(SHAPE), sampling=Sampling(0.75, (0.5, 0.25)), dtype="bfloat16"),
    "model": Case(MODEL, (3,), LanguageModel(MODEL, SHAPE, (0, 2, 5, 9)), stops=Stops(4, (1,), (2, 3))),
    "checkpoint": Case(Checkpoint("/models/x", "sha256:" + "a" * 64, 100, 200), (3, 99)),
}
FINDING = Finding("cache.isolation", Stage.COMMITTED, 1, {"layer": 0, "slot": 3}, 1.5, float("nan"), float("inf"))


def failure(case: Case) -> Failure:
    verdict = Verdict(case, "cpu-eager", {FINDING.invariant: "failed"}, (FINDING,))
    return Failure(verdict, FINDING, case.id, fault="stale-row", backend="pkg.engine:make", model="/models/x")


def test_every_word_that_a_layout_knows_is_read_back() -> None:
    base = CASES["scripted"]
    for name, words in {"kind": KINDS, "commit": COMMITS, "poison": POISONS, "draft_sync": SYNCS}.items():
        for word in words:
            pages = 4 if word in KINDS and KINDS[word].pages else 0
            case = replace(base, layout=KvLayout(**{"page_size": pages, name: word}))  # type: ignore[arg-type]
            assert case_from_json(case_to_json(case)) == case


@pytest.mark.parametrize("kind", CASES)
def test_a_bundle_loads_as_it_was_saved(kind: str, tmp_path: Path) -> None:
    case = CASES[kind]
    path = save(tmp_path / "new" / "folder", failure(case), {"python": "3.11"})
    assert path == tmp_path / "new" / "folder" / f"{case.id}.json"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    expected = Bundle(case, "cache.isolation", Stage.COMMITTED, "stale-row", "pkg.engine:make", "/models/x")
    assert load(path) == expected
    content = json.loads(path.read_text())
    assert content["finding"]["measure"] == "Infinity"
    assert content["environment"] == {"python": "3.11"}


@pytest.mark.parametrize("kind", CASES)
def test_a_bare_case_file_loads(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "case.json"
    file.write_text("\ufeff" + json.dumps(case_to_json(CASES[kind])), encoding="utf-8")
    assert load(file) == Bundle(CASES[kind])


def test_a_bundle_needs_nothing_but_its_case(tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    file.write_text(json.dumps({"bundle": 1, "case": case_to_json(CASES["scripted"])}))
    assert load(file) == Bundle(CASES["scripted"])


def complaint(path: Path) -> str:
    with pytest.raises(Unreadable) as caught:
        load(path)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 700
    assert caught.value.path == str(path)
    return caught.value.why


GOOD = json.dumps(bundle_content(failure(CASES["scripted"]), {"python": "3.11"}))


def edit_bundle(change: Callable[[dict[str, Any]], object]) -> str:
    content = json.loads(GOOD)
    change(content)
    return json.dumps(content)


TEXTS = {
    "empty": ("  \n", "empty"),
    "not json": ("{'a': 1}", "not JSON: Expecting property name enclosed in double quotes at line 1, column 2"),
    "cut off": (GOOD[: len(GOOD) // 2], "ends too early, cut off?"),
    "cut off after a comma": (GOOD[: GOOD.index(",") + 1], "ends too early, cut off?"),
    "two documents": (GOOD + "\n" + GOOD, "Extra data at line 2, column 1"),
    "deep": ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
    "deep inside": (
        edit_bundle(lambda b: b.update(environment=0))[:-2] + "[" * 90_000 + "]" * 90_000 + "}",
        "too deeply",
    ),
    "nan": (GOOD.replace('"temperature": 0.0', '"temperature": NaN'), "NaN is not a number"),
    "infinite": (GOOD.replace('"temperature": 0.0', '"temperature": 1e999'), "the number 1e999 is too large"),
    "huge": (GOOD.replace('"seed": 1', '"seed": 1' + "0" * 6000), "6001 digits is too large"),
    "twice": (GOOD.replace('"fault"', '"backend": null, "fault"'), "'backend' appears twice"),
    "list": ("[]", "a case is a JSON object, not list"),
    "number": ("3", "a case is a JSON object, not int"),
    "newer": (edit_bundle(lambda b: b.update(bundle=2)), "bundle: version 2 is newer than the 1 known here: update"),
    "true version": (edit_bundle(lambda b: b.update(bundle=True)), "bundle: the version"),
    "no version": (edit_bundle(lambda b: b.pop("bundle")), "bundle: the version"),
    "newer case": (edit_bundle(lambda b: b["case"].update(schema=9)), "case.schema: version 9 is newer"),
    "no case": (edit_bundle(lambda b: b.pop("case")), "case: missing"),
    "unknown field": (edit_bundle(lambda b: b.update(extra=1)), "extra: no field of a bundle"),
    "unknown in finding": (edit_bundle(lambda b: b["finding"].update(extra=1)), "finding.extra: no field of a finding"),
    "stage": (edit_bundle(lambda b: b["finding"].update(stage="late")), "finding.stage: 'late' is none of drafted,"),
    "step": (edit_bundle(lambda b: b["finding"].update(step="1")), "finding.step: the index"),
    "where": (edit_bundle(lambda b: b["finding"].update(where=[])), "finding.where: coordinates"),
    "invariant": (edit_bundle(lambda b: b["finding"].update(invariant=3)), "finding.invariant: a string or null"),
    "finding": (edit_bundle(lambda b: b.update(finding="x")), "finding: an object or null"),
    "fault": (edit_bundle(lambda b: b.update(fault=["x"])), "fault: a string or null stands here, not list"),
    "model": (edit_bundle(lambda b: b.update(model={})), "model: a string or null"),
    "backend": (edit_bundle(lambda b: b.update(backend=1)), "backend: a string or null"),
    "dtype": (edit_bundle(lambda b: b.update(dtype="float16")), "dtype: 'float16' is not the 'float32' of the case"),
    "environment": (edit_bundle(lambda b: b.update(environment={"python": 3})), "environment: names and versions"),
    "circle": (
        edit_bundle(lambda b: b["case"]["draft"]["trees"][0].update(parent=[0, 2, 1])),
        "case.draft.trees[0].parent[1]",
    ),
    "edited": (edit_bundle(lambda b: b["case"].update(steps=5)), "case.id: "),
    "decimal": (
        GOOD.replace('"parent": [0, 2', '"parent": [0, 2.0'),
        ".trees[0].parent[1]: 2.0 is not of type 'integer'",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_damaged_file_gets_one_clear_line(name: str, tmp_path: Path) -> None:
    text, expected = TEXTS[name]
    assert text != GOOD
    file = tmp_path / "b.json"
    file.write_text(text)
    assert expected in complaint(file)


def test_what_is_no_file_gets_one_clear_line(tmp_path: Path) -> None:
    assert "no such file" in complaint(tmp_path / "missing\n.json")
    assert "a directory" in complaint(tmp_path)
    (tmp_path / "bytes.json").write_bytes(b'{"a": "\xff\xfe"}')
    assert "not UTF-8 text (byte 7)" in complaint(tmp_path / "bytes.json")
    assert "null" in complaint(tmp_path / "a\0b")
    (tmp_path / "plain").write_text("x")
    assert "Not a directory" in complaint(tmp_path / "plain" / "b.json")


def spots(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside a JSON value."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [spot for key, value in items for spot in [(*path, key), *spots(value, (*path, key))]]


ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    -(2**70),
    0.5,
    2.0,
    1e308,
    "",
    "x",
    "\ud800",
    [],
    [0],
    [[]],
    {},
    {"kind": "x"},
)


def mutate_file(kind: str, draw: random.Random) -> bytes:
    content = (
        bundle_content(failure(CASES[kind]), {"python": "3.11"}) if draw.random() < 0.6 else case_to_json(CASES[kind])
    )
    content = json.loads(json.dumps(content))
    how = draw.choice(["flip", "cut", "remove", "rename", "retype", "insert", "splice"])
    if how in ("remove", "rename", "retype"):
        for _ in range(draw.choice([1, 1, 2, 4])):
            *path, last = draw.choice(spots(content))
            holder = content
            for key in path:
                holder = holder[key]
            if how == "retype":
                holder[last] = draw.choice(ODD)
            elif how == "rename" and isinstance(holder, dict):
                holder[f"{last}_"] = holder.pop(last)
            else:
                del holder[last]
        if draw.random() < 0.5:
            redigest(content.get("case", content))
        return json.dumps(content).encode()
    raw = bytearray(json.dumps(content, indent=draw.choice([None, 1])).encode())
    offset = draw.randrange(len(raw))
    if how == "flip":
        for _ in range(draw.choice([1, 2, 8])):
            raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    elif how == "cut":
        del raw[offset:]
    elif how == "insert":
        raw[offset:offset] = draw.choice([b"[", b"}", b"\x00", b"1e999", b"-", b'"', b"NaN", b"\xff", b"9" * 30, b"/*"])
    else:
        source_offset = draw.randrange(len(raw))
        raw[offset : offset + 20] = raw[source_offset : source_offset + 20]
    return bytes(raw)


def redigest(content: Any) -> None:
    """Give an edited case the id that it would have, so that the checks behind the digest are reached."""
    from specverify.reference import case_json

    try:
        content["id"] = case_json.build_case(content).id
    except Exception:
        return


@pytest.mark.parametrize("kind", CASES)
def test_no_mutation_gives_anything_but_a_case_or_one_line(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    draw = random.Random(f"mutations of {kind}")
    messages: set[str] = set()
    accepted = 0
    for _ in range(400):
        file.write_bytes(mutate_file(kind, draw))
        try:
            case = load(file).case
        except Unreadable as error:
            messages.add(str(error))
            continue
        accepted += 1
        assert isinstance(case, Case)
        assert case_from_json(json.loads(json.dumps(case_to_json(case)))) == case
        assert all(type(token) is int for token in case.prompt)
    assert all(message.isprintable() and len(message) < 700 for message in messages)
    assert len(messages) > 60
    assert 0 < accepted < 200


def test_save_leaves_no_part_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted_failure = failure(CASES["scripted"])
    path = save(tmp_path, scripted_failure, {})
    before = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(Unwritable, match=r"cannot write .*: No space left on device; choose another place"):
        save(tmp_path, scripted_failure, {"python": "3.12"})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    (tmp_path / "file").write_text("")
    with pytest.raises(Unwritable):
        save(tmp_path / "file" / "folder", scripted_failure, {})
