"""Plan: what a `diff` is to do, decided once from the options and handed whole to every worker."""

import os
from dataclasses import dataclass, replace

from backends.shipped import ROWS
from reference.sampling import Sampling
from specverify.isolation.limits import BUILT_IN_S, CHECKPOINT_S, Patience
from specverify.isolation.wanted import Wanted

DEFAULT_CASES = 500
DEFAULT_DTYPES = ("float32", "float64")

TRANSFORMERS = "transformers"
"""The argument of `--against` that means plain transformers; others are names of backends."""

SELFTEST_S = 570.0
"""Wall seconds of a self-test."""

SHRINK_S = 20.0
"""Seconds a worker may spend on making one failing case smaller."""


@dataclass(frozen=True)
class Plan:
    """One run of `diff`.

    Attributes:
        backend: Name or `pkg.module:factory`.
        against: Backend that takes the oracle's place, TRANSFORMERS, or None for the NumPy oracle.
        model: Checkpoint directory, hub id or `builtin:NAME`; None draws built-in models.
        prompts: Prompt file or `builtin:humaneval`; None draws token ids.
        invariants: Globs; empty selects all.
        cases: Cases to draw; with prompts, prompts to run.
        new_tokens: Tokens to generate per prompt.
        sampling: How prompts are sampled; greedy unless asked for. Each case has a seed of its own.
        time_budget_s: Wall seconds after which no further case begins; 0 for none.
        dtypes: Working dtypes to draw from.
        seed: Of the whole run; worker w draws with seed + w.
        jobs: Worker processes.
        fault: Catalogue fault to plant, or None.
        processors: Custom processors that the drawn cases name, `pkg.module:function`.
        mode: `reference` runs eager attention in place of a backend's fused one, `performance` the fused one; None
            follows the environment's flags.
        layout: KV layout of every drawn case, one of `reference.layout.KINDS`; None mixes them.
        shrink_s: Seconds for shrinking a failing case.
        case_timeout_s: Seconds that one answer of the backend may take, or None to measure what is generous.
        memory: Bytes that the backend's process may hold, or None for most of the machine's.
        max_failures: Distinct causes after which no further case begins.
    """

    backend: str = "cpu-eager"
    against: str | None = None
    model: str | None = None
    prompts: str | None = None
    invariants: tuple[str, ...] = ()
    cases: int = DEFAULT_CASES
    new_tokens: int = 64
    sampling: Sampling = Sampling()
    time_budget_s: float = 0.0
    dtypes: tuple[str, ...] = DEFAULT_DTYPES
    seed: int = 0
    jobs: int = 1
    fault: str | None = None
    processors: tuple[str, ...] = ()
    layout: str | None = None
    mode: str | None = None
    shrink_s: float = SHRINK_S
    case_timeout_s: float | None = None
    memory: int | None = None
    max_failures: int = 1

    @property
    def wanted(self) -> Wanted:
        """The backend to open: with one torch thread for small models, which is bit-stable and fastest."""
        return Wanted(self.backend, self.fault, self.mode, threads=1 if self.model is None else 0)

    @property
    def patience(self) -> Patience:
        """How long to wait for an answer."""
        return Patience(self.case_timeout_s, BUILT_IN_S if self.model is None else CHECKPOINT_S)

    def slice(self, worker: int) -> "Plan":
        """The part of worker `worker`: its share of the cases, with a seed of its own."""
        share = self.cases // self.jobs + (worker < self.cases % self.jobs)
        return replace(self, cases=share, seed=drawing_seed(self.seed, worker), jobs=1)


def drawing_seed(seed: int, worker: int = 0) -> int:
    """The seed with which worker `worker` of a run with `--seed seed` draws; worker 0 is alone with `--jobs 1`."""
    return seed * 1000 + worker


def default_dtypes(backend: str) -> tuple[str, ...]:
    """DEFAULT_DTYPES, or all that `backend` declares where it lacks one of them; a stranger is not asked.

    Kernels without float64 are there for 16 bits, and some operators take nothing else.
    """
    declared = {row.name: row.dtypes for row in ROWS}.get(backend, DEFAULT_DTYPES)
    return DEFAULT_DTYPES if set(DEFAULT_DTYPES) <= set(declared) else declared


def default_cases(backend: str) -> int:
    """The number of cases in the registry's row of `backend`, else DEFAULT_CASES, as for a stranger."""
    return {row.name: row.cases for row in ROWS}.get(backend) or DEFAULT_CASES


def default_jobs(device: str) -> int:
    """Workers for a device: one on an accelerator, else one per core up to four."""
    return 1 if device != "cpu" else min(os.cpu_count() or 1, 4)
