"""Acceptance for many requests in one call, which torch.compile captures.

The programs of `rules.py` run over a batch already. Here the trees of a batch are padded to one shape: rows and
requests are dynamic sizes of the captured graph, so that one graph serves every size of batch. Levels and siblings are
rounded up to powers of two, since the programs unroll their loops over them. So a server captures few graphs, however
its trees differ.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import _config as symbol_settings

from specverify.backends.engine.sampling.coins import Below, Coins, Inverse
from specverify.backends.engine.sampling.forest import Forest
from specverify.backends.engine.sampling.question import Question
from specverify.backends.engine.sampling.rules import BATCHED, PROGRAMS
from specverify.backends.engine.sampling.seams import SamplingSeams
from specverify.backends.engine.sampling.verify import by_rule
from specverify.backends.engine.uploads import upload
from specverify.reference.rules import Rule
from specverify.reference.tape import KINDS

GRAPHS = 64
"""Graphs that may be captured for one program, before torch runs it without capture."""

Program = tuple[Rule, bool, SamplingSeams]
"""The key of a program: the rule, whether tokens were removed, and the seams."""

Answers = tuple[Tensor, Tensor, Tensor, Tensor]
"""Accepted rows [B, levels + 1], -1 behind the last one; the tokens after them [B]; places of coins and who read."""


@dataclass(frozen=True)
class PaddedBatch:
    """The questions of B requests as tensors of one shape: N rows, K siblings, V tokens.

    Attributes:
        token: int64 [B, N].
        parent: int64 [B, N].
        children: int64 [B, N, K]; K is a power of two.
        depth: int64 [B, N].
        present: bool [B, N]; False for rows that pad a tree.
        law: [B, N, V].
        bonus: [B, N, V].
        proposal: [B, N, V].
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
    proposal: Tensor
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

    def part(self, uniforms: Tensor, share: Callable[[Tensor], Tensor]) -> "PlacedCoins":
        """See `Coins.part`."""
        return PlacedCoins(uniforms, share(self._nodes), self._below, self._inverse)

    def _narrow(self, place: Tensor, low: Tensor, high: Tensor, active: Tensor) -> None:
        self.spent.append((place, active))


