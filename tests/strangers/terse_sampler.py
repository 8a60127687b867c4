"""A stranger's sampler for tests: it has no tables, takes no tape, and reveals nothing but what it emits."""

from dataclasses import replace

from specverify.backends.base import Declaration
from specverify.backends.compositions import open_cpu
from specverify.backends.engine.backend import EngineBackend
from specverify.reference.case import Case
from specverify.reference.rules import RULES
from specverify.reference.trace import Stage, Step, Trace


class TerseSampler:
    """Emits tokens at any temperature, `hotter` times the one that was asked for; says nothing else."""

    def __init__(self, inner: EngineBackend, hotter: float = 1.0) -> None:
        self.declaration = Declaration(
            name="terse-sampler",
            device="cpu",
            reveals=frozenset({Stage.EMITTED}),
            dtypes=("float32",),
            drafts=("scripted", "ngram", "model"),
            commits=("path", "fast", "length"),
            max_temperature=float("inf"),
            rules=tuple(RULES),
            processes=True,
        )
        self._inner = inner
        self._hotter = hotter

    def run(self, case: Case) -> Trace:
        """Run `case`, at its own temperature or another, and keep everything but the tokens to itself."""
        sampling = replace(case.sampling, temperature=case.sampling.temperature * self._hotter)
        trace = self._inner.run(replace(case, sampling=sampling))
        steps = tuple(Step(context=step.context, emitted=step.emitted) for step in trace.steps)
        return replace(trace, steps=steps, accounting=None)


def sampler() -> TerseSampler:
    """Open the sampler."""
    return TerseSampler(open_cpu())


def hot() -> TerseSampler:
    """Open the one that is too hot."""
    return TerseSampler(open_cpu(), 1.6)
