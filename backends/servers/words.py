"""Token ids and texts, for servers that take or give text.

A text stands for token ids only where the tokenizer brings the same ids back.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from specverify.backends.base import Unavailable, Unsupported
from specverify.backends.servers.web import WrongAnswer

CACHED_TOKENIZERS = 4
"""Checkpoints whose tokenizers stay open."""


@lru_cache(maxsize=CACHED_TOKENIZERS)
def tokenizer(checkpoint: str) -> Any:
    """The tokenizer of a checkpoint directory.

    Raises:
        Unavailable: The directory holds none that can be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False, local_files_only=True)
    except Exception as why:  # the tokenizer library raises types of its own, and plain Exception
        line = " ".join(str(why).split())[:160]
        raise Unavailable(f"{checkpoint}: no tokenizer, which a server of texts needs ({line})") from None


def text_of(prompt: Sequence[int], checkpoint: str) -> str:
    """The text whose token ids are `prompt`.

    Raises:
        Unsupported: There is no such text.
    """
    text = _text_of(prompt, checkpoint)
    if text is None:
        raise Unsupported("the server takes texts, and no text stands for this prompt's token ids")
    return text


def _text_of(prompt: Sequence[int], checkpoint: str) -> str | None:
    """The text whose token ids are `prompt`, or None."""
    words = tokenizer(checkpoint)
    # Special tokens are added by the tokenizer itself, or stand in the text.
    texts = (words.decode(list(prompt), skip_special_tokens=skip) for skip in (True, False))
    return next((text for text in texts if words(text).input_ids == list(prompt)), None)


def ids_of_text(text: str, after: Sequence[int], checkpoint: str, counts: Sequence[int]) -> tuple[int, ...]:
    """The token ids of a generated text that follows the prompt `after`.

    Raises:
        WrongAnswer: The text's ids are not the generated ids: their number is none of `counts`, the server's
            own, or a token of the text merges with one of the prompt.
    """
    words = tokenizer(checkpoint)
    prompt = _text_of(after, checkpoint)
    if prompt is None:  # no text stands for the prompt, so that its last token merges with none
        ids = tuple(int(token_id) for token_id in words(text, add_special_tokens=False).input_ids)
    else:
        # Some tokenizers drop blanks between tokens: one may stand between prompt and text, or not.
        id_lists = [words(prompt + gap + text).input_ids for gap in ("", " ")]
        continuations = [candidate[len(after) :] for candidate in id_lists if candidate[: len(after)] == list(after)]
        if not continuations:
            raise WrongAnswer("answers a text whose first token merges with the prompt's last: ask for ids")
        ids = tuple(
            int(token_id)
            for token_id in next(
                (continuation for continuation in continuations if len(continuation) in counts), continuations[0]
            )
        )
    if not counts:
        raise WrongAnswer("answers a text and tells neither tokens nor their number: its tokens cannot be known")
    if len(ids) not in counts:
        raise WrongAnswer(
            f"answers a text of {len(ids)} tokens by the checkpoint's tokenizer and of {counts[-1]} by its own count: "
            "tokens merge as text, so that they cannot be judged"
        )
    return ids


def ids_of_pieces(pieces: Sequence[str], checkpoint: str) -> tuple[int, ...] | None:
    """The token ids whose texts the server lists, or None where a text does not stand for one token."""
    words = tokenizer(checkpoint)
    ids_by_text = _token_ids_by_text(checkpoint)
    token_ids = []
    for piece in pieces:
        number = piece.removeprefix("token_id:")
        if number != piece and number.isdigit():
            token_ids.append(int(number))
            continue
        ids = ids_by_text.get(piece) or ([words.get_vocab()[piece]] if piece in words.get_vocab() else [])
        if len(ids) != 1:
            return None
        token_ids.append(ids[0])
    return tuple(token_ids)


@lru_cache(maxsize=CACHED_TOKENIZERS)
def _token_ids_by_text(checkpoint: str) -> dict[str, list[int]]:
    """For each text, the token ids that alone decode to it."""
    words = tokenizer(checkpoint)
    ids_by_text: dict[str, list[int]] = {}
    for token in range(len(words)):
        ids_by_text.setdefault(words.decode([token]), []).append(token)
    return ids_by_text
