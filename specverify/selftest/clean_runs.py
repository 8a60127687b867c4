"""The runs of a clean backend: their digests, and the functions that they entered.

A case on which a planted backend gives the same digest as the clean one needs no judgement, and no run either where
the clean one entered none of the functions that the fault replaces.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np

from specverify import backends
from specverify.backends.base import Backend, Keeping
from specverify.backends.engine.seams import Seams
from specverify.properties.invariants.acceptance import law
from specverify.properties.invariants.lossless import distribution
from specverify.properties.verdict.invariant import Invariant
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import NoTrace, Subject
from specverify.reference.case import Case
from specverify.reference.oracle.decoder import Oracle
from specverify.selftest.entered import entered_in, replaced_functions
from specverify.setup.subjects import open_planted, subject_of

MOST_RUNS = 4096
"""Most runs remembered of one backend."""

BACKENDS = tuple(str(Path(folder)) for folder in backends.__path__)
"""Where the engine's files lie: the functions that faults replace."""

ON_TABLES = {invariant.name for invariant in (*law.INVARIANTS, *distribution.INVARIANTS)}
"""Invariants that run the backend's sampling on tables or coins of their own, which the case's run does not show."""

TABLES_ALONE = ON_TABLES - {"lossless.distribution"}
"""Invariants that use tables alone; `lossless.distribution` also tests whole generations by the request path."""


@dataclass(frozen=True)
class CleanRun:
    """A clean backend's run of a case, as it is remembered.

    Attributes:
        digest: Of its trace, bit by bit.
        entered: The code of the engine's functions that it entered.
    """

    digest: str
    entered: frozenset[CodeType]


class CleanRuns:
    """The runs of one clean backend, by case."""

    def __init__(self, backend: str) -> None:
        self._backend = open_planted(backend, None)
        # Digests are remembered, not traces.
        self._clean = subject_of(self._backend, keep=2)
        self._runs: OrderedDict[Case, CleanRun] = OrderedDict()
        self._entered_by_variants: OrderedDict[Case, frozenset[CodeType]] = OrderedDict()

    def samples_like(self, planted: Backend) -> bool:
        """Whether `planted` samples by the same functions as the clean backend, so that tables cannot tell them apart.

        It is False for a backend that lacks our sampling seams.
        """
        clean_seams, planted_seams = (getattr(backend, "seams", None) for backend in (self._backend, planted))
        return (
            isinstance(clean_seams, Seams)
            and isinstance(planted_seams, Seams)
            and clean_seams.sampling == planted_seams.sampling
        )

    def replaced_in(self, planted: Backend) -> frozenset[CodeType] | None:
        """The code of the clean functions that `planted` has replaced; None where that cannot be seen.

        Nor can it be seen which functions a backend enters that runs cases in processes of its own.
        """
        if isinstance(planted, Keeping):
            return None
        clean_seams, planted_seams = (getattr(backend, "seams", None) for backend in (self._backend, planted))
        if not (isinstance(clean_seams, Seams) and isinstance(planted_seams, Seams)):
            return None
        return replaced_functions(clean_seams, planted_seams)

    def worth_judging(
        self,
        case: Case,
        planted: Subject,
        invariants: tuple[Invariant, ...],
        tables: bool,
        replaced: frozenset[CodeType] | None = None,
    ) -> tuple[Invariant, ...]:
        """The members of `invariants` that are worth judging on `case`.

        All are, if the run of `planted` differs in a bit from the clean one. Otherwise the invariants on tables are, if
        `tables` says that `planted` samples by functions of its own; else none is. A fault that shows only in a variant
        of the case, or in another generation from its prompt, is then missed. A `planted` whose `replaced` functions
        the clean run entered nowhere is not run.
        """
        clean = self._run(case)
        if not _untouched(replaced, clean.entered) and digest(planted, case) != clean.digest:
            return invariants
        return _on_tables(invariants, tables)

    def worth_judging_with_variants(
        self,
        case: Case,
        invariants: tuple[Invariant, ...],
        tables: bool,
        replaced: frozenset[CodeType] | None,
    ) -> tuple[Invariant, ...]:
        """All of `invariants`, or those on tables where no run for any of them enters a `replaced` function."""
        if replaced is None:
            return invariants
        if case not in self._entered_by_variants:
            # What an earlier case left remembered would not be entered again.
            subject = subject_of(self._backend)
            _, entered = entered_in(lambda: judge(case, invariants, Oracle(), subject))
            self._entered_by_variants[case] = _of_the_engine(entered)
            _forget_oldest(self._entered_by_variants)
        return _on_tables(invariants, tables) if _untouched(replaced, self._entered_by_variants[case]) else invariants

    def _run(self, case: Case) -> CleanRun:
        if case not in self._runs:
            run_digest, entered = entered_in(partial(digest, self._clean, case))
            self._runs[case] = CleanRun(run_digest, _of_the_engine(entered))
            _forget_oldest(self._runs)
        return self._runs[case]


def _untouched(replaced: frozenset[CodeType] | None, entered: frozenset[CodeType]) -> bool:
    return replaced is not None and replaced.isdisjoint(entered)


def _on_tables(invariants: tuple[Invariant, ...], tables: bool) -> tuple[Invariant, ...]:
    return tuple(invariant for invariant in invariants if tables and invariant.name in ON_TABLES)


def _of_the_engine(entered: frozenset[CodeType]) -> frozenset[CodeType]:
    return frozenset(code for code in entered if code.co_filename.startswith(BACKENDS))


def _forget_oldest(runs: OrderedDict[Case, Any]) -> None:
    """Forget the oldest runs beyond the limit: rounds over many faults use the same cases in the same order."""
    while len(runs) > MOST_RUNS:
        runs.popitem(last=False)


@cache
def clean_runs_of(backend: str) -> CleanRuns:
    """A backend's clean runs, made once in each process."""
    return CleanRuns(backend)


def digest(subject: Subject, case: Case) -> str:
    """The digest of the trace of `case` without its times, or of the outcome in place of a trace."""
    try:
        # Times differ between two runs of the same computation.
        outcome: object = replace(subject(case), forward_s=0.0)
    except NoTrace as absent:
        outcome = absent.outcome
    digest_of_parts = hashlib.blake2b(digest_size=16)
    for part in _parts(outcome):
        digest_of_parts.update(part)
    return digest_of_parts.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    """The bytes of a value, with marks of types, shapes and lengths, so that unequal values have unequal bytes."""
    if isinstance(value, np.ndarray):
        yield f"{value.dtype.str}{value.shape}".encode()
        yield value.tobytes()
    elif is_dataclass(value):
        yield type(value).__name__.encode()
        for field in fields(value):
            yield from _parts(getattr(value, field.name))
    elif isinstance(value, (tuple, list)):
        yield f"{len(value)}[".encode()
        for item in value:
            yield from _parts(item)
    elif isinstance(value, Mapping):
        yield f"{len(value)}{{".encode()
        for key, item in value.items():
            yield repr(key).encode()
            yield from _parts(item)
    else:
        yield f"{value!r},".encode()
