"""`cpu-eager` and `cuda-eager`: the engine with its written-out attention, on one device."""

import torch

from backends.base import Declaration, Live, StageFailure, Unavailable, Unsupported
from backends.engine.composition import SEAMS
from backends.engine.models import DTYPES, Shelf
from backends.engine.sampling.rounds import Tables
from backends.engine.seams import Seams
from backends.engine.server import play, serve
from reference.case import Case
from reference.layout import COMMITS, KINDS
from reference.rules import RULES
from reference.trace import Array, Stage, Trace
from reference.world import Blocks, Given, World

__all__ = ["EagerBackend", "StageFailure", "open_cpu", "open_cuda"]


class EagerBackend:
    """The engine on `device`; `seams` is the engine as meant, unless a fault has been planted in it."""

    def __init__(self, name: str, device: str, seams: Seams = SEAMS) -> None:
        self.declaration = Declaration(
            name=name,
            device=torch.device(device).type,
            reveals=frozenset(Stage),
            dtypes=("float32", "float64", "bfloat16", "float16"),
            drafts=("scripted", "ngram", "model"),
            commits=COMMITS,
            layouts=tuple(KINDS),
            sessions=True,
            takes_tape=True,
            max_temperature=float("inf"),
            rules=tuple(RULES),
            processes=True,
            stops=("max_new_tokens", "eos", "stop_tokens", "stop_strings", "max_length"),
        )
        self.seams = seams
        self._shelf = Shelf(device)
        self._tables = Tables(device, lambda: self.seams.sampling)

    def run(self, case: Case) -> Trace:
        """Generate as the case says; see `backends.base.Backend.run`."""
        _refuse_dtype(case)
        return play(case, self._shelf, self.seams)

    def serve(self, case: Case) -> Live:
        """Play the case's session and wait for more; see `backends.base.Serving`."""
        _refuse_dtype(case)
        return serve(case, self._shelf, self.seams)

    def verify(self, given: Given, tape: Array) -> Blocks:
        """See `backends.base.Tabled`."""
        return self._tables.verify(given, tape)

    def rounds(self, world: World, tape: Array) -> Blocks:
        """See `backends.base.Tabled`."""
        return self._tables.rounds(world, tape)

    def samples(self, world: World, seeds: Array) -> Blocks:
        """See `backends.base.Tabled`."""
        return self._tables.samples(world, seeds)


def _refuse_dtype(case: Case) -> None:
    if case.dtype not in DTYPES:
        raise Unsupported(f"dtype {case.dtype}: this engine has {', '.join(DTYPES)}")


def open_cpu() -> EagerBackend:
    """Open `cpu-eager`."""
    return EagerBackend("cpu-eager", "cpu")


def open_cuda() -> EagerBackend:
    """Open `cuda-eager`.

    Raises:
        Unavailable: where torch sees no CUDA device.
    """
    if not torch.cuda.is_available():
        built = (
            "no CUDA device is visible" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"
        )
        raise Unavailable(f"cuda-eager needs an NVIDIA device: {built}")
    return EagerBackend("cuda-eager", "cuda")
