"""An engine of chains that batches by itself, counts what it accepts, and is right in every token.

Its draft may be degraded where requests run beside each other, or in a setting. Each chain is computed from scratch, so
that nothing but a planted fault makes one request notice another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specverify.adapt import Chains, Generated, Request, blackbox

LENGTH = 3
"""Drafted tokens of a chain."""

OVERLAP = "overlap"
"""The setting in which a step is planned ahead of the results of the step before."""

DEGRADED = ("state of another", "positions off", "stale under overlap", "accepts less", "bonus counted")
"""Faults beside other requests, or under overlap, that leave every token as it is.

`state of another`: the draft reads the last token of the request before. `positions off`: the tokens of the draft stand
a position too far behind its prompt. `stale under overlap`: the draft lacks the token of the step before. `accepts
less`: a right draft is accepted up to its last token but one. `bonus counted`: the target's own token counts as
accepted.
"""

HONEST = ("shorter in batches", "bare beside others", "learns from others")
"""Ways to draft otherwise beside others that are right: a table of lengths by the size of the batch; steps without a
draft, where another request is prefilled; and a draft that repeats what followed a token in any request's text."""

MOST_STEPS = 64
"""Most steps of one call."""


@dataclass
class Lane:
    """A request inside the engine."""

    request: Request
    coins: torch.Generator
    tokens: list[int] = field(default_factory=list)
    proposed: int = 0
    bonuses: int = 0
    by_position: list[int] = field(default_factory=lambda: [0] * LENGTH)
    is_over: bool = False
    last: int = 1

    @property
    def text(self) -> list[int]:
        """The prompt, and the tokens so far."""
        return [*self.request.prompt_ids, *self.tokens]


def row_after(model: Any, tokens: Sequence[int], shift_from: int = 0) -> Tensor:
    """The logits [V] behind the tokens; those from `shift_from` on stand a position too far, if it is not 0."""
    places = torch.arange(len(tokens))
    if shift_from:
        places[shift_from:] += 1
    row: Tensor = model(torch.tensor([list(tokens)]), position_ids=places[None], use_cache=False).logits[0, -1]
    return row.double()


def drawn(row: Tensor, request: Request, coins: torch.Generator) -> int:
    """The next token by the temperature of a request."""
    if not request.temperature:
        return int(row.argmax())
    return int(torch.multinomial((row / request.temperature).softmax(-1), 1, generator=coins))


class Engine:
    """A batch: its lanes, and what a fault or another way to draft makes of them."""

    def __init__(self, model: Any, draft_model: Any, way: str, setting: str) -> None:
        self.model, self.draft_model, self.way = model, draft_model, way
        self.is_overlapped = setting == OVERLAP
        self.lanes: list[Lane] = []
        self.followers: dict[int, int] = {}
        self.has_entered = False

    @property
    def inside(self) -> list[Lane]:
        """The lanes that take steps."""
        return [lane for lane in self.lanes if not lane.is_over]

    def add(self, request: Request) -> None:
        """Let a request enter."""
        self.lanes.append(Lane(request, torch.Generator().manual_seed(request.seed % 2**63)))
        self.has_entered = True

    def chain(self, lane: Lane, number: int, batch: int) -> list[int]:
        """The drafted tokens of a lane, which is the batch's `number`."""
        length = LENGTH
        if batch > 1 and self.way == "shorter in batches":
            length = 1
        if batch > 1 and self.way == "bare beside others" and self.has_entered:
            length = 0
        if self.way == "learns from others":
            return self.learned_chain(lane)
        read_tokens, shift = lane.text, 0
        if batch > 1 and self.way == "state of another":
            read_tokens = [*read_tokens[:-1], self.lanes[number - 1].text[-1]]
        if batch > 1 and self.way == "tie on one prompt" and lane.request.prompt_ids == [4, 1, 4]:
            return [lane.text[0]] * LENGTH
        if batch > 1 and self.way == "positions off":
            shift = len(lane.request.prompt_ids)
        if self.is_overlapped and self.way == "stale under overlap" and lane.tokens:
            read_tokens = read_tokens[: -lane.last]
        chain: list[int] = []
        for _ in range(length):
            chain.append(int(row_after(self.draft_model, [*read_tokens, *chain], shift).argmax()))
        return chain

    def learned_chain(self, lane: Lane) -> list[int]:
        """A chain of what followed each token in the texts of all requests."""
        chain: list[int] = []
        token = lane.text[-1]
        while len(chain) < LENGTH and token in self.followers:
            token = self.followers[token]
            chain.append(token)
        return chain

    def step(self) -> None:
        """A chain and its verification for every request inside."""
        batch = self.inside
        for lane in batch:
            chain = [] if self.draft_model is None else self.chain(lane, self.lanes.index(lane), len(batch))
            lane.proposed += len(chain)
            most = len(chain) - (len(batch) > 1 and self.way == "accepts less")
            new_tokens: list[int] = []
            for place in range(len(chain) + 1):
                new_tokens.append(drawn(row_after(self.model, [*lane.text, *new_tokens]), lane.request, lane.coins))
                if place >= most or new_tokens[-1] != chain[place]:
                    break
                lane.by_position[place] += 1
            lane.bonuses += len(batch) > 1
            self.take(lane, new_tokens)
        self.has_entered = False

    def take(self, lane: Lane, new_tokens: list[int]) -> None:
        """Add the tokens of a step up to the end of the text."""
        lane.last = len(new_tokens)
        for token in new_tokens:
            self.followers[lane.text[-1]] = token
            lane.tokens.append(token)
            if token in lane.request.stops or len(lane.tokens) >= lane.request.max_new_tokens:
                lane.is_over = True
                return

    def answer(self, lane: Lane) -> Generated:
        """The text of a lane and its counts."""
        if self.way == "bonus counted" and lane.bonuses:
            extra = lane.bonuses
            return Generated(lane.tokens, None, lane.proposed + extra, sum(lane.by_position) + extra)
        return Generated(lane.tokens, None, lane.proposed, sum(lane.by_position), lane.by_position)


def counted_batches(way: str = "", *, is_quiet: bool = False, **declared: Any) -> Callable[[], Any]:
    """The engine as a black box; `is_quiet` gives no counts."""

    def generate_many(
        requests: list[Request], actions: list[tuple[str, int]], model: Any, draft_model: Any, setting: str = ""
    ) -> list[Any]:
        engine = Engine(model, draft_model, way, setting)
        for kind, number in (*actions, ("step", MOST_STEPS)):
            if kind == "add":
                engine.add(requests[number])
            elif kind == "cancel":
                engine.lanes[number].is_over = True
            for _ in range(number if kind == "step" else 0):
                engine.step()
        return [lane.tokens if is_quiet else engine.answer(lane) for lane in engine.lanes]

    def generate(
        prompt_ids: list[int], max_new_tokens: int, model: Any, draft_model: Any, temperature: float, seed: int,
        stops: tuple[int, ...],
    ) -> Any:  # fmt: skip
        request = Request(prompt_ids, max_new_tokens, temperature, seed=seed, stops=stops)
        (answer,) = generate_many([request], [("add", 0)], model, draft_model)
        return answer

    return blackbox(
        generate, name="counted-batches", generate_many=generate_many, settings=(OVERLAP,), own_seed=True,
        families=("llama",), least_window=0, ropes=("default",), **declared,
    )  # fmt: skip


open_another = counted_batches("state of another", chains=Chains(LENGTH, "best", "match"))
