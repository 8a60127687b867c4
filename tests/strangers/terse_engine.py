"""A stranger's engine for tests: it decodes with our engine and reveals nothing but what it emits."""

from dataclasses import replace

from specverify.backends.base import Declaration
from specverify.backends.compositions import open_cpu
from specverify.backends.engine.backend import EngineBackend
from specverify.reference.case import Case
from specverify.reference.trace import Stage, Step, Trace


class TerseEngine:
    """Emits tokens; says nothing else."""

    def __init__(self, inner: EngineBackend) -> None:
        self.declaration = Declaration(
            name="terse",
            device="cpu",
            reveals=frozenset({Stage.EMITTED}),
            dtypes=("float32",),
            drafts=("scripted", "ngram", "model"),
            commits=("path", "fast", "length"),
        )
        self._inner = inner

    def run(self, case: Case) -> Trace:
        """Run `case` and keep everything but the tokens to itself."""
        trace = self._inner.run(case)
        steps = tuple(Step(context=step.context, emitted=step.emitted) for step in trace.steps)
        return replace(trace, steps=steps, accounting=None)


class WrongEngine(TerseEngine):
    """The same, with the last token of every output changed."""

    def run(self, case: Case) -> Trace:
        """Run `case`, and spoil its end."""
        trace = super().run(case)
        last = trace.steps[-1]
        assert last.emitted is not None
        spoilt = (*last.emitted.tokens[:-1], (last.emitted.tokens[-1] + 1) % case.model.vocab_size)
        steps = (*trace.steps[:-1], replace(last, emitted=replace(last.emitted, tokens=spoilt)))
        return replace(trace, steps=steps, output=(*trace.output[:-1], spoilt[-1]))


class CrashingEngine(TerseEngine):
    """The same, until a prompt has three tokens."""

    def run(self, case: Case) -> Trace:
        """Run `case` if it is short."""
        if len(case.prompt) > 2:
            raise IndexError("slot 3 is out of range")
        return super().run(case)


def terse() -> TerseEngine:
    """Open the terse engine."""
    return TerseEngine(open_cpu())


def wrong() -> WrongEngine:
    """Open the wrong engine."""
    return WrongEngine(open_cpu())


def crashing() -> CrashingEngine:
    """Open the crashing engine."""
    return CrashingEngine(open_cpu())
