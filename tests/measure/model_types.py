"""Whether plain transformers, as the reference, judges each model type that transformers knows: tiny models, tried."""

import json
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from specverify.backends.base import Unsupported
from specverify.campaign.against import TransformersOracle
from specverify.commands.families import TYPES_FILE
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.oracle.checkpoint import identify
from specverify.reference.sampling import Stops
from specverify.reference.tree import Tree
from tests.tiny_models import tiny_config

LARGEST = 30_000_000
"""Most weights of a tiny model."""

TREE = Tree((0, 0, 0, 1), (3, 5, 7, 5))


def save_tiny_model(kind: str, folder: Path) -> bool:
    """Write a tiny checkpoint of the model type; False where its class admits no such sizes."""
    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = tiny_config(kind)
            with torch.device("meta"):
                weights = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
            if weights > LARGEST:
                return False
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        except Exception:  # classes refuse sizes in many ways
            return False
    return True


def answer(folder: Path) -> str:
    """Why plain transformers is no reference for the checkpoint in `folder`; empty where it judges it.

    Any other exception than those of a refusal is an error of ours.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            oracle, model = TransformersOracle(), identify(folder, understood=False)
            case = Case(model, (1, 2, 3, 4, 5, 6, 7, 3), Scripted((TREE,)), stops=Stops(3), dtype="float32")
            oracle.model(model, "float32").kv((0, 0))
            oracle(case)
            oracle.amplification(case, (1, 2, 3), TREE)
        except (Unsupported, UnreadableCheckpoint) as refusal:
            return reason(str(refusal).replace(str(folder), "DIR"))
        with suppress(Unsupported):  # only heads read the states of layers
            oracle.model(model, "float32").states((1, 2, 3))
            oracle.model(model, "float32").node_states((1, 2, 3), TREE)
    return ""


REASONS: tuple[tuple[str, str], ...] = (
    ("call attention through", "its layers do not call attention through transformers' attention interface, once each"),
    ("layers of kind", "it has layers of another kind than attention over tokens and the known recurrent states"),
    ("the mask that transformers makes", "its mask is not causal"),
    ("own forward in float64 fails", "transformers' own forward of a tiny model in float64 fails"),
    ("has dtype", "it stores whole numbers among its weights"),
)
"""Words of a refusal, and the reason in short, as the end of a sentence."""


def reason(line: str) -> str:
    """The short reason of a line of refusal."""
    return next((short for words, short in REASONS if words in line), line)


def try_every_type(report: Callable[[str], None]) -> None:
    """Write the answers for every model type into TYPES_FILE."""
    answers: dict[str, str | None] = {}  # None for a type of which no tiny model was made
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        with tempfile.TemporaryDirectory() as name:
            is_saved = save_tiny_model(kind, Path(name))
            answers[kind] = answer(Path(name)) if is_saved else None
        report(f"{kind}: {answers[kind]}")
    content = {"transformers": transformers.__version__, "types": answers}
    TYPES_FILE.write_text(json.dumps(content, indent=1) + "\n")
