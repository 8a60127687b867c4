"""The end tokens of a checkpoint are those that its files name, and a file that names something else is refused."""

import json
from pathlib import Path

import pytest

from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.files.generation_settings import end_tokens


def write_files(folder: Path, **files: object) -> Path:
    """The folder, with each of `files` as JSON."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, ()),
        ({"config": {"eos_token_id": 7}}, (7,)),
        ({"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": [9, 2, 9]}}, (2, 9)),
        ({"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": None}}, (7,)),
        ({"config": {"eos_token_id": 0}, "generation_config": {}}, (0,)),
    ],
)
def test_the_first_file_that_names_end_tokens_counts(tmp_path: Path, files: dict[str, object], ids: object) -> None:
    assert end_tokens(write_files(tmp_path, **files)) == ids


@pytest.mark.parametrize("named", [True, 1.5, "2", [1, None], {"id": 2}, [[3]]])
def test_what_is_no_token_id_is_refused_with_the_file(tmp_path: Path, named: object) -> None:
    with pytest.raises(UnreadableCheckpoint, match=r"config\.json: field eos_token_id is .*not a token id"):
        end_tokens(write_files(tmp_path, config={"eos_token_id": named}))


def test_a_file_that_is_no_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableCheckpoint, match="holds no JSON object"):
        end_tokens(write_files(tmp_path, generation_config=[1, 2]))
