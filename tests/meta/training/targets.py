"""A tiny target with a tokenizer of numbers, prompts for it, and plans of a training on it."""

import json
import random
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from specverify.backends.adapt.models import save_checkpoint
from specverify.properties.strategies.models import GALLERY
from specverify.reference.architecture import Seeded
from specverify.training.plan import TrainingPlan

MODEL = Seeded(GALLERY[7], 0)
"""A llama of three layers with 101 tokens."""


LAYERS = 0.2
"""The gain of the target's layers: with little of it the next token follows from the last one, and can be learned."""


def make_folder(folder: Path) -> Path:
    """A folder with the target in `model` and with prompts in `prompts.jsonl`."""
    save_checkpoint(MODEL, "float32", folder / "model")
    file = folder / "model" / "model.safetensors"
    weights = load_file(file)
    quiet = ("o_proj.weight", "down_proj.weight")
    save_file(
        {name: weight * LAYERS if name.endswith(quiet) else weight for name, weight in weights.items()},
        file,
        {"format": "pt"},
    )
    draw = random.Random(0)
    prompts = [" ".join(str(draw.randrange(MODEL.vocab_size)) for _ in range(6)) for _ in range(40)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return folder


def plan(folder: Path, kind: str, out: Path, **settings: Any) -> TrainingPlan:
    """A plan of a few steps on the target in `folder`; the states of each kind are cached beside it."""
    defaults = {"minutes": 60.0, "cache": folder / f"cache-{kind}", "generated": 20, "vocabulary": 80, "most_steps": 24}
    texts = (str(folder / "prompts.jsonl"),)
    return TrainingPlan(kind, str(folder / "model"), texts, out=out, **{**defaults, "rate": 3e-3, **settings})
