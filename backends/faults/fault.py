"""Fault: a reported defect of speculative decoding as a patch of an engine seam.

Files below this folder define faults as decorated functions, or as rows of a table.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specverify.backends.engine.seams import Seams
from specverify.reference.trace import Stage


@dataclass(frozen=True)
class Fault:
    """A defect that can be planted.

    Attributes:
        name: The name as users type it.
        stage: The stage at which the defect strikes.
        sentence: The defect in one sentence.
        source: The public report of the defect.
        trigger: The property of a case that makes the defect visible.
        plant: A function from the right seams to seams with the defect in one of them.
        harmless: Kinds of draft (`specverify.reference.rules.DRAWS`) under which the defect changes no law, each with
            the proof.
        on: The backend in which the defect is planted when the user names none.
    """

    name: str
    stage: Stage
    sentence: str
    source: str
    trigger: str
    plant: Callable[[Seams], Seams]
    harmless: Mapping[str, str] = field(default_factory=dict)
    on: str = "cpu-eager"

    @property
    def id(self) -> str:
        """The fault's entry in the catalogue of public reports, as `source` cites it; empty where there is none."""
        # A fault "of the family of" an entry is a variant of the report and not the reported defect itself.
        entry = re.search(r"(?<!family of )catalogue (BZ-\d+)", self.source)
        return entry.group(1) if entry else ""


def fault(
    name: str,
    stage: Stage,
    source: str,
    trigger: str,
    harmless: Mapping[str, str] | None = None,
    on: str = "cpu-eager",
) -> Callable[[Callable[[Seams], Seams]], Fault]:
    """A decorator that makes a fault of a function from seams to seams.

    The first paragraph of the function's docstring is the fault's sentence, which users read.
    """

    def decorate(plant: Callable[[Seams], Seams]) -> Fault:
        sentence = " ".join((plant.__doc__ or "").split("\n\n")[0].split())
        return Fault(name, stage, sentence, source, trigger, plant, harmless or {}, on)

    return decorate


def faults_in(module: Mapping[str, Any]) -> tuple[Fault, ...]:
    """The faults among the names of a module, in the order of their definition."""
    return tuple(value for value in module.values() if isinstance(value, Fault))
