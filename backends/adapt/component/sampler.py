"""Samplers: functions that accept drafted tokens by the laws of target and draft.

A sampler takes the coins of its request, or draws random numbers of its own. In the second case its law on given tables
is enumerated from every course of its draws (`specverify.backends.interception`), and in generations it is seeded by
the coins.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from specverify.backends.adapt.blackbox import seed_all
from specverify.backends.adapt.component.contract import Component, Contract
from specverify.backends.base import Unsupported
from specverify.backends.engine.sampling.coins import Coins
from specverify.backends.engine.sampling.forest import Forest
from specverify.backends.engine.seams import Seams
from specverify.backends.interception.intercept import DecidesTooOften, NotInterceptable, TooManyRuns, exact_law
from specverify.reference.trace import Stage

SAMPLER = Contract(
    kind="sampler",
    stage=Stage.ACCEPTED,
    offers={
        "tokens": "int64 [nodes]: the token of each node",
        "parent": "int64 [nodes]: the row of each node's parent; the root is row 0 and its own parent",
        "p": "float [nodes, vocabulary]: the target's law after each node",
        "q": "float [nodes, vocabulary]: the law from which each node's token was drawn, before the tokens of earlier"
        " siblings were removed; one-hot where the token was not drawn; row 0 means nothing",
        "accept_coins": "float [nodes]: the uniform number of each node's acceptance; row 0 means nothing",
        "bonus_coin": "float []: the uniform number of the token after the path",
    },
    needs=(("tokens",), ("p",)),
    returns="the accepted rows from the root (0) downwards, and the token after the last of them",
    judged_by=("acceptance.law-exact", "acceptance.law-joint", "acceptance.*", "lossless.distribution"),
)

COINS = ("accept_coins", "bonus_coin")

MOST_COURSES = 20_000
"""Most courses of a sampler's draws in one tree; a sampler with more is tested on drawn blocks alone."""

MOST_LAWS = 512
"""Laws that are remembered: drafting in a world leads to the same trees again and again."""

Answer = tuple[tuple[int, ...], int]
"""Accepted rows, root first, and the token after them."""


class Sampler:
    """A sampler in our engine.

    Attributes:
        takes_coins: Whether it takes its uniform numbers; otherwise it draws its own.
        exact: Whether its own draws are enumerated now, so that the answer is chosen by the bonus coin from the law.
    """

    def __init__(self, component: Component, float32: bool) -> None:
        self._component = component
        self._float32 = float32
        self.takes_coins = bool(component.parameters & set(COINS))
        self.exact = False
        self._laws: dict[bytes, dict[Answer, Fraction]] = {}

    def plant_into(self, seams: Seams) -> Seams:
        """The engine with this sampler for every rule."""
        return replace(seams, sampling=replace(seams.sampling, verifier=self._verify))

    @contextmanager
    def enumerating(self) -> Iterator[None]:
        """Enumerate the sampler's own draws inside the `with`."""
        self.exact = not self.takes_coins
        try:
            yield
        finally:
            self.exact = False

    def _verify(self, trees: Forest, target: Tensor, proposal: Tensor, dice: Coins) -> tuple[Tensor, Tensor]:
        """See `SamplingSeams.verifier`; one call of the function for each request."""
        if self._float32:
            target, proposal = target.float(), proposal.float()
        if self.exact:
            answers = self._answers_by_law(trees, target, proposal, dice)
        else:
            answers = [self._call(trees, target, proposal, dice, request) for request in range(len(target))]
        device = target.device
        path = torch.full((len(answers), trees.height + 1), -1, dtype=torch.long, device=device)
        for request, (rows, _) in enumerate(answers):
            if len(rows) > trees.height + 1:
                raise self._component.failure(f"{self._component.name}: a path of {len(rows)} rows in a tree that is"
                                             f" {trees.height} deep")  # fmt: skip
            path[request, : len(rows)] = torch.tensor(rows)
        return path, torch.tensor([token for _, token in answers], device=device)

    def _call(self, trees: Forest, target: Tensor, proposal: Tensor, dice: Coins, request: int) -> Answer:
        """The answer for one request, on its coins or on draws of its own that they seed."""
        coins = dice.uniforms[request]
        if not self.takes_coins:
            digest = hashlib.sha256(coins.cpu().numpy().tobytes()).digest()
            seed_all(int.from_bytes(digest[:8], "little") >> 1)
            return self._ask(trees, target, proposal, request)
        rows = torch.arange(trees.token.shape[1], device=coins.device)
        return self._ask(
            trees, target, proposal, request, coins[dice.place("accept", rows)], coins[dice.place("bonus", rows)][0]
        )

    def _ask(self, trees: Forest, target: Tensor, proposal: Tensor, request: int, *coins: Tensor) -> Answer:
        """Call the function for one request; rows that its tree does not have are left out."""
        present_rows = trees.present[request].nonzero()[:, 0]
        place = {int(row): index for index, row in enumerate(present_rows)}
        coin_arguments: dict[str, Any] = (
            dict(zip(COINS, (coins[0][present_rows], coins[1]), strict=True)) if coins else {}
        )
        answer = self._component(
            tokens=trees.token[request, present_rows],
            parent=torch.tensor([place[int(up)] for up in trees.parent[request, present_rows]]),
            p=target[request, present_rows].clone(),
            q=proposal[request, present_rows].clone(),
            **coin_arguments,
        )
        path, bonus = self._component.walk(answer, len(present_rows), target.shape[-1])
        return tuple(int(present_rows[row]) for row in path), bonus

    def _answers_by_law(self, trees: Forest, target: Tensor, proposal: Tensor, dice: Coins) -> list[Answer]:
        """The answers that the bonus coins choose from the exact laws of the requests' trees."""
        laws = [self._law(trees, target, proposal, request) for request in range(len(target))]
        widest = max(map(len, laws))
        weights = torch.zeros(len(laws), widest, dtype=torch.float64)
        for request, law in enumerate(laws):
            weights[request, : len(law)] = torch.tensor([float(mass) for mass in law.values()])
        every = torch.ones(len(laws), dtype=torch.bool, device=target.device)
        place = dice.place("bonus", torch.zeros(len(laws), dtype=torch.long, device=target.device))
        outcomes = dice.choose(place, weights.to(target.device), every)
        return [list(law)[int(outcome)] for law, outcome in zip(laws, outcomes, strict=True)]

    def _law(self, trees: Forest, target: Tensor, proposal: Tensor, request: int) -> dict[Answer, Fraction]:
        """The law of the answers for one request, remembered by its tree and laws."""
        parts = (trees.token, trees.present, trees.parent, target, proposal)
        key = b"".join(part[request].contiguous().cpu().numpy().tobytes() for part in parts)
        if key not in self._laws:
            if len(self._laws) >= MOST_LAWS:
                self._laws.clear()
            try:
                law = exact_law(lambda: self._ask(trees, target, proposal, request), most_runs=MOST_COURSES)
            except DecidesTooOften as why:
                reasons = "; ".join([*why.shared_numbers, str(why)])
                raise self._component.failure(f"{self._component.name}: {reasons}") from None
            except (NotInterceptable, TooManyRuns) as why:
                raise Unsupported(f"{self._component.name}: its own draws cannot be enumerated: {why}") from None
            self._laws[key] = {answer: mass for answer, mass in law.items() if mass}
        return self._laws[key]
