"""Fault: a publicly reported defect of speculative decoding as a named patch of one engine seam."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from backends.engine.seams import Seams
from reference.trace import Stage


@dataclass(frozen=True)
class Fault:
    """A defect that can be planted.

    Attributes:
        name: As users type it.
        id: Its entry in the catalogue of public reports, or nothing.
        stage: Where it strikes.
        sentence: What goes wrong, in one sentence.
        source: The public report.
        trigger: What a case needs for it to show.
        plant: The seams with the defect in one of them.
        harmless: Kinds of draft (`reference.rules.DRAWS`) under which the law stays what it is, each with the proof.
        on: The backend in which to plant it when none is named.
    """

    name: str
    id: str
    stage: Stage
    sentence: str
    source: str
    trigger: str
    plant: Callable[[Seams], Seams]
    harmless: Mapping[str, str] = field(default_factory=dict)
    on: str = "cpu-eager"
