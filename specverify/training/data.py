"""The data of a training: held-out texts, and shards of continuations.

Held-out texts are made in float32, shards in the quicker dtype until a share of the time is used.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from specverify.setup.errors import UnusableInput
from specverify.training.acceptance import HeldOutText
from specverify.training.plan import CACHE, TrainingPlan
from specverify.training.states import StateCache
from specverify.training.target import Target, states_of, texts_digest
from specverify.training.texts import Texts

FIRST_SHARD, LARGEST_SHARD = 16, 64
"""The texts of the first shard, and of the largest."""

SHARD_S = 40.0
"""The seconds that a shard shall take, so that a kill costs less than a minute; a shard of one text may take longer."""

WINDOW = 128
"""The prompts that are sorted by length together, so that those of a shard need little padding."""

LONGEST_PROMPT = 256
"""Most tokens of a prompt; of a longer one the last ones are used."""

JUDGED_TOKENS = 64
"""The tokens by which the target continues each held-out prompt."""

LEAST_TOKENS = 64
"""The fewest tokens of text that a head is trained on."""


@dataclass(frozen=True)
class Data:
    """The texts and states that a run learns from.

    Attributes:
        cache: The shards; none where the target runs beside the head.
        learned: The prompts to learn from, as tokens, those of similar length together.
        watched, judged: The held-out texts; see `Texts`.
    """

    cache: StateCache
    learned: list[list[int]]
    watched: list[HeldOutText]
    judged: list[HeldOutText]


def open_cache(plan: TrainingPlan, target: Target, texts: Texts) -> StateCache:
    """The cache of the plan's target and texts.

    Raises:
        UnusableInput: As `StateCache`.
    """
    reads = states_of(plan.kind, target.layers, plan.layers)
    lengths = (plan.generated, WINDOW, LONGEST_PROMPT, JUDGED_TOKENS)
    digest = texts_digest(target.digest, texts.digest, str(reads), str(lengths))
    return StateCache(plan.cache or CACHE / digest[:16], digest, reads)


def prepare_data(
    cache: StateCache,
    plan: TrainingPlan,
    target: Target,
    texts: Texts,
    *,
    goes_on: Callable[[], bool],
    stopped: Callable[[], bool],
    say: Callable[[str], None],
    advance: Callable[[str], None] = lambda note: None,
) -> Data:
    """The data of a run: what the cache lacks is made while `goes_on` says so, one shard at least.

    For a plan whose target runs beside the head the held-out texts alone are made. `say` is given lines that stay, and
    `advance` a note after each forward of the target.

    Raises:
        UnusableInput: The texts have too few tokens.
        Stopped: `stopped` said so.
        Unwritable: The cache cannot be written.
    """
    encoded = target.encode(texts.learned, LONGEST_PROMPT)
    learned = [
        text for first in range(0, len(encoded), WINDOW) for text in sorted(encoded[first : first + WINDOW], key=len)
    ]
    if sum(map(len, learned)) < LEAST_TOKENS:
        raise UnusableInput(
            f"--text: {sum(map(len, learned))} tokens to learn from are too few; {LEAST_TOKENS} are needed"
        )
    if cache.held_out("judged") is None:
        count = len(texts.watched) + len(texts.judged)
        say(f"the target continues {count} held-out prompts by {JUDGED_TOKENS} tokens, in float32")
        watched, judged = (target.encode(prompts, LONGEST_PROMPT) for prompts in (texts.watched, texts.judged))
        if not watched or not judged:
            raise UnusableInput("--text: the held-out prompts have too few tokens; two are needed in each")
        # Side by side: a forward of few rows costs nearly as much as one of many.
        held_out = target.continue_prompts(
            [*watched, *judged],
            JUDGED_TOKENS,
            cache.reads,
            stopped,
            lambda count: advance(f"held-out prompts: {count} of {JUDGED_TOKENS} tokens each"),
        )
        cache.hold_out("watched", held_out[: len(watched)])
        cache.hold_out("judged", held_out[len(watched) :])
    texts_held_out = cache.held_out("watched"), cache.held_out("judged")
    assert texts_held_out[0] is not None
    assert texts_held_out[1] is not None
    if plan.online:
        target.narrow(quicker_dtype(target.device.type))
    else:
        _continue(cache, plan, target, learned, goes_on=goes_on, stopped=stopped, say=say, advance=advance)
    return Data(cache, learned, texts_held_out[0], texts_held_out[1])


def _continue(
    cache: StateCache,
    plan: TrainingPlan,
    target: Target,
    prompts: list[list[int]],
    *,
    goes_on: Callable[[], bool],
    stopped: Callable[[], bool],
    say: Callable[[str], None],
    advance: Callable[[str], None],
) -> None:
    """Add shards of continuations after those of the cache; see `prepare_data`."""

    def tell_tokens(shard_number: int, count: int) -> None:
        advance(f"shard {shard_number}: {count} of {plan.generated} tokens each")

    number = cache.shards
    first = cache.texts
    size = FIRST_SHARD
    if first >= len(prompts) or (number and not goes_on()):
        return
    target.narrow(quicker_dtype(target.device.type))
    while first < len(prompts):
        began = time.monotonic()
        began_cpu = time.process_time()
        shard = target.continue_prompts(
            prompts[first : first + size], plan.generated, cache.reads, stopped, partial(tell_tokens, number)
        )
        cache.write_shard(number, shard)
        wall_s = time.monotonic() - began
        cpu_s = time.process_time() - began_cpu
        tokens = sum(len(text.tokens) for text in shard)
        say(f"shard {number}: {len(shard)} texts, {tokens} tokens in {wall_s:.0f} s ({cpu_s:.0f} s of processor)")
        number += 1
        first += len(shard)
        size = max(1, min(LARGEST_SHARD, int(size * SHARD_S / max(wall_s, 1e-3))))
        if not goes_on():
            break


def token_counts(cache: StateCache) -> Counter[int]:
    """How often each token occurs in the shards."""
    counts: Counter[int] = Counter()
    for number in range(cache.shards):
        for text in cache.load(number):
            counts.update(text.tokens.tolist())
    return counts


def quicker_dtype(device: str) -> torch.dtype:
    """Bfloat16 where this machine multiplies it faster than float32, else float32; measured in some milliseconds."""
    if device != "cpu":
        return torch.bfloat16

    def seconds(dtype: torch.dtype) -> float:
        x, weight = torch.ones(256, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
        best = float("inf")
        for _ in range(6):
            began = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            best = min(best, time.perf_counter() - began)
        return best

    return torch.bfloat16 if seconds(torch.bfloat16) < 0.8 * seconds(torch.float32) else torch.float32
