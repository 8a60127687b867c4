"""The folder of a trained head: the published layout, and the state of its run.

`config.json` and `model.safetensors` are the head. The folder `training` holds the state of the run (safetensors, with
its numbers as JSON in the header, so that both are one file) and the curve (JSON lines). Every file is written whole.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from specverify.reports.writing import write_whole
from specverify.setup.errors import UnusableInput
from specverify.training.heads.base import TrainedHead

CONFIG, WEIGHTS, RUN = "config.json", "model.safetensors", "training"


@dataclass(frozen=True)
class RunState:
    """The state of a run: tensors by name, and numbers by name."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


class HeadFolder:
    """The folder of the head that a run trains.

    Args:
        folder: The folder; it is made if it does not exist.
        digest: The digest of all that the head follows from, its minutes apart.

    Raises:
        UnusableInput: The folder holds another head, or other files.
    """

    def __init__(self, folder: Path, digest: str) -> None:
        self.folder = folder
        self.digest = digest
        self.state = folder / RUN / "state.safetensors"
        self.curve = folder / RUN / "curve.jsonl"
        about = folder / RUN / "about.json"
        try:
            if folder.exists() and any(folder.iterdir()):
                held_digest = json.loads(about.read_text(encoding="utf-8"))["digest"] if about.exists() else None
                if held_digest != digest:
                    what = "another head, or one of other options" if (folder / WEIGHTS).exists() else "other files"
                    raise UnusableInput(f"--out {folder}: holds {what}; name another folder")
            (folder / RUN).mkdir(parents=True, exist_ok=True)
            write_whole(about, json.dumps({"digest": digest, "format": "specverify-run-1"}).encode())
        except (OSError, ValueError, KeyError, TypeError) as why:
            if isinstance(why, UnusableInput):
                raise
            raise UnusableInput(f"--out {folder}: {' '.join(str(why).split())[:120]}") from None

    def publish(self, head: TrainedHead, target: dict[str, Any]) -> None:
        """Write the head in the published layout; the weights last, so that they never lack their configuration."""
        config = {**head.config(target), "specverify_training": self.digest}
        write_whole(self.folder / CONFIG, (json.dumps(config, indent=2) + "\n").encode())
        tensors = {name: tensor.contiguous().cpu() for name, tensor in head.published_tensors().items()}
        write_whole(self.folder / WEIGHTS, save(tensors, {"format": "pt"}))

    def published_tensors(self) -> dict[str, Tensor] | None:
        """The tensors of the head in the folder, or None if none was written."""
        if not (self.folder / WEIGHTS).exists():
            return None
        return _tensors(self.folder / WEIGHTS)[0]

    def save_state(self, saved: RunState) -> None:
        """Write the state of the run, in one file, whole."""
        write_whole(self.state, save(saved.tensors, {"facts": json.dumps(saved.facts)}))

    def load_state(self) -> RunState | None:
        """The state of the run, or None if none was written."""
        if not self.state.exists():
            return None
        tensors, header = _tensors(self.state)
        return RunState(tensors, json.loads(header["facts"]))

    def add_curve_line(self, line: dict[str, Any]) -> None:
        """Add a line to the curve."""
        with self.curve.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def curve_lines(self) -> list[dict[str, Any]]:
        """The lines of the curve; a last line that a kill cut off is left out."""
        if not self.curve.exists():
            return []
        lines = self.curve.read_text(encoding="utf-8").split("\n")[:-1]
        return [json.loads(line) for line in lines if line.endswith("}")]


def _tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(file, "pt") as content:
            # Copies: the file may be replaced while they are in use.
            return {name: content.get_tensor(name).clone() for name in content.keys()}, content.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as why:
        raise UnusableInput(f"{file}: {' '.join(str(why).split())[:120]}; delete it, or name another folder") from None


def optimiser_tensors(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The moments of an optimiser, by number of the parameter and name."""
    state = optimiser.state_dict()["state"]
    return {
        f"moment.{parameter}.{name}": moment for parameter, moments in state.items() for name, moment in moments.items()
    }


def restore_optimiser(optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Give an optimiser the moments of `optimiser_tensors`."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, moment in tensors.items():
        if key.startswith("moment."):
            _, parameter, name = key.split(".")
            state.setdefault(int(parameter), {})[name] = moment
    optimiser.load_state_dict({**optimiser.state_dict(), "state": state})