def pad_questions(questions: list[Question]) -> PaddedBatch:
    """The questions as one batch of two requests or more: torch captures sizes of 1 as constants."""
    batch = questions if len(questions) > 1 else questions * 2
    rows = max(2, *(question.law.shape[1] for question in batch))
    siblings = power_of_two(max(question.trees.children.shape[2] for question in batch))
    coins = max(question.dice.uniforms.shape[1] for question in batch)

    def pad_tensors(tensors: list[Tensor], *sizes: int) -> Tensor:
        """[B, *sizes] of tensors [1, ...]; zeros pad each dimension at its end."""
        out = tensors[0].new_zeros(len(tensors), *sizes)
        for lane, tensor in enumerate(tensors):
            out[lane][tuple(slice(size) for size in tensor.shape[1:])] = tensor[0]
        return out

    vocab = batch[0].law.shape[-1]
    return PaddedBatch(
        pad_tensors([question.trees.token for question in batch], rows),
        pad_tensors([question.trees.parent for question in batch], rows),
        pad_tensors([question.trees.children for question in batch], rows, siblings),
        pad_tensors([question.trees.depth for question in batch], rows),
        pad_tensors([question.trees.present for question in batch], rows),
        pad_tensors([question.law for question in batch], rows, vocab),
        pad_tensors([question.bonus for question in batch], rows, vocab),
        pad_tensors([question.proposal for question in batch], rows, vocab),
        pad_tensors([question.dice.uniforms for question in batch], coins),
        upload(torch.tensor([question.dice.nodes for question in batch]), batch[0].law.device),
        power_of_two(max(question.trees.height for question in batch)),
    )


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number` and at least 1."""
    return 1 << max(0, number - 1).bit_length()


def kind_of(question: Question) -> tuple[object, ...] | None:
    """The facts that requests share where they are asked together; None for a request that is asked alone."""
    if PROGRAMS[question.rule.name] not in BATCHED or not question.by_program:
        return None
    return question.rule, question.removed, question.law.shape[-1], question.law.dtype


@dataclass(frozen=True)
class BatchedVerify:
    """Acceptance in one captured call for all requests of a batch that share rule and vocabulary.

    Attributes:
        backend: What runs the captured graphs: a backend of torch.compile, such as `eager` or `inductor`.
        pad_questions: From questions to one batch.
        programs: The captured programs, by rule, whether tokens were removed, and seams.
        fallbacks: Why calls ran without a capture, since `take_fallbacks` was called last.
    """

    backend: str = "eager"
    pad_questions: Callable[[list[Question]], PaddedBatch] = pad_questions
    programs: dict[Any, Callable[..., Any]] = field(default_factory=dict, compare=False)
    fallbacks: Counter[str] = field(default_factory=Counter, compare=False)

    def take_fallbacks(self) -> Counter[str]:
        """The `fallbacks`, which are counted from zero again."""
        taken = self.fallbacks.copy()
        self.fallbacks.clear()
        return taken

    def __call__(self, questions: list[Question], seams: SamplingSeams) -> list[tuple[list[int], int]]:
        """The accepted rows of each question, root first, and the token after them; its coins note what was spent.

        All questions are of one kind (`kind_of`).
        """
        batch = self.pad_questions(questions)
        first = questions[0]
        path, token, places, activities = self.ask((first.rule, first.removed, seams), batch)
        # One transfer for the rows and tokens of all requests.
        rows = torch.cat([path, token[:, None]], 1).tolist()
        for lane, question in enumerate(questions):
            question.dice.spent += [
                (place[lane : lane + 1], active[lane : lane + 1])
                for place, active in zip(places, activities, strict=True)
            ]
        return [([row for row in path_rows if row >= 0], bonus) for *path_rows, bonus in rows[: len(questions)]]

    def ask(self, key: Program, batch: PaddedBatch) -> Answers:
        """Run the captured program of `key` on `batch`, and capture it first if it is new."""
        if key not in self.programs:
            self.programs[key] = torch.compile(
                acceptance_program(*key), dynamic=True, fullgraph=True, backend=self.backend
            )
        # By default torch takes sizes that are equal at the first capture for one size: as many requests as siblings.
        with (
            torch._dynamo.config.patch(recompile_limit=GRAPHS, accumulated_recompile_limit=16 * GRAPHS),
            symbol_settings.patch(use_duck_shape=False),  # type: ignore[attr-defined]  # made while torch is imported
        ):
            answers: Answers = self.programs[key](batch.height, *tensors_of(batch))
        return answers


TENSORS = ("token", "parent", "children", "depth", "present", "law", "bonus", "proposal", "uniforms", "nodes")
"""The tensors of `PaddedBatch`, in the order in which a captured program takes them."""


def tensors_of(batch: PaddedBatch) -> list[Tensor]:
    """The TENSORS of `batch`, in their order."""
    return [getattr(batch, name) for name in TENSORS]


def acceptance_program(rule: Rule, removed: bool, seams: SamplingSeams) -> Callable[..., Answers]:
    """The program that is captured: from the height and TENSORS to rows, tokens, and the places that were read."""

    def decide(
        height: int,
        token: Tensor,
        parent: Tensor,
        children: Tensor,
        depth: Tensor,
        present: Tensor,
        law: Tensor,
        bonus: Tensor,
        proposal: Tensor,
        uniforms: Tensor,
        nodes: Tensor,
    ) -> Answers:
        dice = PlacedCoins(uniforms, nodes, seams.below, seams.inverse)
        trees = Forest(token, parent, children, depth, present, height)
        path, last, _ = by_rule(trees, law, proposal, dice, rule, removed, seams, bonus)
        places = torch.stack([place for place, _ in dice.spent])
        return path, last, places, torch.stack([active for _, active in dice.spent])

    return decide
