"""The draft vocabulary: the tokens that a text uses most, as a file of offsets.

`d2t` holds offsets: draft id d means target id d + d2t[d]. `t2d` is true for each target id that the draft can name.
Both say the same, so that a file in which `d2t` holds target ids is refused.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from specverify.checkpoints.opening import directory_of, open_checkpoint
from specverify.checkpoints.prompts import tokenizer_of
from specverify.reference.trace import Array
from specverify.reports.writing import write_whole
from specverify.setup.errors import UnusableInput
from specverify.training.texts import read_texts

FOLDER = Path(".specverify") / "vocabularies"
"""The folder of vocabularies, by digest."""


@dataclass(frozen=True)
class Vocabulary:
    """A draft vocabulary.

    Attributes:
        named: The target ids that the draft can name, ascending, int64 [size].
        total: The number of the target's ids.
        covered: The share of the counted tokens that are in the vocabulary.
    """

    named: Array
    total: int
    covered: float

    @property
    def offsets(self) -> Array:
        """`d2t`: target id less draft id, int64 [size]."""
        offsets: Array = self.named - np.arange(len(self.named))
        return offsets

    @property
    def mask(self) -> Array:
        """`t2d`: bool [total]."""
        return np.isin(np.arange(self.total), self.named)


def build(counts: Counter[int], size: int, total: int) -> Vocabulary:
    """The `size` most frequent tokens; ties and a rest without counts go to the lower id.

    Raises:
        UnusableInput: `size` is more than the target has.
    """
    if not 1 <= size <= total:
        raise UnusableInput(f"a draft vocabulary of {size} tokens: the target has {total}, and one is the least")
    if not counts:
        raise UnusableInput("the texts hold no token to build a vocabulary from")
    ranked = sorted(range(total), key=lambda token: (-counts[token], token))[:size]
    vocabulary = Vocabulary(np.array(sorted(ranked), dtype=np.int64), total, 0.0)
    return replace(vocabulary, covered=share(vocabulary, counts))


def count_tokens(texts: Iterable[Iterable[int]]) -> Counter[int]:
    """How often each token occurs."""
    return Counter(token for text in texts for token in text)


def share(vocabulary: Vocabulary, counts: Counter[int]) -> float:
    """The share of the counted tokens that are in the vocabulary; 0 where none was counted."""
    named = set(vocabulary.named.tolist())
    return sum(count for token, count in counts.items() if token in named) / max(sum(counts.values()), 1)


def digest(counts: Counter[int], size: int, total: int) -> str:
    """The SHA-256 of all that a vocabulary follows from."""
    content = json.dumps([size, total, sorted(counts.items())])
    return hashlib.sha256(content.encode()).hexdigest()


def load_or_build(counts: Counter[int], size: int, total: int, folder: Path = FOLDER) -> tuple[Vocabulary, Path]:
    """The vocabulary and its file, read where the file of this digest exists, otherwise built and written whole.

    Raises:
        UnusableInput: As `build` and `read`.
        Unwritable: The file cannot be written.
    """
    file = folder / f"{digest(counts, size, total)[:16]}.safetensors"
    if not file.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as why:
            raise UnusableInput(f"{folder}: {why.strerror}") from None
        write(file, build(counts, size, total))
    return read(file, total), file


def write(file: Path, vocabulary: Vocabulary) -> None:
    """Write a vocabulary: the tensors `d2t` and `t2d`, and the covered share in the header."""
    tensors = {"d2t": vocabulary.offsets, "t2d": vocabulary.mask}
    write_whole(file, save(tensors, {"covered": repr(vocabulary.covered), "format": "specverify-vocabulary-1"}))


def read(file: Path, total: int) -> Vocabulary:
    """The vocabulary in `file` for a target of `total` ids.

    Raises:
        UnusableInput: No such file, another target's, or `d2t` and `t2d` contradict each other.
    """
    try:
        with safe_open(file, "numpy") as content:
            offsets, mask = content.get_tensor("d2t"), content.get_tensor("t2d")
            covered = float((content.metadata() or {}).get("covered", "nan"))
    except (OSError, SafetensorError, ValueError) as why:
        line = " ".join(str(why).split())[:120]
        raise UnusableInput(f"{file}: no draft vocabulary ({line}); make one with `specverify vocabulary`") from None
    if mask.shape != (total,) or mask.dtype != np.bool_:
        raise UnusableInput(f"{file}: t2d is {mask.dtype} {list(mask.shape)}, and the target has {total} ids")
    named = np.flatnonzero(mask)
    if offsets.dtype != np.int64 or offsets.shape != named.shape:
        raise UnusableInput(f"{file}: d2t is {offsets.dtype} {list(offsets.shape)} for {len(named)} named ids")
    if not (offsets + np.arange(len(offsets)) == named).all():
        if (offsets == named).all():
            raise UnusableInput(f"{file}: d2t holds target ids, and offsets (target id less draft id) are meant")
        raise UnusableInput(f"{file}: d2t and t2d name different ids")
    return Vocabulary(named, total, covered)


def make_vocabulary(model: str, sources: tuple[str, ...], size: int) -> dict[str, Any]:
    """The facts of the vocabulary of `size` tokens for the checkpoint `model`, its file included.

    Raises:
        UnusableInput, MissingInput: The checkpoint or a text cannot be used; the line says why.
    """
    directory, total = directory_of(model), open_checkpoint(model, understood=False).vocab_size
    tokenizer, texts = tokenizer_of(directory), read_texts(sources)
    counts = count_tokens(tokenizer(text).input_ids for text in texts.learned)
    held_out = count_tokens(tokenizer(text).input_ids for text in (*texts.watched, *texts.judged))
    vocabulary, file = load_or_build(counts, size, total)
    return {
        "file": str(file),
        "size": len(vocabulary.named),
        "total": total,
        "tokens": sum(counts.values()),
        "covered": vocabulary.covered,
        "held_out": share(vocabulary, held_out),
    }
