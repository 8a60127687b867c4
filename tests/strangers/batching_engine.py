"""An engine that batches by itself, with mix-ups of its requests to choose from.

Requests step together, a token a step. Each text is computed from scratch, so that nothing but a planted mix-up makes
one request notice another.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from specverify.adapt import Request, blackbox

MIX_UPS = (
    "answers-swapped", "prefix-of-another", "seed-shared", "coins-in-turn", "cancelled-kv", "stops-of-another",
    "settings-of-another", "shortest-prompt", "last-dropped", "last-doubled", "padding-in-text", "limit-of-another",
    "cancels-another", "late-without-first",
)  # fmt: skip
"""The mix-ups, each of two requests."""

SLOTS = 64
"""Most steps of one call."""


@dataclass
class Lane:
    """A request that is inside the engine."""

    request: Request
    text: list[int]
    coins: torch.Generator
    tokens: list[int] = field(default_factory=list)
    is_over: bool = False
    arrival: int = 0


class BatchingEngine:
    """One batch: its lanes, and what a mix-up makes of them."""

    def __init__(self, network: Any, mix_up: str) -> None:
        self.network = network
        self.mix_up = mix_up
        self.lanes: list[Lane] = []
        self.cancelled: list[Lane] = []
        self.steps = 0

    @property
    def inside(self) -> list[Lane]:
        """The lanes that take steps."""
        return [lane for lane in self.lanes if not lane.is_over]

    def add(self, request: Request) -> None:
        """Let a request enter."""
        first = self.lanes[0].request if self.lanes else request
        before = self.inside[-1].request if self.inside else request
        text, seed = list(request.prompt_ids), request.seed
        if self.mix_up == "prefix-of-another" and text[:1] == before.prompt_ids[:1]:
            # A cache of prefixes that takes one token for the whole page of two.
            text[:2] = before.prompt_ids[:2] if len(before.prompt_ids) > 1 < len(text) else text[:2]
        if self.mix_up == "cancelled-kv" and self.cancelled:
            text = [*self.cancelled[-1].text[:1], *text]
        if self.mix_up == "shortest-prompt" and self.inside:
            text = text[-min(len(lane.request.prompt_ids) for lane in self.inside) :]
        if self.mix_up == "seed-shared":
            seed = first.seed
        if self.mix_up == "settings-of-another":
            settings = {"temperature": before.temperature, "top_k": before.top_k}
            request = Request(**{**vars(request), **settings})
        if self.mix_up == "stops-of-another":
            request = Request(**{**vars(request), "stops": first.stops})
        if self.mix_up == "limit-of-another":
            request = Request(**{**vars(request), "max_new_tokens": first.max_new_tokens})
        coins = torch.Generator().manual_seed(seed % 2**63)
        if self.mix_up == "coins-in-turn" and self.lanes:
            coins = self.lanes[0].coins
        self.lanes.append(Lane(request, text, coins, arrival=self.steps))

    def cancel(self, place: int) -> None:
        """End a request whatever it has."""
        self.lanes[place].is_over = True
        self.cancelled.append(self.lanes[place])
        if self.mix_up == "cancels-another" and self.inside:
            self.inside[0].is_over = True

    def step(self) -> None:
        """One token for every request inside."""
        self.steps += 1
        for lane in self.inside:
            row = self.network(torch.tensor([lane.text + lane.tokens]), use_cache=False).logits[0, -1]
            token = draw(row, lane.request, lane.coins)
            lane.tokens.append(token)
            lane.is_over = token in lane.request.stops or len(lane.tokens) >= lane.request.max_new_tokens

    def answers(self) -> list[list[int]]:
        """The texts, in the order in which the requests entered."""
        texts = [lane.tokens for lane in self.lanes]
        if len(texts) < 2:
            return texts
        if self.mix_up == "answers-swapped":
            texts[-2:] = texts[:-3:-1]
        elif self.mix_up == "last-dropped":
            texts = texts[:-1]
        elif self.mix_up == "last-doubled":
            texts[-1] = texts[-2]
        elif self.mix_up == "padding-in-text":
            longest = max(map(len, texts))
            texts = [text + [0] * (longest - len(text)) for text in texts]
        elif self.mix_up == "late-without-first":
            texts = [lane.tokens[1 if lane.arrival else 0 :] for lane in self.lanes]
        return texts


def draw(row: torch.Tensor, request: Request, coins: torch.Generator) -> int:
    """The next token by the settings of a request, from logits [V]."""
    if not request.temperature:
        return int(row.argmax())
    scores = row.double() / request.temperature
    if request.top_k:
        scores = scores.masked_fill(scores < scores.topk(min(request.top_k, len(scores))).values[-1], -torch.inf)
    return int(torch.multinomial(scores.softmax(-1), 1, generator=coins))


def batching(mix_up: str = "", own_seed: bool = True, crash_at: int | None = None) -> Callable[[], Any]:
    """The engine as a black box; it ends its process in a step of a request that begins with `crash_at`."""

    def generate_many(requests: list[Request], actions: list[tuple[str, int]], model: Any) -> list[list[int]]:
        if any(request.prompt_ids[0] == crash_at for request in requests):
            raise RuntimeError("a kernel failed")
        engine = BatchingEngine(model, mix_up)
        for kind, number in (*actions, ("step", SLOTS)):
            if kind == "add":
                engine.add(requests[number])
            elif kind == "cancel":
                engine.cancel(number)
            for _ in range(number if kind == "step" else 0):
                engine.step()
        return engine.answers()

    def generate(
        prompt_ids: list[int], max_new_tokens: int, model: Any, temperature: float, top_k: int, seed: int,
        stops: tuple[int, ...],
    ) -> list[int]:  # fmt: skip
        request = Request(prompt_ids, max_new_tokens, temperature, top_k, seed=seed, stops=stops)
        (answer,) = generate_many([request], [("add", 0)], model)
        return answer

    return blackbox(
        generate, name="batching", generate_many=generate_many, own_seed=own_seed, families=("llama",), least_window=0,
        ropes=("default",),
    )  # fmt: skip


open_ = batching()
open_mixed_up = batching(os.environ.get("MIX_UP", ""))
