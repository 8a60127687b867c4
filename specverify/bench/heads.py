"""The command `bench heads`: EAGLE-1 heads of several shapes, trained alike and compared.

Each head learns from the same states in the same order for the same number of steps. What differs is the number of its
decoder layers, its feed-forward blocks (dense, or experts) and its positions (rotary embedding in every layer, or
iRoPE). The acceptance over the training and at its end is that of `specverify train`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specverify.training.plan import TrainingPlan
from specverify.training.run import train

DENSE, EXPERTS = "dense", "experts"
"""The kinds of feed-forward block."""

NUM_EXPERTS = 4
"""The experts of a layer, the shared one apart; a row takes one of them."""

ROPE, IROPE = "rope", "irope"
"""The kinds of positions: rotary embedding in every layer, or in every other one."""


@dataclass(frozen=True)
class HeadShape:
    """A head of the grid: its layers, one of DENSE and EXPERTS, one of ROPE and IROPE."""

    layers: int
    feed_forward: str
    positions: str

    @property
    def name(self) -> str:
        """The head in a few words: `3 layers, experts, irope`."""
        return f"{self.layers} layer{'s' * (self.layers > 1)}, {self.feed_forward}, {self.positions}"

    @property
    def folder(self) -> str:
        """The name of the head's folder."""
        return f"{self.layers}-{self.feed_forward}-{self.positions}"


def shapes(layers: tuple[int, ...], feed_forward: tuple[str, ...], positions: tuple[str, ...]) -> Iterator[HeadShape]:
    """The grid; a head of one layer has no iRoPE, which leaves out the rotary embedding of every second layer."""
    for count in layers:
        for block in feed_forward:
            for place in positions:
                if place == ROPE or count > 1:
                    yield HeadShape(count, block, place)


@dataclass(frozen=True)
class GridPlan:
    """The options of the bench.

    Attributes:
        model: The target.
        texts: The texts, as in `TrainingPlan`.
        out: The folder of the heads, one folder in it for each.
        steps: The steps of each training.
        measures: The points of each curve after the first.
        minutes: Most minutes of each training, its data included.
        generated: The tokens by which the target continues each prompt.
        threads: The threads of torch; 0 for all cores.
        seed: The seed of weights and order.
        shapes: The heads.
    """

    model: str
    texts: tuple[str, ...]
    out: Path
    steps: int
    measures: int
    minutes: float
    generated: int
    threads: int
    seed: int
    shapes: tuple[HeadShape, ...]


def measure(plan: GridPlan, say: Callable[[str], None]) -> dict[str, Any]:
    """Train every head of the plan, those that are finished in `out` apart, and compare them.

    Raises:
        UnusableInput, MissingInput, Unwritable: As `specverify.training.run.train`.
    """
    rows = []
    for number, shape in enumerate(plan.shapes, 1):
        say(f"head {number} of {len(plan.shapes)}: {shape.name}")
        figures = train(_training(plan, shape), quiet=True)
        rows.append(_row(shape, figures, plan.steps))
    return {
        "model": plan.model,
        "texts": list(plan.texts),
        "steps": plan.steps,
        "prompts": figures["prompts"],
        "ngram_chain": figures["ngram_chain"]["tokens_per_call"],
        "ngram_tree": figures["ngram_tree"]["tokens_per_call"],
        "heads": rows,
    }


def _training(plan: GridPlan, shape: HeadShape) -> TrainingPlan:
    return TrainingPlan(
        "eagle1",
        plan.model,
        plan.texts,
        plan.minutes,
        plan.out / shape.folder,
        plan.out / "states",
        plan.generated,
        layers=shape.layers,
        experts=NUM_EXPERTS if shape.feed_forward == EXPERTS else 0,
        irope=shape.positions == IROPE,
        threads=plan.threads,
        most_steps=plan.steps,
        measures=plan.measures,
        seed=plan.seed,
    )


def _row(shape: HeadShape, figures: dict[str, Any], steps: int) -> dict[str, Any]:
    return {
        "head": shape.name,
        "layers": shape.layers,
        "feed_forward": shape.feed_forward,
        "irope": shape.positions == IROPE,
        "weights": figures["weights"],
        "steps": figures["steps"],
        "finished": figures["steps"] >= steps,
        "seconds": figures["seconds"],
        "loss": next((line["loss"] for line in reversed(figures["curve"]) if line["loss"] is not None), None),
        "chain_tokens_per_call": figures["chain"]["tokens_per_call"],
        "tree_tokens_per_call": figures["tree"]["tokens_per_call"],
        "curve": figures["curve"],
    }
