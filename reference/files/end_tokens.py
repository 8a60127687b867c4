"""The end tokens that a checkpoint's own files name."""

from pathlib import Path

from specverify.reference.files.fields import Fields, quote_value, read_json

FILES = ("generation_config.json", "config.json")
"""The files that may name end tokens; the first that does so counts, as in transformers' `generate`."""


def end_tokens(checkpoint: str | Path) -> tuple[int, ...]:
    """The token ids that end a text of the checkpoint in this directory, ascending.

    Engines that load the directory end there by themselves.

    Raises:
        UnreadableCheckpoint: One of FILES is no JSON object, or its field eos_token_id holds neither one whole number
            nor a list of them.
    """
    for file in (Path(checkpoint) / name for name in FILES):
        if not file.is_file():
            continue
        fields = Fields(file, read_json(file), {})
        stated = fields.get("eos_token_id")
        if stated is None:
            continue
        ids = stated if isinstance(stated, list) else [stated]
        if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
            raise fields.refuse(
                f"field eos_token_id is {quote_value(stated)}, not a token id or a list of them; correct it"
            )
        return tuple(sorted(set(ids)))
    return ()
