"""A turn: one generation for one prompt in one way, with its times and counts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

TARGET = "target-only"
"""The way that every other one is compared with: our engine without a draft."""


STORED = "stored"
"""The kind of a draft's own weights, beside those of `specverify.reference.quantisation.QUANTISED`."""


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
        stage_steps: For each stage of a step, its seconds in each step; empty where the way shows none. What a batch
            spends together counts for each of its requests.
        accepted: Accepted drafted tokens of each step; empty where the way shows none.
        nodes: Drafted nodes of each tree, without its root.
        height: Levels below the root of each tree.
        draft_calls: Forwards of the draft.
        fallbacks: Reasons why attention took a slower path, with calls.
        attention_calls: Calls of attention, one for each layer of each forward; 0 where the way counts none.
        paths: Accepted rows of each tree, from the root on; empty where the way shows none.
        target_kv_mb: MiB of the KV caches of the target at the end of the text; None where the way shows none.
        draft_kv_mb: The same of the draft, 0 for a draft without rows; None where the way shows none.
        peak_mb: Most MiB of tensors that the way holds at once, weights included, measured in a run that is not timed;
            None where it was not measured.
        target_mb: MiB of the weights of the target; None where the way shows none.
        context: Tokens of the prompt, in a dialogue with its history.
        place: Number of the turn in its dialogue, from 1 on; 0 for a prompt without one.
        kept: Columns of the KV cache that the turn before has left.
        draft_mb: MiB of the weights of the draft, 0 for a draft without weights.
        draft_parameters: Number of the weights of the draft; None where the way shows none.
        batch: Requests that stepped together; 0 for a prompt by itself, without a session.
        prefix: Tokens of the beginning that all dialogues were given; 0 for none.
        history: Tokens to which the messages before the last one were brought; 0 for their own.
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
    stage_steps: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    target_kv_mb: float | None = None
    draft_kv_mb: float | None = None
    draft_parameters: int | None = None
    batch: int = 0
    prefix: int = 0
    history: int = 0
    peak_mb: float | None = None
    target_mb: float | None = None
    draft_mb: float | None = None
    context: int = 0
    place: int = 0
    kept: int = 0
    attention_calls: int = 0

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
        chain: Whether the tree is a chain of `depth` tokens.
        weights: Kind of quantised weights of the draft; empty for its own.
        vocabulary: Number of tokens that the draft can name; None for all of its own.
    """

    name: str
    given: str
    nodes: int | None = None
    depth: int | None = None
    window: int | None = None
    chain: bool = False
    weights: str = ""
    vocabulary: int | None = None
