"""The models of a case in the forms that other engines eat.

A model becomes an instance of its transformers class, or a Hugging Face directory with a small tokenizer.
"""

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from specverify.backends.base import Unsupported
from specverify.backends.engine.model.built_in import built_in
from specverify.backends.engine.model.models import from_disk
from specverify.reference.architecture import Checkpoint, Model, Seeded
from specverify.reference.files.fields import read_json
from specverify.reference.files.generation_settings import FILE as GENERATION_SETTINGS
from specverify.reference.spelling import Spelling, byte_letters

OPEN_MODELS = 256
"""Models that stay open; drawn cases name about as many."""

END = "</s>"
"""The text of the token that ends a text, in a tokenizer of bytes."""

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""The fields of generation_config.json that change no law: they name tokens."""


@lru_cache(maxsize=OPEN_MODELS)
def transformers_model(model: Model, dtype: str, role: str = "target") -> Any:
    """The model as an instance of its transformers class, in evaluation mode on the CPU.

    It is plain transformers, with the attention that transformers chooses. The same object is returned each time for
    one role, so that an engine which changes it must work on a copy; a target and its draft are two objects. Of the
    checkpoint's generation settings it keeps the special tokens alone: a case states all that decides its tokens.

    Raises:
        Unsupported: transformers cannot have such a model.
    """
    network = built_in(model, dtype) if isinstance(model, Seeded) else from_disk(model, dtype)
    network.generation_config = _special_tokens(network.generation_config)
    return network.eval().requires_grad_(False)


def _special_tokens(settings: Any) -> Any:
    """Generation settings of transformers that say the special tokens of `settings`, and nothing else."""
    from transformers import GenerationConfig

    return GenerationConfig(**{name: getattr(settings, name, None) for name in SPECIAL_TOKENS})


def save_checkpoint(model: Model, dtype: str, folder: Path, spelling: Spelling | None = None) -> Path:
    """Write the model into `folder`: config.json, safetensors, and a tokenizer of `spelling`.

    Without a spelling, token n of the tokenizer is the text `n`; it splits at blanks, so that the ids 3 1 4 are the
    text "3 1 4" and no text merges two tokens.

    Raises:
        Unsupported: transformers cannot have such a model.
        OSError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    network = transformers_model(model, dtype)
    with without_progress_bars():
        network.save_pretrained(folder)
    if spelling is None:
        tokenizer = words_tokenizer([str(token) for token in range(model.vocab_size)])
    else:
        tokenizer = bytes_tokenizer(spelling)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Inside the `with`, transformers shows no progress bars; afterwards it shows them as before."""
    from transformers.utils import logging

    were_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_shown:
            logging.enable_progress_bar()


def open_network(checkpoint: str | Path) -> Any:
    """The model of a checkpoint directory as transformers' class, in float32 and evaluation mode on the CPU.

    Raises:
        Unsupported: transformers cannot open the directory.
    """
    network = from_disk(Checkpoint(str(checkpoint), "", 0, 0), "float32")
    return network.eval().requires_grad_(False)


def words_tokenizer(texts: Sequence[str]) -> Any:
    """A tokenizer of transformers in which token n is the word `texts[n]`; words are apart by blanks.

    It has no special tokens, so that an engine which insists on text adds none and leaves none out.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({text: token for token, text in enumerate(texts)}, unk_token=texts[0]))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def bytes_tokenizer(spelling: Spelling) -> Any:
    """A tokenizer of transformers in which token n has the bytes of word n, in the letters of byte-level BPE.

    A text is cut into the fewest tokens. The end of a text is the one special token.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import Unigram
    from transformers import PreTrainedTokenizerFast

    letters = {byte: letter for letter, byte in byte_letters().items()}
    pieces = ["".join(letters[byte] for byte in bytes.fromhex(word)) for word in spelling.words]
    pieces[spelling.end] = END
    tokenizer = Tokenizer(Unigram([(piece, -1.0) for piece in pieces], unk_id=spelling.end))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


@lru_cache(maxsize=OPEN_MODELS)
def checkpoint_of(model: Model, dtype: str, spelling: Spelling | None = None) -> Path:
    """A directory with the model, written once for this process and removed when the process ends.

    A built-in model has a tokenizer of `spelling` there, or one of numbers; a checkpoint keeps its own.

    A checkpoint's own directory is returned as it is, unless its generation_config.json says more than special tokens:
    an engine that loads the directory would follow it, and a case states all that decides its tokens. Such a directory
    is returned as links to its files, beside a generation_config.json of the special tokens alone.

    Raises:
        Unsupported: The model is a draft with other rows than the directory has.
        OSError: The links cannot be made.
        UnreadableCheckpoint: generation_config.json is damaged.
    """
    if not isinstance(model, Checkpoint):
        return save_checkpoint(model, dtype, new_folder(), spelling)
    if model.stored_rows:
        raise Unsupported(f"a draft of {model.stored_rows} stored rows beside a target of {model.vocab_size}")
    settings_file = Path(model.source) / GENERATION_SETTINGS
    if not settings_file.is_file():
        return Path(model.source)
    settings = read_json(settings_file)
    special_tokens = {name: settings[name] for name in SPECIAL_TOKENS if name in settings}
    if settings.keys() <= {*special_tokens, "transformers_version", "_from_model_config"}:
        return Path(model.source)
    folder = new_folder()
    for file in Path(model.source).resolve().iterdir():
        if file.name != GENERATION_SETTINGS:
            (folder / file.name).symlink_to(file)
    (folder / GENERATION_SETTINGS).write_text(json.dumps(special_tokens))
    return folder


@lru_cache(maxsize=OPEN_MODELS)
def exported(save: Callable[[str | Path, Path], Path], checkpoint: str | Path) -> Path:
    """The file that an exporter writes for a checkpoint: once for this process, and removed when the process ends."""
    return save(checkpoint, new_folder() / "export")


def new_folder() -> Path:
    """A new folder that is removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="specverify-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
