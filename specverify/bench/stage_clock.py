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
from functools import partial, wraps
from typing import Any, TypeAlias

import torch
from torch import Tensor

from specverify.backends.engine.kv.arena import CacheLease
from specverify.backends.engine.lower_tree import lower_tree, tree_masks
from specverify.backends.engine.lowering.device import DeviceLowering
from specverify.backends.engine.request import Request
from specverify.backends.engine.seams import Seams
from specverify.backends.engine.tracing import Revealer
from specverify.bench.memory import cache_bytes, draft_parameters, num_parameters, storage_bytes, weight_bytes

STAGES = ("prefill", "draft", "lower", "mask", "verify", "accept", "commit", "host")
"""Every stage that has seconds; `host` holds what none of the others holds.

`lower` makes the index tensors of a tree, and `mask` the columns that its rows see. Where another function lowers in
the place of the engine's own, such as a planted fault, `lower` holds both.
"""


class StageClock:
    """Seconds by stage since the last `start`.

    Attributes:
        stages: Seconds of each stage.
        steps: For each step so far, the seconds from the start to its end.
        step_stages: For each step so far, its seconds by stage, the prefill left out.
        by_request: Whether a step ends when its request has settled; else whoever steps a batch ends its step.
        prefilled: Seconds from the start to the end of the prefill.
        kv_bytes: Most bytes of the KV caches of the target, and of the draft, where a request ended.
        weights: Bytes of the weights of the target, and of the model of the draft or 0.
        draft_parameters: The number of the draft's weights.
    """

    def __init__(self, device: str) -> None:
        self._synchronise = torch.cuda.synchronize if device == "cuda" else _nothing
        self.by_request = True
        self.start()

    def start(self) -> None:
        """Forget everything; the time from now on is the host's until a stage begins."""
        self.stages: defaultdict[str, float] = defaultdict(float)
        self.steps: list[float] = []
        self.step_stages: list[dict[str, float]] = []
        self.prefilled = 0.0
        self.kv_bytes = (0, 0)
        self.weights = (0, 0)
        self.draft_parameters = 0
        self._counted: dict[str, float] = {}
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
        """Note the end of a step, and what it spent in each stage."""
        self._turn()
        self.steps.append(self._last - self._began)
        spent = {name: seconds - self._counted.get(name, 0.0) for name, seconds in self.stages.items()}
        self.step_stages.append({name: seconds for name, seconds in spent.items() if name != "prefill"})
        self._counted = dict(self.stages)

    def end_prefill(self) -> None:
        """Note the end of a prefill; what the host spent before it belongs to no step."""
        self.prefilled = self.stop()
        self._counted = dict(self.stages)

    def weigh(self, target: Any, leases: list[CacheLease], drafting: object) -> None:
        """Note the bytes of the weights and of the caches of living requests, in a time that does not count."""
        with self.paused():
            target_kv = cache_bytes([lease.target for lease in leases])
            draft_kv = cache_bytes([lease.draft for lease in leases if lease.draft is not None])
            self.kv_bytes = max(self.kv_bytes[0], target_kv), max(self.kv_bytes[1], draft_kv)
            parameters = draft_parameters(drafting)
            self.weights = weight_bytes(target.model), storage_bytes(parameters)
            self.draft_parameters = num_parameters(parameters)

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
            lower_tree=on_clock("lower", _with_timed_masks(seams.lower_tree, on_clock)),
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
            clock.end_prefill()

        def propose(self) -> None:
            with clock.stage("draft"):
                super().propose()

        def settle(self, flat: Tensor, heads: list[Tensor]) -> None:
            if clock.inside == "verify":
                clock.leave()
            super().settle(flat, heads)
            if clock.by_request:
                clock.end_step()
                if self.finish is not None:
                    clock.weigh(self.target, [self.lease], self.lease.owner or self.draft)

    return Timed


OnClock: TypeAlias = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""From a stage and a function to the function on the clock."""


def _with_timed_masks(lower: Callable[..., Any], on_clock: OnClock) -> Callable[..., Any]:
    """`lower` with its masks on the clock, where it is a lowering of the engine's own."""
    if lower is lower_tree:
        return partial(lower_tree, masks=on_clock("mask", tree_masks))
    if isinstance(lower, DeviceLowering):
        block_words = on_clock("mask", lower.block_words)
        return replace(lower, block_words=block_words, first_columns=on_clock("mask", lower.first_columns))
    return lower


def _nothing() -> None:
    """A CPU has nothing to wait for."""
