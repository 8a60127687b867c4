"""The dialogues of a file, as token ids."""

import json
from pathlib import Path
from typing import Any

from specverify.checkpoints.opening import directory_of
from specverify.checkpoints.prompts import LARGEST_PROMPTS, tokenizer_of
from specverify.reference.files.regular import read_whole
from specverify.reference.malformed import Malformed
from specverify.setup.errors import UnusableInput

Tokens = tuple[int, ...]


def dialogues_of(source: str, model: str, most: int) -> list[list[Tokens]]:
    """Token ids of the turns of the first `most` dialogues of a file.

    Each line of the file is an object with `turns`, a list of texts. The target answers each of them; the next one is
    appended to its answer as it stands, so that a file may hold the marks of a chat template.

    Raises:
        UnusableInput: The file cannot be read, or a line is no dialogue.
    """
    tokenizer = tokenizer_of(directory_of(model))
    dialogues = []
    for where, texts in _texts(source)[:most]:
        turns = [tuple(tokenizer(text, add_special_tokens=place == 0).input_ids) for place, text in enumerate(texts)]
        if not all(turns):
            raise UnusableInput(f"--dialogues {where}: turn {turns.index(()) + 1} holds no token")
        dialogues.append(turns)
    return dialogues


def _texts(source: str) -> list[tuple[str, list[str]]]:
    """The place and the turns of every dialogue."""
    try:
        text = read_whole(Path(source), LARGEST_PROMPTS).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError, Malformed) as why:
        reason = f"not UTF-8 at byte {why.start}" if isinstance(why, UnicodeDecodeError) else str(why)
        raise UnusableInput(f"--dialogues {source}: {getattr(why, 'strerror', None) or reason}") from None
    lines = [(f"{source}:{number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UnusableInput(f"--dialogues {source}: holds no dialogue")
    return [(where, _turns(_read_json(line, where), where)) for where, line in lines]


def _read_json(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as why:
        raise UnusableInput(f"--dialogues {where}: not JSON ({str(why)[:160]})") from None


def _turns(content: Any, where: str) -> list[str]:
    turns = content.get("turns") if isinstance(content, dict) else None
    if not isinstance(turns, list) or not turns:
        raise UnusableInput(f"--dialogues {where}: no object with `turns`, a list of texts")
    for number, text in enumerate(turns, 1):
        if not isinstance(text, str) or not text or any("\ud800" <= letter <= "\udfff" for letter in text):
            raise UnusableInput(f"--dialogues {where}: turn {number} is no text")
    return turns
