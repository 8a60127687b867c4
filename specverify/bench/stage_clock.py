"""A clock of the stages of our engine's step, planted as seams.

An engine without the clock runs no line of this file. Seconds are exclusive: while a stage runs inside another, the
outer one's stand still. On a GPU every stage begins and ends with a synchronisation of the device, so that a stage
holds the work that it launched.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from specverify.backends.engine.request import Request
from specverify.backends.engine.seams import Seams
from specverify.backends.engine.tracing import Revealer
from specverify.bench.memory import cache_bytes, drafting_bytes, weight_bytes

STAGES = ("prefill", "draft", "lower", "verify", "accept", "commit", "host")
"""Every stage that has seconds; `host` holds what none of the others holds."""


class StageClock:
    """Seconds by stage since the last `start`.

    Attributes:
        stages: Seconds of each stage.
        steps: For each step so far, the seconds from the start to its end.
        prefilled: Seconds from the start to the end of the prefill.
        kv_bytes: Bytes of the KV caches of target and draft when the last request ended.
        weights: Bytes of the weights of the target, and of the model of the draft or 0.
    """

    def __init__(self, device: str) -> None:
        self._synchronise = torch.cuda.synchronize if device == "cuda" else _nothing
        self.start()

    def start(self) -> None:
        """Forget everything; the time from now on is the host's until a stage begins."""
        self.stages: defaultdict[str, float] = defaultdict(float)
        self.steps: list[float] = []
        self.prefilled = 0.0
        self.kv_bytes = 0
        self.weights = (0, 0)
        self._inside = ["host"]
        self._synchronise()
        self._began = self._last = time.perf_counter()

    def stop(self) -> float:
        """Seconds since the start."""
        self._turn()
        return self._last - self._began

    def enter(self, stage: str) -> None:
        """Begin a stage inside the present one."""
        self._turn()
        self._inside.append(stage)

    def leave(self) -> None:
        """End the present stage."""
        self._turn()
        self._inside.pop()

    @property
    def inside(self) -> str:
        """The present stage."""
        return self._inside[-1]

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """The stage `name` inside the `with`."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def end_step(self) -> None:
        """Note the end of a step."""
        self._turn()
        self.steps.append(self._last - self._began)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A time inside the `with` that no stage, no step and no sum counts."""
        self._turn()
        yield
        self._synchronise()
        now = time.perf_counter()
        self._began, self._last = self._began + now - self._last, now

    def _turn(self) -> None:
        """Count the seconds since the last turn for the present stage."""
        self._synchronise()
        now = time.perf_counter()
        self.stages[self._inside[-1]] += now - self._last
        self._last = now

    def plant_in(self, seams: Seams) -> Seams:
        """`seams` on this clock; a request then reveals neither KV nor attention: such copies are no work of a step."""

        def on_clock(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(function)
            def run(*arguments: Any) -> Any:
                with self.stage(stage):
                    return function(*arguments)

            return run

        def gather(batch: list[Request]) -> Any:
            rows = seams.gather(batch)
            self.enter("verify")  # the forward follows; the first request that settles ends it
            return rows

        return replace(
            seams,
            request=_timed_request(seams.request, self),
            gather=gather,
            lower_tree=on_clock("lower", seams.lower_tree),
            walk=on_clock("accept", seams.walk),
            commit=on_clock("commit", seams.commit),
        )


def _timed_request(request: type[Request], clock: StageClock) -> type[Request]:
    """`request` with its phases on the clock."""

    class Timed(request):  # type: ignore[misc, valid-type]  # a class that is a variable
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._reveal = Revealer(0)

        def prefill(self) -> None:
            with clock.stage("prefill"):
                super().prefill()
            clock.prefilled = clock.stop()

        def propose(self) -> None:
            with clock.stage("draft"):
                super().propose()

        def settle(self, flat: Tensor, heads: list[Tensor]) -> None:
            if clock.inside == "verify":
                clock.leave()
            super().settle(flat, heads)
            clock.end_step()
            if self.finish is not None:
                with clock.paused():
                    clock.kv_bytes = cache_bytes(self.lease.caches)
                    drafting = drafting_bytes(self.lease.owner or self.draft)
                    clock.weights = weight_bytes(self.target.model), drafting

    return Timed


def _nothing() -> None:
    """A CPU has nothing to wait for."""
