"""Acceptance for many requests in one call, which torch.compile captures.

The programs of `rules.py` run over a batch already. Here the trees of a batch are padded to one shape: rows and
requests are dynamic sizes of the captured graph. Levels and siblings are rounded up to powers of two, since the
programs unroll their loops over them. So a server captures few graphs, however its trees differ.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from backends.engine.sampling.coins import Below, Coins, Inverse
from backends.engine.sampling.forest import Forest
from backends.engine.sampling.question import Question
from backends.engine.sampling.seams import SamplingSeams
from backends.engine.sampling.verify import by_rule
from reference.rules import Rule
from reference.tape import KINDS

GRAPHS = 64
"""Graphs that may be captured for one program, before torch runs it without capture."""

Program = tuple[Rule, bool, SamplingSeams]
"""The key of a program: the rule, whether tokens were removed, and the seams."""

Answers = tuple[Tensor, Tensor, Tensor, Tensor]
"""Accepted rows [B, levels + 1], -1 behind the last one; the tokens after them [B]; places of coins and who read."""


@dataclass(frozen=True)
class Padded:
    """The questions of B requests as tensors of one shape: N rows, K siblings, V tokens.

    Attributes:
        token: int64 [B, N].
        parent: int64 [B, N].
        children: int64 [B, N, K]; K is a power of two.
        depth: int64 [B, N].
        present: bool [B, N]; False for rows that pad a tree.
        law: [B, N, V].
        bonus: [B, N, V].
        told: [B, N, V].
        uniforms: [B, coins].
        nodes: int64 [B]; the number of nodes by which each request's coins are placed.
        height: Levels of the deepest tree, rounded up to a power of two.
    """

    token: Tensor
    parent: Tensor
    children: Tensor
    depth: Tensor
    present: Tensor
    law: Tensor
    bonus: Tensor
    told: Tensor
    uniforms: Tensor
    nodes: Tensor
    height: int


class PlacedCoins(Coins):
    """The coins of requests whose tapes have different numbers of nodes; it notes the places that were read."""

    def __init__(self, uniforms: Tensor, nodes: Tensor, below: Below, inverse: Inverse) -> None:
        super().__init__(uniforms, 0, False, below, inverse)
        self._nodes = nodes
        self._record = True

    def place(self, kind: str, node: Tensor) -> Tensor:
        """See `Coins.place`."""
        return 3 * self._nodes if kind == "bonus" else KINDS.index(kind) * self._nodes + node

    def _narrow(self, place: Tensor, low: Tensor, high: Tensor, asked: Tensor) -> None:
        self.spent.append((place, asked))


def padded(questions: list[Question]) -> Padded:
    """The questions as one batch of two requests or more: torch captures sizes of 1 as constants."""
    asked = questions if len(questions) > 1 else questions * 2
    rows = max(2, *(one.law.shape[1] for one in asked))
    siblings = power_of_two(max(one.trees.children.shape[2] for one in asked))
    coins = max(one.dice.uniforms.shape[1] for one in asked)

    def wide(tensors: list[Tensor], *sizes: int) -> Tensor:
        """[B, *sizes] of tensors [1, ...]; zeros pad each dimension at its end."""
        out = tensors[0].new_zeros(len(tensors), *sizes)
        for lane, one in enumerate(tensors):
            out[lane][tuple(slice(size) for size in one.shape[1:])] = one[0]
        return out

    vocab = asked[0].law.shape[-1]
    return Padded(
        wide([one.trees.token for one in asked], rows),
        wide([one.trees.parent for one in asked], rows),
        wide([one.trees.children for one in asked], rows, siblings),
        wide([one.trees.depth for one in asked], rows),
        wide([one.trees.present for one in asked], rows),
        wide([one.law for one in asked], rows, vocab),
        wide([one.bonus for one in asked], rows, vocab),
        wide([one.told for one in asked], rows, vocab),
        wide([one.dice.uniforms for one in asked], coins),
        torch.tensor([one.dice.nodes for one in asked], device=asked[0].law.device),
        power_of_two(max(one.trees.height for one in asked)),
    )


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number` and at least 1."""
    return 1 << max(0, number - 1).bit_length()


@dataclass(frozen=True)
class BatchedVerify:
    """Acceptance in one captured call for all requests of a batch that share rule and vocabulary.

    Attributes:
        backend: What runs the captured graphs: a backend of torch.compile, such as `eager` or `inductor`.
        padded: From questions to one batch.
        captured: The captured programs, by rule, whether tokens were removed, and seams.
    """

    backend: str = "eager"
    padded: Callable[[list[Question]], Padded] = padded
    captured: dict[Any, Callable[..., Any]] = field(default_factory=dict, compare=False)

    def __call__(self, questions: list[Question], seams: SamplingSeams) -> list[tuple[list[int], int]]:
        """The accepted rows of each question, root first, and the token after them; its coins note what was spent.

        All questions are of one kind (`Question.kind`).
        """
        batch, first = self.padded(questions), questions[0]
        path, token, places, asked = self.ask((first.rule, first.removed, seams), batch)
        # One transfer for the rows of all requests.
        rows, last = path.tolist(), token.tolist()
        for lane, one in enumerate(questions):
            one.dice.spent += [(at[lane : lane + 1], by[lane : lane + 1]) for at, by in zip(places, asked, strict=True)]
        return [([row for row in rows[lane] if row >= 0], last[lane]) for lane in range(len(questions))]

    def ask(self, key: Program, batch: Padded) -> Answers:
        """Run the captured program of `key` on `batch`, and capture it first if it is new."""
        if key not in self.captured:
            self.captured[key] = torch.compile(asking(*key), dynamic=True, fullgraph=True, backend=self.backend)
        with torch._dynamo.config.patch(recompile_limit=GRAPHS, accumulated_recompile_limit=16 * GRAPHS):
            answers: Answers = self.captured[key](batch.height, *tensors_of(batch))
        return answers


TENSORS = ("token", "parent", "children", "depth", "present", "law", "bonus", "told", "uniforms", "nodes")
"""The tensors of `Padded`, in the order in which a captured program takes them."""


def tensors_of(batch: Padded) -> list[Tensor]:
    """The TENSORS of `batch`, in their order."""
    return [getattr(batch, name) for name in TENSORS]


def asking(rule: Rule, removed: bool, seams: SamplingSeams) -> Callable[..., Answers]:
    """The program that is captured: from the height and TENSORS to rows, tokens, and the places that were read."""

    def asked(
        height: int,
        token: Tensor,
        parent: Tensor,
        children: Tensor,
        depth: Tensor,
        present: Tensor,
        law: Tensor,
        bonus: Tensor,
        told: Tensor,
        uniforms: Tensor,
        nodes: Tensor,
    ) -> Answers:
        dice = PlacedCoins(uniforms, nodes, seams.below, seams.inverse)
        trees = Forest(token, parent, children, depth, present, height)
        path, last, _ = by_rule(trees, law, told, dice, rule, removed, seams, bonus)
        places = torch.stack([place for place, _ in dice.spent])
        return path, last, places, torch.stack([mine for _, mine in dice.spent])

    return asked
