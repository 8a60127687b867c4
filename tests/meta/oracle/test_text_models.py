"""The text model inside a checkpoint of several modalities is read by itself, and says what the whole model says."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from specverify.backends.compositions import open_cpu
from specverify.backends.transformers_reference import wide
from specverify.properties.verdict.judge import judge
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.files.generation_settings import end_tokens
from specverify.reference.files.text_model import COMPOSITES
from specverify.reference.oracle.checkpoint import identify
from specverify.reference.oracle.configuration import read_sizes
from specverify.reference.oracle.model import PathByPath
from specverify.reference.oracle.parameters import load
from specverify.reference.sampling import Stops
from specverify.reference.tree import Tree
from specverify.setup.subjects import subject_of
from tests.checkpoints import BASE, DENSE_RECURRENT, IROPE, LATENT, LATENT_ROPE, RECURRENT, SCALED_ROPE, SHARING
from tests.corruption import BY_NAME, ORACLE
from tests.tiers import each

VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": ("gemma3", "gemma3_text", {"sliding_window": 6, "tie_word_embeddings": True}),
    "gemma4": ("gemma4", "gemma4_text", {**SHARING, "pad_token_id": 0}),
    "llama4": ("llama4", "llama4_text", IROPE),
    "mistral3": ("mistral3", "mistral", {"sliding_window": None}),
    "mistral3-scaled": ("mistral3", "ministral3", {"rope_parameters": SCALED_ROPE}),
    "qwen3.5": ("qwen3_5", "qwen3_5_text", DENSE_RECURRENT),
    "qwen3.5-moe": ("qwen3_5_moe", "qwen3_5_moe_text", RECURRENT),
    "kimi-k25": ("kimi_k25", "deepseek_v3", {**LATENT, "rope_parameters": LATENT_ROPE}),
}  # fmt: skip
"""The name of a model to its type, that of its text model, and what the text model has beside BASE."""

TOKENS = (1, 2, 3, 4, 9, 8, 7, 1, 0, 6, 3, 2)


def network_of(name: str) -> Any:
    """The whole model of transformers, in float64, with seeded weights."""
    kind, text_kind, fields = MODELS[name]
    text = {**BASE, **fields, "model_type": text_kind}
    vision = {**VISION, "model_type": "pixtral"} if kind == "mistral3" else VISION
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision)
    config.tie_word_embeddings = text["tie_word_embeddings"]
    torch.manual_seed(0)
    with wide():
        network = AutoModelForImageTextToText.from_config(config)
        draw = torch.Generator().manual_seed(1)
        for parameter in network.parameters():
            spread = 0.1 if parameter.ndim == 1 else 0.3
            noise = spread * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.copy_((parameter.ndim == 1) + noise)
    network.config.get_text_config()._experts_implementation = "eager"  # grouped products know no float64
    return network.eval()


def older_names(folder: Path) -> None:
    """Rename the tensors of a checkpoint as transformers 4 wrote them."""
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    renamed = {}
    for name, tensor in state.items():
        # transformers 5.23 writes the layers of Kimi's text model under the name of those of its tower.
        name = name.replace("language_model.model.blocks.", "language_model.model.layers.")
        if name.startswith("model.language_model."):
            name = f"language_model.model.{name.removeprefix('model.language_model.')}"
        renamed[f"language_model.{name}" if name == "lm_head.weight" else name.removeprefix("model.")] = tensor
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "older"),
    each([(name, older) for name in MODELS for older in (False, True) if older or name != "kimi-k25"], 2),
)
def test_the_text_model_says_what_the_whole_model_says(name: str, older: bool, tmp_path: Path) -> None:
    network = network_of(name)
    with wide():
        expected = network(torch.tensor([TOKENS]), use_cache=False).logits[0].numpy()
    network.save_pretrained(tmp_path)
    if older:
        older_names(tmp_path)
    model = identify(tmp_path)
    parameters = load(model, "float64")
    logits = parameters.logits(PathByPath(parameters).states(TOKENS)[-1])
    assert np.abs(logits - expected).max() / np.abs(expected).max() < 1e-6  # tables of towers of float32 stay
    tree = Tree((0, 0, 0, 1), (TOKENS[-1], 3, 5, 7))
    case = Case(model, TOKENS, Scripted((tree,)), stops=Stops(4), dtype="float32")
    verdict = judge(case, (BY_NAME["attention.context-exact"],), ORACLE, subject_of(open_cpu()))
    assert verdict.outcomes["attention.context-exact"] == "checked"


def test_every_composite_that_is_read_is_tried() -> None:
    assert {kind for kind, _, _ in MODELS.values()} == set(COMPOSITES)


def write_config(folder: Path, **content: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(content))
    return folder / "config.json"


def test_sizes_and_end_tokens_stand_in_the_text_config(tmp_path: Path) -> None:
    text = {"vocab_size": 77, "max_position_embeddings": 99, "eos_token_id": 5}
    assert read_sizes(write_config(tmp_path, model_type="qwen3_5", text_config=text)) == (77, 99)
    assert end_tokens(tmp_path) == (5,)


def test_a_field_that_is_stated_twice_and_differently_is_refused(tmp_path: Path) -> None:
    network_of("gemma3").save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content["tie_word_embeddings"], content["text_config"]["tie_word_embeddings"] = True, False
    write_config(tmp_path, **content)
    with pytest.raises(UnreadableCheckpoint, match="tie_word_embeddings is True, and False in text_config"):
        identify(tmp_path)
