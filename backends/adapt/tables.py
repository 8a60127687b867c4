"""Tables: a sampler of whole rounds on given laws, as a backend.

The sampler is what `specverify law --torch` takes: a function of two tables that drafts and accepts one round. Here it
writes whole generations of drawn cases, and its exact law is enumerated in drawn worlds.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specverify.backends.adapt.blackbox import seed_all
from specverify.backends.adapt.generated import tokens_of
from specverify.backends.adapt.models import transformers_model
from specverify.backends.base import Declaration, Unsupported
from specverify.backends.interception.intercept import DecidesTooOften, NotInterceptable, TooManyRuns, exact_law
from specverify.reference.case import Case
from specverify.reference.probability_world import Blocks, GivenTree, World
from specverify.reference.trace import Array, Emitted, Stage, Step, Trace

MOST_COURSES = 20_000
"""Most courses of a sampler's draws in one world."""

Table = Callable[..., Tensor]
"""table(tokens=()) -> log-probabilities of the next token after `tokens` of the round, float64 [vocabulary]."""


def tables(
    samples: Callable[[Table, Table], Any],
    *,
    name: str = "",
    dtypes: tuple[str, ...] = ("float32",),
    max_temperature: float = float("inf"),
) -> Callable[[], "TableSampler"]:
    """A backend's factory, from a sampler of rounds: `samples(target, draft) -> tokens`.

    Both tables give log-probabilities, at the temperature of the case: `target()` before the round, `target((3, 1))`
    after its tokens 3 and 1. The function drafts, accepts, and returns the tokens of one round, at least one; it draws
    from `random`, NumPy or torch, which are seeded before each generation. In cases without a draft, the draft's law is
    uniform.

    Args:
        samples: The sampler.
        name: The backend's name; by default the function's.
        dtypes: Working dtypes of the models behind the tables.
        max_temperature: The highest temperature.
    """
    backend_name = name or str(getattr(samples, "__name__", type(samples).__name__))
    declaration = Declaration(
        name=backend_name,
        device="cpu",
        reveals=frozenset({Stage.EMITTED}),
        dtypes=dtypes,
        drafts=("model",),
        layout_settings=(),
        greedy=False,
        max_temperature=max_temperature,
        draws=(),
        stops=("max_new_tokens",),
        soft_caps="published",
    )
    return lambda: TableSampler(samples, declaration)


class TableSampler:
    """A sampler of rounds, as a backend that reveals its tokens.

    Attributes:
        declaration: Sampling alone, on models with a draft model.
    """

    def __init__(self, samples: Callable[[Table, Table], Any], declaration: Declaration) -> None:
        self.declaration = declaration
        self._samples = samples

    def run(self, case: Case) -> Trace:
        """Write a generation round by round; each round is a step of the trace."""
        seed_all(case.sampling.seed)
        room = case.stops.room(len(case.prompt))
        steps: list[Step] = []
        output: list[int] = []
        while len(output) < room and (not case.steps or len(steps) < case.steps):
            before = [*case.prompt, *output]
            tokens = self._round(*self._laws(case, before))
            kept_tokens = tokens[: room - len(output)]
            finish = "length" if len(output) + len(kept_tokens) == room else None
            steps.append(Step(tuple(before[:-1]), emitted=Emitted(kept_tokens, finish)))
            output += kept_tokens
        return Trace(tuple(steps), tuple(output), steps[-1].emitted.finish if steps and steps[-1].emitted else None)

    def _laws(self, case: Case, before: list[int]) -> tuple[Table, Table]:
        """The tables of target and draft after the tokens `before`."""
        heat = case.sampling.temperature
        target = transformers_model(case.model, case.dtype)
        draft = None if case.draft.model is None else transformers_model(case.draft.model, case.dtype, "draft")

        def law(network: Any) -> Table:
            def after(tokens: Any = ()) -> Tensor:
                row = torch.tensor([[*before, *_ids(tokens)]])
                with torch.no_grad():
                    logits: Tensor = network(row, use_cache=False).logits[0, -1].double()
                return _at_temperature(logits, heat)

            return after

        flat = torch.full((case.model.vocab_size,), 1.0 / case.model.vocab_size, dtype=torch.float64).log()
        return law(target), (lambda tokens=(): flat.clone()) if draft is None else law(draft)

    def _round(self, target: Table, draft: Table) -> tuple[int, ...]:
        """The tokens of one round, at least one."""
        tokens = tokens_of(self._samples(target, draft))
        if not tokens:
            raise TypeError(f"{self.declaration.name} returned no token, expected the tokens of one round")
        return tokens

    def verify(self, given: GivenTree, tape: Array) -> Blocks:
        """See `specverify.backends.base.ExactLaw`; raises Unsupported, since the sampler drafts its own tokens."""
        raise Unsupported(f"{self.declaration.name} drafts its own tokens: it verifies no given tree")

    def samples(self, world: World, seeds: Array) -> Blocks:
        """See `specverify.backends.base.ExactLaw`; raises Unsupported, since rounds have a tree of their own."""
        raise Unsupported(f"{self.declaration.name} drafts a tree of its own: its rounds have lengths of their own")

    def rounds(self, world: World, tape: Array) -> Blocks:
        """Blocks that the last coin of each row of `tape` chooses from the exact law of a round in `world`.

        Raises:
            Unsupported: A round is longer than the world is deep, or the sampler's draws cannot be followed.
        """
        heat = world.sampling.temperature
        rows = [torch.tensor(table, dtype=torch.float64) for table in (world.target, world.drafts[0])]

        def law(table: Tensor) -> Table:
            return lambda tokens=(): _at_temperature(table[world.row(_ids(tokens))], heat)

        try:
            round_law = exact_law(lambda: self._round(law(rows[0]), law(rows[1])), most_runs=MOST_COURSES)
        except DecidesTooOften as why:
            raise TypeError(f"{self.declaration.name}: {'; '.join([*why.shared_numbers, str(why)])}") from None
        except (NotInterceptable, TooManyRuns) as why:
            raise Unsupported(f"{self.declaration.name}: its draws cannot be enumerated: {why}") from None
        return _choose_blocks(round_law, tape, world.shape.height + 1)


def _choose_blocks(law: dict[tuple[int, ...], Fraction], tape: Array, width: int) -> Blocks:
    """The blocks that the last coins choose from a law, each with the interval of the coin that chooses it."""
    blocks = [block for block, mass in law.items() if mass]
    if max(map(len, blocks)) > width:
        raise Unsupported(f"a round of {max(map(len, blocks))} tokens in a world of {width}")
    edges = np.array([0.0, *np.cumsum([float(law[block]) for block in blocks])])
    edges[-1] = 1.0
    block_numbers = np.searchsorted(edges, tape[:, -1], side="right") - 1
    tokens = np.full((len(blocks), width), -1)
    for number, block in enumerate(blocks):
        tokens[number, : len(block)] = block
    low, high = np.zeros(tape.shape), np.ones(tape.shape)
    low[:, -1], high[:, -1] = edges[block_numbers], edges[block_numbers + 1]
    path = np.full((len(tape), width), -1)
    path[:, 0] = 0  # the sampler shows no tree
    return Blocks(path, tokens[block_numbers], low, high)


def _at_temperature(logits: Tensor, temperature: float) -> Tensor:
    return (logits / temperature).log_softmax(-1)


def _ids(tokens: Any) -> tuple[int, ...]:
    """Token ids from a tensor, a list, a tuple or one id."""
    return (tokens,) if isinstance(tokens, int) else tokens_of(tokens)
