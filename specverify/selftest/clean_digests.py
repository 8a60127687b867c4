"""Digests of a clean backend's runs.

A case on which a planted backend gives the same digest as the clean one needs no judgement.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from specverify.backends.base import Backend
from specverify.backends.engine.seams import Seams
from specverify.properties.invariants.acceptance import law
from specverify.properties.invariants.lossless import distribution
from specverify.properties.verdict.invariant import Invariant
from specverify.properties.verdict.subject import NoTrace, Subject
from specverify.reference.case import Case
from specverify.setup.subjects import open_planted, subject_of

MOST_DIGESTS = 4096
"""Most digests kept for one backend."""

ON_TABLES = {invariant.name for invariant in (*law.INVARIANTS, *distribution.INVARIANTS)}
"""Invariants that run the backend's sampling on tables or coins of their own, which the case's run does not show."""

TABLES_ALONE = ON_TABLES - {"lossless.distribution"}
"""Invariants that use tables alone; `lossless.distribution` also tests whole generations by the request path."""


class CleanDigests:
    """Digests of one clean backend's runs, bit by bit, by case."""

    def __init__(self, backend: str) -> None:
        self._backend = open_planted(backend, None)
        # The digests are remembered, not the traces.
        self._clean = subject_of(self._backend, keep=2)
        self._digests: OrderedDict[Case, str] = OrderedDict()

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

    def worth_judging(
        self, case: Case, planted: Subject, invariants: tuple[Invariant, ...], tables: bool
    ) -> tuple[Invariant, ...]:
        """The members of `invariants` that are worth judging on `case`.

        All are, if the run of `planted` differs in a bit from the clean one. Otherwise the invariants on tables are, if
        `tables` says that `planted` samples by functions of its own; else none is. A fault that shows only in a variant
        of the case, or in another generation from its prompt, is then missed.
        """
        if case not in self._digests:
            self._digests[case] = digest(self._clean, case)
            # The oldest digest goes first: rounds over many faults use the same cases in the same order.
            while len(self._digests) > MOST_DIGESTS:
                self._digests.popitem(last=False)
        if digest(planted, case) != self._digests[case]:
            return invariants
        return () if not tables else tuple(invariant for invariant in invariants if invariant.name in ON_TABLES)


@cache
def digests_of(backend: str) -> CleanDigests:
    """The digests of a backend's clean runs, made once in each process."""
    return CleanDigests(backend)


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
