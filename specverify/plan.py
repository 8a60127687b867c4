"""The plan of a `diff`: made once from the options, and sent to every worker."""

from dataclasses import dataclass, replace

from specverify.agenda import Agenda
from specverify.backends.adapters import SHIPPED_BACKENDS
from specverify.backends.shipped import ROWS
from specverify.isolation.backend_spec import BackendSpec
from specverify.isolation.limits import BUILT_IN_S, CHECKPOINT_S, START_S, Patience
from specverify.isolation.usable_cores import usable_cores
from specverify.properties.known import KnownFailure
from specverify.properties.reference_names import NUMPY
from specverify.reference.sampling import Sampling
from specverify.setup.environment import environment
from specverify.setup.given_grammar import GivenGrammar

DEFAULT_CASES = 500
"""Cases of a run if neither the user nor the backend's row says otherwise."""

DEFAULT_DTYPES = ("float32", "float64")
"""Working dtypes that a run names first; those of 16 bits follow where the backend declares them."""

DEVICES = {"cpu": "cpu-eager", "cuda": "cuda-eager", "npu": "ascend-eager"}
"""The backend that a device means where no backend is named."""

FOCI = ("distribution",)
"""The arguments of `--focus`: `distribution` asks every case for evidence on the law of sampled tokens."""

TRANSFORMERS = "transformers"
"""The argument of `--against` for plain transformers; other arguments are names of backends."""

SELFTEST_S = 900.0
"""Default wall time of a self-test, in seconds."""

EVERY_CAUSE = 10**9
"""The limit of distinct causes of a run that goes on: more than any run can have."""

VARIED_PROMPTS = 3
"""Prompts of a checkpoint that invariants vary where `--variants` says no other number: what leaks, is padded or is put
into another layout does not depend on the text, and the variants take three quarters of a prompt's time."""

SHRINK_S = 20.0
"""Seconds that a worker may spend on shrinking one failing case."""


