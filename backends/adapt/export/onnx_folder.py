"""The exporter to ONNX Runtime GenAI, by that engine's own model builder.

The engine demands a token that ends a text, and a case may let every token of the model be an ordinary one. The graph
therefore scores one token more, which is never probable, and that one ends a text.
"""

import contextlib
import io
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from specverify.backends.adapt.models import open_network
from specverify.backends.base import Unsupported

FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}
"""The `model_type` values of config.json that can be written."""

NEVER = -1e30
"""The logit of the token that is no token of the model."""


def save_onnx(checkpoint: str | Path, folder: Path) -> Path:
    """Write the model of a checkpoint directory into `folder`: model.onnx in float32, and genai_config.json.

    Token V, behind the V tokens of the model, ends a text; its logit is NEVER. The packages `onnxruntime-genai`, `onnx`
    and `onnx-ir` must be installed.

    Raises:
        Unsupported: The builder would write another model: it passes over sliding windows and over stretched rotary
            embeddings, and it has other formulas for other families.
        OSError: The folder cannot be written.
    """
    network = open_network(checkpoint)
    _check(network.config)
    vocabulary = int(network.config.vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="specverify-") as copy:
        source = Path(copy) / "checkpoint"
        shutil.copytree(checkpoint, source)
        content = json.loads((source / "config.json").read_text())
        content["eos_token_id"] = vocabulary
        (source / "config.json").write_text(json.dumps(content))
        _build(source, folder, Path(copy) / "cache")
    _add_token(folder / "model.onnx", vocabulary)
    path = folder / "genai_config.json"
    settings: dict[str, Any] = json.loads(path.read_text())
    settings["model"].update(vocab_size=vocabulary + 1, eos_token_id=[vocabulary], pad_token_id=vocabulary)
    path.write_text(json.dumps(settings))
    return folder


def _check(config: Any) -> None:
    """Raise Unsupported for a model that the builder does not write as it is."""
    if config.model_type not in FAMILIES:
        raise Unsupported(f"save_onnx writes {', '.join(sorted(FAMILIES))}, and this model is {config.model_type}")
    kind = config.rope_parameters["rope_type"]
    if kind != "default":
        raise Unsupported(f"save_onnx cannot write the rotary embedding {kind}")
    kinds = getattr(config, "layer_types", None) or ()
    if "sliding_attention" in kinds or (config.model_type == "mistral" and config.sliding_window):
        raise Unsupported("save_onnx cannot write layers with a sliding window")
    if getattr(config, "score_cap", 0.0):
        raise Unsupported("save_onnx cannot write a soft cap of attention")


def _build(source: Path, folder: Path, cache: Path) -> None:
    """Run the builder, which prints its progress."""
    from onnxruntime_genai.models.builder import create_model, parse_extra_options

    arguments = ("", str(source), str(folder), "fp32", "cpu", str(cache))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        create_model(*arguments, **parse_extra_options(*arguments, ["hf_remote=false"]))


def _add_token(file: Path, vocabulary: int) -> None:
    """Give the graph a further column of logits, of NEVER, and its weights a place in the same file."""
    import onnx

    model = onnx.load(file)
    graph = model.graph
    for node in graph.node:
        node.output[:] = ["model_logits" if name == "logits" else name for name in node.output]
    # Pad takes the columns before and behind each of the axes [batch, tokens, vocabulary].
    graph.initializer.append(onnx.numpy_helper.from_array(np.array([0, 0, 0, 0, 0, 1], np.int64), "one_column"))
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(NEVER, np.float32), "never"))
    graph.node.append(onnx.helper.make_node("Pad", ["model_logits", "one_column", "never"], ["logits"]))
    logits_output = next(output for output in graph.output if output.name == "logits")
    logits_output.type.tensor_type.shape.dim[-1].dim_value = vocabulary + 1
    onnx.save(model, file)
    file.with_name(f"{file.name}.data").unlink(missing_ok=True)
