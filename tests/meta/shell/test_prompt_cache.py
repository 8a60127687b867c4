"""Tokenised prompts are kept by the digest of whatever decides on the tokens, and a damaged file is made again."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specverify.backends.adapt.models import words_tokenizer
from specverify.checkpoints.prompt_cache import digest, load_or_encode

TEXTS = ["3 1 4", "1 5"]
IDS = [(3, 1, 4), (1, 5)]


class Encoder:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, texts: list[str]) -> list[tuple[int, ...]]:
        self.calls += 1
        return [tuple(map(int, text.split())) for text in texts]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    words_tokenizer([str(token) for token in range(8)]).save_pretrained(folder)
    return folder


def test_prompts_are_encoded_once(directory: Path, tmp_path: Path) -> None:
    encoder = Encoder()
    for _ in range(2):
        assert load_or_encode(TEXTS, directory, encoder, tmp_path / "kept") == IDS
    assert encoder.calls == 1
    assert load_or_encode(TEXTS[:1], directory, encoder, tmp_path / "kept") == IDS[:1]
    assert encoder.calls == 2


def test_another_tokenizer_is_another_digest(directory: Path) -> None:
    before = digest(TEXTS, directory)
    assert digest(TEXTS, directory) == before
    assert digest(TEXTS[::-1], directory) != before
    words_tokenizer([str(token) for token in range(9)]).save_pretrained(directory)
    assert digest(TEXTS, directory) != before


@pytest.mark.parametrize("content", ["", "[[3, 1, 4]", '[[3, 1, 4], ["x"]]', "[[3, 1, 4]]", "{}"])
def test_a_damaged_file_is_made_again(content: str, directory: Path, tmp_path: Path) -> None:
    encoder, folder = Encoder(), tmp_path / "kept"
    load_or_encode(TEXTS, directory, encoder, folder)
    (file,) = folder.iterdir()
    file.write_text(content)
    assert load_or_encode(TEXTS, directory, encoder, folder) == IDS
    assert encoder.calls == 2
    assert load_or_encode(TEXTS, directory, encoder, folder) == IDS
    assert encoder.calls == 2


def test_a_folder_that_takes_no_files_costs_no_run(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("a file in its place")
    assert load_or_encode(TEXTS, directory, Encoder(), tmp_path / "kept") == IDS


def test_writers_and_removers_at_once_see_whole_files_alone(directory: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"

    def work() -> bool:
        for _ in range(30):
            for file in folder.glob("*.json"):
                file.unlink(missing_ok=True)
            if load_or_encode(TEXTS, directory, Encoder(), folder) != IDS:
                return False
        return True

    with ThreadPoolExecutor(3) as pool:
        assert [future.result() for future in [pool.submit(work) for _ in range(3)]] == [True] * 3
    assert {file.suffix for file in folder.iterdir()} <= {".json"}, "no part of a file is left behind"
