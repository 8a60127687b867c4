"""The work of the command `vocabulary`."""

from typing import Any

from specverify.checkpoints.opening import directory_of, open_checkpoint
from specverify.checkpoints.prompts import tokenizer_of
from specverify.training import vocabulary as vocabularies
from specverify.training.texts import read_texts


def make_vocabulary(model: str, sources: tuple[str, ...], size: int) -> dict[str, Any]:
    """The facts of the vocabulary of `size` tokens for the checkpoint `model`, its file included.

    Raises:
        UnusableInput, MissingInput: The checkpoint or a text cannot be used; the line says why.
    """
    directory, total = directory_of(model), open_checkpoint(model, understood=False).vocab_size
    tokenizer, texts = tokenizer_of(directory), read_texts(sources)
    counts = vocabularies.count_tokens(tokenizer(text).input_ids for text in texts.learned)
    held_out = vocabularies.count_tokens(tokenizer(text).input_ids for text in (*texts.watched, *texts.judged))
    vocabulary, file = vocabularies.load_or_build(counts, size, total)
    return {
        "file": str(file),
        "size": len(vocabulary.named),
        "total": total,
        "tokens": sum(counts.values()),
        "covered": vocabulary.covered,
        "held_out": vocabularies.share(vocabulary, held_out),
    }
