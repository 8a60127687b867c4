"""Fault: a publicly reported defect of speculative decoding as a named patch of one engine seam."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from backends.engine.seams import Seams
from reference.trace import Stage


@dataclass(frozen=True)
class Fault:
    """A defect that can be planted.

    Attributes:
        name: As users type it.
        stage: Where it strikes.
        sentence: What goes wrong, in one sentence.
        source: The public report.
        trigger: What a case needs for it to show.
        plant: The seams with the defect in one of them.
        harmless: Kinds of draft (`reference.rules.DRAWS`) under which the law stays what it is, each with the proof.
        on: The backend in which to plant it when none is named.
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
        """Its entry in the catalogue of public reports, as `source` cites it; nothing for one of our own."""
        cited = re.search(r"(?<!family of )catalogue (BZ-\d+)", self.source)
        return cited.group(1) if cited else ""


def fault(
    name: str,
    stage: Stage,
    source: str,
    trigger: str,
    harmless: Mapping[str, str] | None = None,
    on: str = "cpu-eager",
) -> Callable[[Callable[[Seams], Seams]], Fault]:
    """The fault that a function from seams to seams plants; the first paragraph of its docstring is the sentence."""

    def named(plant: Callable[[Seams], Seams]) -> Fault:
        sentence = " ".join((plant.__doc__ or "").split("\n\n")[0].split())
        return Fault(name, stage, sentence, source, trigger, plant, harmless or {}, on)

    return named


def faults_in(module: Mapping[str, Any]) -> tuple[Fault, ...]:
    """The faults among the names of a module, in the order of their definition."""
    return tuple(value for value in module.values() if isinstance(value, Fault))
