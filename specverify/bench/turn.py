"""A turn: one generation for one prompt in one way, with its times and counts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

TARGET = "target-only"
"""The way that every other one is compared with: our engine without a draft."""


@dataclass(frozen=True)
class Turn:
    """One timed generation.

    Attributes:
        prompt: Number of the prompt, or of the dialogue.
        repeat: Number of the round in which it ran.
        way: The name of the way.
        tokens: The text.
        seconds: From the call to the last token.
        steps: Seconds from the call to the end of each step; the first has the first token.
        emitted: Tokens that each step brought.
        prefill_s: Seconds to the end of the prefill; None where the way does not show it.
        stages: Seconds by stage (`specverify.bench.stage_clock.STAGES`); empty where the way shows none.
        accepted: Accepted drafted tokens of each step; empty where the way shows none.
        nodes: Drafted nodes of each tree, without its root.
        height: Levels below the root of each tree.
        draft_calls: Forwards of the draft.
        fallbacks: Reasons why attention took a slower path, with calls.
        paths: Accepted rows of each tree, from the root on; empty where the way shows none.
        kv_mb: MiB of the KV caches at the end of the text, of target and draft; None where the way shows none.
        peak_mb: Most MiB in use during the turn: of the device, or resident; None where the system does not tell.
        target_mb: MiB of the weights of the target; None where the way shows none.
        context: Tokens of the prompt, in a dialogue with its history.
        place: Number of the turn in its dialogue, from 1 on; 0 for a prompt without one.
        kept: Columns of the KV cache that the turn before has left.
        draft_mb: MiB of the weights of the draft, 0 for a draft without weights.
    """

    prompt: int
    repeat: int
    way: str
    tokens: tuple[int, ...]
    seconds: float
    steps: tuple[float, ...]
    emitted: tuple[int, ...]
    prefill_s: float | None = None
    stages: Mapping[str, float] = field(default_factory=dict)
    accepted: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    height: tuple[int, ...] = ()
    draft_calls: int = 0
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    paths: tuple[tuple[int, ...], ...] = ()
    kv_mb: float | None = None
    peak_mb: float | None = None
    target_mb: float | None = None
    draft_mb: float | None = None
    context: int = 0
    place: int = 0
    kept: int = 0

    @property
    def first_token_s(self) -> float:
        """Seconds to the first token."""
        return self.steps[0]

    @property
    def per_token_s(self) -> float | None:
        """Seconds for each token after the first step's; None if that step brought all."""
        after = len(self.tokens) - self.emitted[0]
        return (self.seconds - self.steps[0]) / after if after else None


@dataclass(frozen=True)
class Way:
    """The name of one draft with one tree.

    Attributes:
        name: The name of the way.
        given: The name of the draft alone.
        nodes: The budget of drafted nodes; None where the draft has its own tree.
        depth: Levels below the root; None where the draft has its own tree.
        window: Tokens of its context that the draft sees; None for all.
    """

    name: str
    given: str
    nodes: int | None = None
    depth: int | None = None
    window: int | None = None
