"""The parts of a first contact: what each one runs, in the order in which they run."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from specverify.backends.base import Unavailable, WrongFlag
from specverify.first_contact.cases import LEFT, judge_drawn_cases
from specverify.first_contact.conformance import conformance_figures
from specverify.first_contact.figures import attention_figures, forward_figures
from specverify.first_contact.kernels import KERNEL_DTYPES, launch_kernels
from specverify.first_contact.machine import machine_facts
from specverify.first_contact.speed import CONTEXTS, TREES, grid_figures, head_figures
from specverify.setup.errors import MissingInput

CASES = 40
"""Drawn cases of each backend."""

CHUNK = 10
"""Cases of one part: a run that is cut off loses no more than these."""

BACKENDS = {
    "cuda": (
        "cuda-eager",
        "cuda-fused",
        "cuda-fused-words",
        "cuda-fused-graphs",
        "cuda-fused-sdpa",
        "cuda-fused-flex",
        "cuda-fused-flashinfer",
    ),
    "npu": ("ascend-eager", "ascend-fused", "ascend-fused-atb"),
}
"""The backends of each device, those first whose own code has run on no device."""

BEGUN = "begun"
"""The state of a part that runs, or whose process ended before it did."""

SHORT = "short"
"""The state of a part whose time was over before all its items ran; those that ran agree."""

TESTED = {"cuda": "cuda-eager", "npu": "ascend-eager"}
"""The backend of the shipped conformance tests."""

State = str
"""`agree`, `differ`, `absent` (a package is not there), `failed` (an exception, which figures name), SHORT or BEGUN."""


@dataclass(frozen=True)
class Result:
    """What a part has told.

    Attributes:
        state: See `State`.
        seconds: How long it took.
        figures: What it found, as JSON holds it.
    """

    state: State
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)


Outcome = tuple[bool, dict[str, Any]]
"""Whether anything differs, and the figures."""


def whole(run: Callable[[], Outcome]) -> Callable[[float], Outcome]:
    """The run of a part without items: once begun, it runs to its end."""
    return lambda until: run()


@dataclass(frozen=True)
class Part:
    """A part of a first contact.

    Attributes:
        name: Its name, by which it is found again when a run goes on.
        tells: What it tells, in words.
        run: Runs it, and begins none of its items from the given time of `time.monotonic` on; returns whether anything
            differs, and the figures.
    """

    name: str
    tells: str
    run: Callable[[float], Outcome]

    def result(self, until: float) -> Result:
        """Run it `until` then; an exception is a result too, since the parts behind it tell of other things."""
        began = time.perf_counter()
        try:
            differs, figures = self.run(until)
            state = "differ" if differs else SHORT if figures.get(LEFT) else "agree"
        except (Unavailable, MissingInput, WrongFlag) as why:
            state, figures = "absent", {"why": " ".join(str(why).split())}
        except (
            Exception
        ) as error:  # of a driver, a compiler, a kernel: whatever a new machine raises is what we came for
            state, figures = "failed", {"why": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
        return Result(state, round(time.perf_counter() - began, 3), figures)


def parts_of(device: str, folder: Path) -> tuple[Part, ...]:
    """The parts on `device`, cuda or npu; bundles of cases that differ go to `folder`."""
    parts = [Part("machine", "versions, device, schemas of operators", whole(partial(machine_facts, device)))]
    if device == "cuda":
        parts += [
            Part(
                f"kernels {dtype}",
                "each specialisation of our kernels against the split path",
                partial(launch_kernels, device, dtype),
            )
            for dtype in KERNEL_DTYPES
        ]
    first_cases, *further_cases = (
        [
            Part(
                f"{backend} {begin}",
                f"{CHUNK} drawn cases of {backend} against the oracle",
                partial(judge_drawn_cases, device, backend, CHUNK, begin, folder),
            )
            for backend in BACKENDS[device]
        ]
        for begin in range(0, CASES, CHUNK)
    )
    parts += first_cases
    parts.append(
        Part("forwards", "verify and draft forwards, with and without graphs", whole(partial(forward_figures, device)))
    )
    parts.append(
        Part("head", "tokens per second with a head, and of the target alone", whole(partial(head_figures, device)))
    )
    parts += [
        Part(
            f"attention {dtype}",
            "ways of attention side by side, and over reading the KV once",
            whole(partial(attention_figures, device, dtype, folder)),
        )
        for dtype in (KERNEL_DTYPES if device == "cuda" else ())
    ]
    parts += [
        Part(
            "trees by batch", "verify forwards by tree and batch", whole(partial(grid_figures, device, TREES, "nodes"))
        ),
        Part(
            "batches by context",
            "verify forwards by batch and context",
            whole(partial(grid_figures, device, CONTEXTS, "prefix")),
        ),
        Part("conformance", "the shipped tests in miniature", whole(partial(conformance_figures, TESTED[device]))),
    ]
    # The first cases of a backend tell more than further ones of another.
    return (*parts, *chain.from_iterable(further_cases))
