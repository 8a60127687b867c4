"""The plan of a training run: its options, checked before any work."""

from dataclasses import dataclass
from pathlib import Path

from specverify.setup.errors import UnusableInput

KINDS = ("eagle3", "eagle1", "medusa")
"""The kinds of head that can be trained."""

CACHE = Path(".specverify") / "training"
"""The folder of cached states, one folder in it for each digest."""


@dataclass(frozen=True)
class TrainingPlan:
    """The options of a run.

    Attributes:
        kind: One of KINDS.
        model: The target: a directory, a hub id or `builtin:NAME`.
        texts: Built-in texts, files or folders; see `specverify.training.texts`.
        minutes: The minutes of the run's clock, the data included; a resumed run goes on with what is left.
        out: The folder of the trained head.
        cache: The folder of cached states; by default one under CACHE that bears the digest.
        generated: The tokens by which the target continues each prompt; 0 learns from the texts as they are.
        vocabulary: The size of the draft vocabulary (EAGLE-3).
        vocabulary_file: A file of the command `vocabulary` in place of a vocabulary built from the run's own data.
        steps: The steps of the training-time test (EAGLE-3).
        heads: The number of Medusa heads.
        layers: The number of decoder layers (EAGLE-1, EAGLE-3).
        experts: The number of experts of each layer, 0 for a gated block in their place (EAGLE-1).
        experts_per_token: The number of experts that a row goes through, beside the shared one (EAGLE-1).
        irope: Whether every second layer has no rotary embedding (EAGLE-1).
        online: Whether the target runs beside the head, so that its states are made while the head learns from them;
            else they are cached on disk before.
        data_share: The share of the minutes after which no more text is generated.
        texts_per_batch: The texts of one optimiser step, of each process.
        rate: The highest learning rate.
        device: `cpu` or `cuda`.
        threads: The threads of torch; 0 for all cores.
        most_steps: The steps of the optimiser after which the training ends, if its minutes have not; 0 for any number.
            The learning rate then follows the steps.
        measures: The points of the curve after the first; 0 for up to 8, as many as take less than a twelfth of the
            time.
        seed: The seed of the order of texts and of weights that begin at random.
    """

    kind: str
    model: str
    texts: tuple[str, ...]
    minutes: float
    out: Path
    cache: Path | None = None
    generated: int = 96
    vocabulary: int = 4096
    vocabulary_file: Path | None = None
    steps: int = 3
    heads: int = 4
    layers: int = 1
    experts: int = 0
    experts_per_token: int = 1
    irope: bool = False
    online: bool = False
    data_share: float = 0.35
    texts_per_batch: int = 4
    rate: float = 1e-3
    device: str = "cpu"
    threads: int = 0
    most_steps: int = 0
    measures: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        # `not a > b` instead of `a <= b`: NaN is refused too.
        if not self.minutes > 0:
            raise UnusableInput(f"--minutes {self.minutes:g}: a training needs more than 0 minutes")
        if not self.texts:
            raise UnusableInput("--text: name at least one text")
        if self.kind not in KINDS:
            raise UnusableInput(f"{self.kind}: no such kind of head (known: {', '.join(KINDS)})")
        self._check_head()

    def _check_head(self) -> None:
        """Refuse parts that the kind of head has not, or that contradict each other."""
        if self.layers > 1 and self.kind == "medusa":
            raise UnusableInput(f"--layers {self.layers}: Medusa heads have no decoder layers; eagle1 and eagle3 have")
        for option, is_asked in (("--experts", self.experts > 0), ("--irope", self.irope)):
            if is_asked and self.kind != "eagle1":
                raise UnusableInput(f"{option}: {self.kind} heads are trained without it; eagle1 has it")
        if self.irope and self.layers < 2:
            raise UnusableInput("--irope: leaves out every second layer's rotary embedding; ask for --layers 2 or 3")
        if self.experts_per_token > max(1, self.experts):
            raise UnusableInput(f"--experts-per-token {self.experts_per_token}: the head has {self.experts} experts")

    @property
    def unrotated(self) -> tuple[int, ...]:
        """The layers of the head without rotary embedding."""
        return tuple(range(1, self.layers, 2)) if self.irope else ()

    @property
    def seconds(self) -> float:
        """The seconds of the run."""
        return 60 * self.minutes
