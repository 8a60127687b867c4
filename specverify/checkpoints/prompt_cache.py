"""Tokenised prompts, kept by the digest of all that they follow from.

Processes that share a folder need no lock: a file is written whole under the name of its content's digest, so that two
writers of one name write the same.
"""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from specverify.reference.files.regular import read_whole
from specverify.reference.malformed import Malformed
from specverify.reports.writing import Unwritable, write_whole
from specverify.setup.environment import package_version
from specverify.setup.files import make_folder

FOLDER = Path(".specverify") / "prompts"
"""The folder of tokenised prompts, by digest."""

LARGEST = 1 << 30
"""The largest file that is read, in bytes."""

TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "*.model", "config.json")
"""Globs of the files in a checkpoint directory that decide on its tokens; config.json names the class."""

VERSIONS = ("transformers", "tokenizers")
"""The packages that tokenise."""

Prompts = list[tuple[int, ...]]


def digest(texts: list[str], directory: Path) -> str:
    """The SHA-256 of the texts, of the tokenizer's files, and of the versions that read them."""
    digest = hashlib.sha256(json.dumps([texts, [package_version(name) for name in VERSIONS]]).encode())
    files = sorted({file for glob in TOKENIZER_FILES for file in directory.glob(glob) if file.is_file()})
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def load_or_encode(
    texts: list[str], directory: Path, encode: Callable[[list[str]], Prompts], folder: Path = FOLDER
) -> Prompts:
    """The token ids of `texts`: read where the file of their digest is whole, otherwise encoded and written.

    Args:
        texts: The prompts.
        directory: The checkpoint directory with the tokenizer.
        encode: Makes the token ids where no file has them.
        folder: The folder of such files.
    """
    try:
        file = folder / f"{digest(texts, directory)[:32]}.json"
    except OSError:  # a file that cannot be read: the tokenizer says so in its own words, or does without
        return encode(texts)
    cached_prompts = _read(file, len(texts))
    if cached_prompts is not None:
        return cached_prompts
    prompts = encode(texts)
    with suppress(OSError, Unwritable):  # a place that takes no files costs the tokenising of the next run, no more
        make_folder(folder)
        write_whole(file, json.dumps(prompts).encode())
    return prompts


def _read(file: Path, count: int) -> Prompts | None:
    """The `count` prompts in a file; None where it is absent or damaged, since they can be made again."""
    try:
        content = json.loads(read_whole(file, LARGEST))
    except (OSError, Malformed, ValueError):
        return None
    is_whole = isinstance(content, list) and len(content) == count
    if not is_whole or not all(
        isinstance(prompt, list) and all(type(token) is int for token in prompt) for prompt in content
    ):
        return None
    return [tuple(prompt) for prompt in content]
