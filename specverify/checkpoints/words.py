"""The texts of a failure on a checkpoint, in the words of its tokenizer."""

from dataclasses import replace

from specverify.checkpoints.prompts import tokenizer_of
from specverify.properties.tally import Failure
from specverify.reference.architecture import Checkpoint
from specverify.setup.errors import UnusableInput


def with_words(failure: Failure) -> Failure:
    """The failure, its texts with words where the checkpoint has a tokenizer; other failures as they are."""
    model, texts = failure.verdict.case.model, failure.texts
    if texts is None or not isinstance(model, Checkpoint):
        return failure
    try:
        tokenizer = tokenizer_of(model.source)
    except UnusableInput:
        return failure  # a checkpoint without a tokenizer is judged by its ids, and shown by them
    rows = [texts.prompt, *([] if texts.must_be is None else [texts.must_be]), texts.observed]
    words = tuple(str(tokenizer.decode([token for token in row if 0 <= token < model.vocab_size])) for row in rows)
    return replace(failure, texts=replace(texts, words=words))
