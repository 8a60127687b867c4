"""Engines with weights of their own, as servers have them: no oracle knows their law, and they show tokens alone.

The logits after a text follow from its last two tokens. One engine decodes plainly, the others speculate with a chain
of two drafted tokens, with a fault or none.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from specverify.adapt import Declaration
from specverify.reference.case import Case
from specverify.reference.trace import Array, Emitted, Stage, Step, Trace

SPREAD = 2.5
"""Standard deviation of the logits."""

DRAFT_ERROR = 1.0
"""Standard deviation of the draft's error of a logit."""

DEPTH = 2
"""Tokens of a drafted chain."""


@lru_cache(maxsize=100_000)
def logits(vocab: int, last: tuple[int, ...], seed: int = 7) -> Array:
    """The target's logits [vocab] after a text that ends in `last`."""
    return SPREAD * np.random.default_rng([seed, vocab, *last]).normal(size=vocab)


def law(row: Array, temperature: float) -> Array:
    """The law of the next token at a temperature above 0."""
    weights = np.exp((row - row.max()) / temperature)
    return np.asarray(weights / weights.sum())


class Engine:
    """An engine that shows what it emits.

    Args:
        fault: `hot` (one and a half times the temperature), `bonus` (the token after a whole block without
            temperature), `greedy` (no sampling), `parting` (another greedy token), `unsteady` (a greedy token by a coin
            that no seed reaches), `frozen` (every request on one seed), or empty.
        drafted: Whether it speculates.
        temperature: The highest temperature that it declares.
    """

    def __init__(self, fault: str = "", drafted: bool = True, temperature: float = 8.0) -> None:
        self._fault = fault
        self._drafted = drafted
        self._free = np.random.default_rng()
        self.declaration = Declaration(
            name=fault or ("speculating" if drafted else "plain"),
            device="cpu",
            reveals=frozenset({Stage.EMITTED}),
            dtypes=("float32",),
            layout_settings=(),
            max_temperature=temperature,
            draws=(),
            stops=("max_new_tokens",),
        )

    def run(self, case: Case) -> Trace:
        """Decode the request of the case."""
        num_tokens = case.stops.max_new_tokens
        seed = 0 if self._fault == "frozen" else case.sampling.seed
        coins, output = np.random.default_rng(seed), list[int]()
        while len(output) < num_tokens:
            output += self._block(case, [*case.prompt, *output], coins)
        tokens = tuple(output[:num_tokens])
        return Trace((Step(case.prefix, emitted=Emitted(tokens)),), tokens, "length")

    def _block(self, case: Case, text: list[int], coins: np.random.Generator) -> list[int]:
        """The tokens of one round."""
        vocab, warmth = case.model.vocab_size, case.sampling.temperature
        if not warmth or self._fault == "greedy":
            return [self._best(vocab, text)]
        hot = warmth * (1.5 if self._fault == "hot" else 1.0)
        block: list[int] = []
        for _ in range(DEPTH if self._drafted else 0):
            row, context = logits(vocab, tuple(text[-2:])), tuple(text[-2:])
            p = law(row, hot)
            q = law(row + DRAFT_ERROR / SPREAD * logits(vocab, context, 8), warmth)
            token = int(coins.choice(vocab, p=q))
            if coins.random() >= p[token] / q[token]:
                residual = np.maximum(p - q, 0.0)
                return [*block, int(coins.choice(vocab, p=residual / residual.sum()))]
            block, text = [*block, token], [*text, token]
        last = law(logits(vocab, tuple(text[-2:])), 1.0 if self._fault == "bonus" else hot)
        return [*block, int(coins.choice(vocab, p=last))]

    def _best(self, vocab: int, text: Sequence[int]) -> int:
        """The greedy token."""
        ranked = np.argsort(-logits(vocab, tuple(text[-2:])))
        wrong = self._fault == "parting" and len(text) % 5 == 0
        wrong = wrong or (self._fault == "unsteady" and self._free.random() < 0.2)
        return int(ranked[1 if wrong else 0])


def plain() -> Engine:
    """The engine without speculation, and without fault."""
    return Engine(drafted=False)


def plain_greedy() -> Engine:
    """The same, which cannot sample."""
    return Engine(drafted=False, temperature=0.0)


def right() -> Engine:
    """The engine with speculation, and without fault."""
    return Engine()


def hot() -> Engine:
    """One and a half times the temperature."""
    return Engine("hot")


def bonus() -> Engine:
    """The token after a whole block is drawn without temperature."""
    return Engine("bonus")


def greedy() -> Engine:
    """Sampling that is none."""
    return Engine("greedy")


def frozen() -> Engine:
    """Every request on one seed."""
    return Engine("frozen")


def parting() -> Engine:
    """Greedy text with wrong tokens."""
    return Engine("parting")


def unsteady() -> Engine:
    """Greedy text that changes from run to run."""
    return Engine("unsteady")
