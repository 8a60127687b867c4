"""The loop of a training, until its time is over.

The state of the run is written often enough that a kill costs less than a minute, and the best head is published.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from specverify.records.ranks import Ranks
from specverify.training.acceptance import CHAIN, TREE, HeldOutText, head_acceptance
from specverify.training.data import quicker_dtype
from specverify.training.heads.base import TrainedHead
from specverify.training.online import OnlineOrder
from specverify.training.plan import TrainingPlan
from specverify.training.published import HeadFolder, RunState, optimiser_tensors, restore_optimiser
from specverify.training.states import Order
from specverify.training.target import Stopped

WRITE_EVERY_S = 40.0
"""The seconds between two writings of the state, so that a kill costs less than a minute."""

MEASURES = 8
"""How often the acceptance on watched prompts is measured in a run, if that takes less than MEASURED of its time."""

MEASURED = 0.08
"""The share of the time that measures may take, the last one apart."""

WARM_UP = 30
"""The steps over which the learning rate rises."""

LEAST_RATE = 0.02
"""The learning rate at the end, over the highest."""

AVERAGED = 0.98
"""The weight of the older average in the running average of the weights, which is measured and published."""


@dataclass
class Clock:
    """The time of a run over all its parts.

    Attributes:
        before: The seconds that earlier parts used.
        used: Their seconds of processor time.
        began, began_used: The clocks at the start of this part.
    """

    before: float = 0.0
    used: float = 0.0
    began: float = field(default_factory=time.monotonic)
    began_used: float = field(default_factory=time.process_time)

    @property
    def seconds(self) -> float:
        """The seconds of the run so far."""
        return self.before + time.monotonic() - self.began

    @property
    def processor(self) -> float:
        """The seconds of processor time of the run so far, in this process."""
        return self.used + time.process_time() - self.began_used


@dataclass
class Training:
    """A training under way.

    Attributes:
        head: The head that the optimiser changes.
        average: The running average of its weights, in a head of its own.
        step: The number of the next step.
        learned: The number of rows that were learned, each as often as it was.
        best: The best mean of accepted tokens on watched prompts, in a tree.
        begins_at: The seconds of the run at which the training began, after the data.
        next_measure: The number of the next measure.
        loss: The loss of the last step.
    """

    plan: TrainingPlan
    head: TrainedHead
    average: TrainedHead
    folder: HeadFolder
    watched: list[HeldOutText]
    target: dict[str, Any]
    clock: Clock
    ranks: Ranks
    begins_at: float = 0.0
    step: int = 0
    learned: int = 0
    best: float = -1.0
    next_measure: int = 0
    loss: float = float("nan")

    def __post_init__(self) -> None:
        self.optimiser = torch.optim.AdamW(
            self.head.parameters(), self.plan.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    @property
    def progress(self) -> float:
        """The share of the training that is over, from 0 to 1: of its time, or of its steps where they are bounded."""
        if self.plan.most_steps and self.clock.seconds < self.plan.seconds:
            return min(self.step / self.plan.most_steps, 1.0)
        total_s = max(self.plan.seconds - self.begins_at, 1e-9)
        return min(max((self.clock.seconds - self.begins_at) / total_s, 0.0), 1.0)

    def resume(self) -> bool:
        """Take the state of a killed run over, if there is one."""
        saved = self.folder.load_state()
        if saved is None:
            return False
        for name, head in (("head", self.head), ("average", self.average)):
            head.load_published(
                {key[len(name) + 1 :]: tensor for key, tensor in saved.tensors.items() if key.startswith(f"{name}/")}
            )
        restore_optimiser(self.optimiser, saved.tensors)
        facts = saved.facts
        self.step = facts["step"]
        self.learned = facts["learned"]
        self.best = facts["best"]
        self.begins_at = facts["begins_at"]
        self.next_measure = facts["next_measure"]
        self.clock = Clock(facts["seconds"], facts["processor"], self.clock.began, self.clock.began_used)
        return True

    def write_state(self, shards: int) -> None:
        """Write the state of the run."""
        tensors = {f"head/{name}": tensor.cpu() for name, tensor in self.head.published_tensors().items()}
        tensors |= {f"average/{name}": tensor.cpu() for name, tensor in self.average.published_tensors().items()}
        facts = {
            "step": self.step, "learned": self.learned, "best": self.best, "begins_at": self.begins_at,
            "next_measure": self.next_measure, "seconds": self.clock.seconds, "processor": self.clock.processor,
            "shards": shards,
        }  # fmt: skip
        self.folder.save_state(RunState({**tensors, **optimiser_tensors(self.optimiser)}, facts))

    def run(
        self,
        order: Order | OnlineOrder,
        stopped: Callable[[], bool],
        say: Callable[[str], None],
        moved: Callable[[float, Callable[[], str]], None],
    ) -> None:
        """Train until the time is over or `stopped` says so; the best head is in the folder then."""
        network: Any = DistributedDataParallel(self.head) if self.ranks.world > 1 else self.head
        device = self.plan.device
        narrow = quicker_dtype(device)
        began = written_at = time.monotonic()
        loss_of_line = list[float]()
        measure_s = 0.0
        batches = order.batches(self.step, device)
        while True:
            stop, progress = self.ranks.broadcast([float(stopped() or self.progress >= 1), self.progress])
            measures = self.plan.measures or MEASURES
            is_paid = bool(self.plan.measures) or measure_s <= MEASURED * (time.monotonic() - began)
            due = progress * measures >= self.next_measure and is_paid
            if self.ranks.first and (stop or due):
                self.next_measure = math.floor(progress * measures) + 1
                since = time.monotonic()
                self.measure(loss_of_line, say)
                loss_of_line = list[float]()
                measure_s += time.monotonic() - since
            if stop:
                break
            try:
                batch = next(batches)
            except Stopped:
                continue  # the user's word ends the training above, with a last measure
            for group in self.optimiser.param_groups:
                group["lr"] = self.plan.rate * rate_at(progress, self.step)
            with torch.autocast(device, narrow, enabled=narrow != torch.float32):
                value = network(batch, steps_at(progress, self.plan.steps))
            self.optimiser.zero_grad(set_to_none=True)
            value.backward()
            torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
            self.optimiser.step()
            self.step += 1
            self.learned += int((batch.lengths - 1 - batch.firsts).sum())
            loss_of_line.append(float(value.detach()))
            self.loss = loss_of_line[-1]
            self._average()
            if self.ranks.first:
                moved(self.clock.seconds, self._status)
                if time.monotonic() - written_at > WRITE_EVERY_S:
                    self.write_state(order.shards)
                    written_at = time.monotonic()
        if self.ranks.first:
            self.write_state(order.shards)

    def measure(self, losses: list[float], say: Callable[[str], None]) -> None:
        """Measure the acceptance on watched prompts, add it to the curve, and publish the head if it is the best."""
        chain, tree = (head_acceptance(self.average, self.watched, tree_shape) for tree_shape in (CHAIN, TREE))
        line = {
            "seconds": round(self.clock.seconds, 1),
            "processor_seconds": round(self.clock.processor, 1),
            "step": self.step,
            "learned": self.learned,
            "loss": round(sum(losses) / len(losses), 4) if losses else None,
            "chain": round(chain.mean, 4),
            "tree": round(tree.mean, 4),
            "chain_tokens_per_call": round(chain.tokens_per_call, 4),
            "tree_tokens_per_call": round(tree.tokens_per_call, 4),
            "by_depth": [round(share, 4) for share in tree.by_depth(TREE.depth)],
        }
        self.folder.add_curve_line(line)
        say(
            f"{line['seconds']:.0f} s, {line['processor_seconds']:.0f} s of processor, step {self.step}: "
            f"accepted per step {chain.mean:.2f} in a chain, {tree.mean:.2f} in a tree "
            f"({tree.tokens_per_call:.2f} tokens per call)"
        )
        if tree.mean > self.best:
            self.best = tree.mean
            self.folder.publish(self.average, self.target)

    def _status(self) -> str:
        return f"step {self.step}, loss {self.loss:.3f}, best tree {self.best:.2f}"

    @torch.no_grad()
    def _average(self) -> None:
        # A young average follows the weights more closely, so that it does not remember where they began.
        weight = min(AVERAGED, (1 + self.step) / (10 + self.step))
        weights, averaged = (list[Tensor](head.parameters()) for head in (self.head, self.average))
        torch._foreach_lerp_(averaged, weights, 1 - weight)


def rate_at(progress: float, step: int) -> float:
    """The learning rate over the highest: a linear rise, then half a cosine of the time that is over."""
    fall = 0.5 * (1 + math.cos(math.pi * progress))
    return min(1.0, (step + 1) / WARM_UP) * (LEAST_RATE + (1 - LEAST_RATE) * fall)


def steps_at(progress: float, most: int) -> int:
    """The steps of the training-time test: one at first, all in the last half of the time."""
    return min(most, 1 + int(2 * progress * (most - 1) + 1e-9)) if progress < 0.5 else most
