"""The generation settings that a checkpoint's generation_config.json states.

A field that the file leaves out is neutral here, as in vLLM; transformers has defaults of its own for some of them.
"""

from dataclasses import dataclass
from pathlib import Path

from specverify.reference.files.fields import Fields, read_json

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