@dataclass(frozen=True)
class Plan:
    """One run of `diff`.

    Attributes:
        backend: Name or `pkg.module:factory`.
        against: Backend in the oracle's place, TRANSFORMERS, or None for the NumPy oracle.
        reference: What computes the oracle's formulas, one of REFERENCES; NumPy certifies rows of any other one.
        model: Checkpoint directory, hub id or `builtin:NAME`; None draws built-in models.
        draft: Head directory, `builtin:NAME`, `ngram`, `model:DIR` or `scripted` for a checkpoint; None takes every
            draft that needs no files.
        prompts: Prompt file or `builtin:humaneval`; None draws token ids.
        invariants: Globs; empty selects all.
        cases: Cases to draw; with prompts, prompts to run.
        new_tokens: Tokens to generate per prompt.
        sampling: Sampling settings of prompts; greedy by default. Each case has a seed of its own.
        grammar: Language of every prompt's output; None for none. `sampling` holds it once its words are known.
        steps: Steps of each prompt that are judged, chosen by the seed; 0 for all.
        layers: The first layer of a checkpoint that is judged, on the engine's own inputs, and the one behind the last;
            None for the whole target.
        variants: Prompts on which invariants run variants of the request; the others are judged by their own runs. With
            `invariants`, every prompt is asked for all that they select.
        time_budget_s: Wall seconds after which no further case begins; 0 for none.
        open_ended: Whether that budget alone is to end the run, since nobody named a number of cases.
        dtypes: Working dtypes to draw from; empty for those that the backend declares (`drawn_dtypes`).
        seed: Seed of the whole run; each worker draws with a seed of its own (`drawing_seed`).
        jobs: Worker processes.
        fault: Catalogue fault to plant, or None.
        processors: Custom processors of the drawn cases, `pkg.module:function`.
        mode: `reference` runs eager attention in place of a backend's fused one, `performance` the fused one; None
            follows the environment's flags.
        draft_weights: Kind of quantised weights of `draft`, one of QUANTISED; empty for the weights as they are stored.
        draft_trees: File with the table of trees by batch size that `draft` fills; None for one tree.
        batch: Prompts that run side by side, in sessions with evictions and a fork; 0 runs each alone.
        concurrency: Numbers of prompts that an engine which batches by itself runs side by side; empty for each alone.
        layout: KV layout of every case, one of `specverify.reference.layout.KINDS`; None mixes them, or
            takes `branch` for a checkpoint.
        ranks: Ranks over which every case's target is sharded; 0 mixes the numbers that the backend declares, or
            takes one for a checkpoint.
        shrink_s: Seconds for shrinking a failing case.
        case_timeout_s: Time limit of one answer of the backend in seconds, or None for a measured, generous limit.
        start_timeout_s: Time limit for opening the backend, and the engine of a case, in seconds.
        memory: Bytes that the backend's process may hold, or None for most of the machine's memory.
        max_failures: Distinct causes after which no further case begins.
        focus: One of FOCI, or None for cases of every kind.
        recorded: Whether verdicts tell what each run did, for `--trace`.
        threads: Threads of a backend on the CPU; 0 for one on small models, and for what is faster on a checkpoint.
        agenda: The cases of a gate, in place of those that a search draws; None for a search.
    """

    backend: str = "cpu-eager"
    against: str | None = None
    reference: str = NUMPY
    model: str | None = None
    prompts: str | None = None
    invariants: tuple[str, ...] = ()
    cases: int = DEFAULT_CASES
    new_tokens: int = 64
    steps: int = 0
    layers: tuple[int, int] | None = None
    variants: int = VARIED_PROMPTS
    sampling: Sampling = Sampling()
    time_budget_s: float = 0.0
    open_ended: bool = False
    dtypes: tuple[str, ...] = DEFAULT_DTYPES
    seed: int = 0
    jobs: int = 1
    fault: str | None = None
    processors: tuple[str, ...] = ()
    layout: str | None = None
    ranks: int = 0
    mode: str | None = None
    shrink_s: float = SHRINK_S
    case_timeout_s: float | None = None
    start_timeout_s: float = START_S
    memory: int | None = None
    max_failures: int = 1
    focus: str | None = None
    draft: str | None = None
    draft_weights: str = ""
    draft_trees: str | None = None
    batch: int = 0
    concurrency: tuple[int, ...] = ()
    grammar: GivenGrammar | None = None
    recorded: bool = False
    agenda: Agenda | None = None
    threads: int = 0

    def varies(self, prompt: int) -> bool:
        """Whether variants of prompt number `prompt`, from 0, run."""
        return bool(self.invariants) or prompt < self.variants

    @property
    def known_failures(self) -> tuple[KnownFailure, ...]:
        """The failures that are known."""
        return () if self.agenda is None else self.agenda.known_failures

    @property
    def drawn_and_saved(self) -> int:
        """The number of cases that the run should judge; with prompts, the worker that makes them says how many."""
        return self.cases if self.agenda is None else self.agenda.num_cases(self.cases)

    @property
    def environment(self) -> dict[str, str]:
        """Versions and the machine, with seed, jobs and the planted fault: what tells two runs of a command apart."""
        planted = {"fault": self.fault} if self.fault else {}
        return {**environment(), "seed": str(self.seed), "jobs": str(self.jobs), **planted}

    @property
    def backend_spec(self) -> BackendSpec:
        """The backend to open; for small models with one torch thread, which is bit-stable and fastest."""
        threads = self.threads or (1 if self.model is None else 0)
        return BackendSpec(self.backend, self.fault, self.mode, threads=threads)

    @property
    def patience(self) -> Patience:
        """The time limit of an answer, which is longer for a checkpoint."""
        floor = BUILT_IN_S if self.model is None else CHECKPOINT_S
        return Patience(self.case_timeout_s, floor, self.start_timeout_s)

    def slice(self, worker: int) -> "Plan":
        """The plan of worker `worker`: its share of the cases, with a seed of its own."""
        if self.agenda is not None:
            agenda, seed = self.agenda.slice(worker, self.jobs), drawing_seed(self.seed, worker)
            return replace(self, agenda=agenda, seed=seed, jobs=1)
        # The first workers take one case more if the number does not divide.
        share = self.cases // self.jobs + (worker < self.cases % self.jobs)
        return replace(self, cases=share, seed=drawing_seed(self.seed, worker), jobs=1)


def drawing_seed(seed: int, worker: int = 0) -> int:
    """The seed of worker `worker` in a run with `--seed seed`; with `--jobs 1` there is only worker 0."""
    # Runs with neighbouring seeds share no worker's seed, up to 1000 workers.
    return seed * 1000 + worker


def default_dtypes(backend: str) -> tuple[str, ...]:
    """The dtypes that a run draws for a backend that we ship; empty for another one, which must be opened to know."""
    declared = {row.name: row.dtypes for row in ROWS}.get(backend)
    return () if declared is None else drawn_dtypes(declared)


def drawn_dtypes(declared: tuple[str, ...]) -> tuple[str, ...]:
    """All of the `declared` dtypes, those of DEFAULT_DTYPES first; `working_dtypes` says how often each is drawn."""
    first = tuple(dtype for dtype in DEFAULT_DTYPES if dtype in declared)
    return first + tuple(dtype for dtype in declared if dtype not in first)


def default_cases(backend: str) -> int:
    """The number of cases in the row of `backend` or of its adapter; DEFAULT_CASES for a backend that is not ours."""
    return {row.name: row.cases for row in SHIPPED_BACKENDS}.get(backend) or DEFAULT_CASES


def default_jobs(device: str) -> int:
    """Workers for a device: one on an accelerator, else one per usable core up to four."""
    return 1 if device != "cpu" else min(usable_cores(), 4)
