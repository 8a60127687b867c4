"""The generation settings and end tokens that a checkpoint's own files state.

A setting that the file leaves out is neutral here, as in vLLM; transformers has defaults of its own for some of them.
"""

from dataclasses import dataclass
from pathlib import Path

from specverify.reference.files.fields import Fields, quote_value, read_json

FILE = "generation_config.json"

NEUTRAL_VALUES = {
    "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0, "num_beams": 1, "guidance_scale": 1.0, "top_h": 1.0,
}  # fmt: skip
"""Settings that no case can hold, each with its neutral value."""


@dataclass(frozen=True)
class GenerationSettings:
    """The stated settings; `temperature` is 0 where the file asks for greedy decoding."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float


def generation_settings(checkpoint: str | Path) -> GenerationSettings:
    """The settings of the checkpoint in this directory; greedy decoding unless `do_sample` is true.

    Raises:
        UnreadableCheckpoint: The file is missing or damaged, or asks for what no case can hold.
    """
    file = Path(checkpoint) / FILE
    fields = Fields(file, read_json(file), {})
    for name, neutral in NEUTRAL_VALUES.items():
        if fields.number(name, neutral) != neutral:
            raise fields.refuse(f"{name} is {fields.number(name)}, which no case can hold; remove it")
    penalty = float(fields.number("repetition_penalty", 1.0))
    if not fields.flag("do_sample"):
        return GenerationSettings(0.0, 0, 1.0, 0.0, penalty)
    return GenerationSettings(
        float(fields.number("temperature", 1.0)),
        fields.integer("top_k", 0),
        float(fields.number("top_p", 1.0)),
        float(fields.number("min_p", 0.0)),
        penalty,
    )


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
