"""The figures of `bench decode`, computed from its turns.

Speeds are compared turn by turn: each generation with that of the target alone for the same prompt in the same round.
"""

from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np

from specverify.bench.budgets import grids
from specverify.bench.decode_record import Measurements
from specverify.bench.turn import TARGET, Turn
from specverify.reports.pages.decode import decode_page

PERCENTILES = (50, 90, 99)

Place = tuple[int, int, int]
"""Prompt or dialogue, repeat, and turn of the dialogue."""


def figures(measured: Measurements) -> dict[str, Any]:
    """The figures of every way, the comparisons of texts, and the facts of the run.

    Returns:
        facts; ways: for each way a row (see `row`); texts: for each way the numbers of equal texts, of texts that part
        at a tie, and the first other ones; grids: the budgets of each draft (`specverify.bench.budgets.grids`);
        lengths: a row for each way and length of the prompts, where lengths were asked for; dialogues: a row for each
        way and place of a turn, with the means of its context and of the columns that were kept, where dialogues ran.
    """
    alone = {(turn.prompt, turn.repeat, turn.place): turn for turn in measured.turns if turn.way == TARGET}
    rows = []
    for way in measured.ways:
        turns = [turn for turn in measured.turns if turn.way == way]
        if turns:  # shards that are missing may have had all
            rows.append(row(way, turns, alone) | {"memory": memory(turns)})
    lengths = []
    if measured.facts.get("lengths"):
        contexts = {(way, turn.context): None for way in measured.ways for turn in measured.turns if turn.way == way}
        for way, context in contexts:
            context_turns = [turn for turn in measured.turns if (turn.way, turn.context) == (way, context)]
            lengths.append({"context": context} | row(way, context_turns, alone))
    places = sorted({turn.place for turn in measured.turns} - {0})
    dialogues = [_place_row(way, place, measured.turns, alone) for way in measured.ways for place in places]
    texts = []
    for way in measured.ways[1:]:
        agreements = [agreement for agreement in measured.agreements if agreement.way == way]
        texts.append(
            {
                "way": way,
                "equal": sum(agreement.at is None for agreement in agreements),
                "tied": sum(agreement.tied for agreement in agreements),
                "other": [asdict(agreement) for agreement in agreements if not agreement.agrees],
            }
        )
    return {
        "facts": measured.facts,
        "ways": rows,
        "grids": grids(measured.draft_ways, rows),
        "lengths": lengths,
        "dialogues": dialogues,
        "texts": texts,
    }


def _place_row(way: str, place: int, every: list[Turn], alone: dict[Place, Turn]) -> dict[str, Any]:
    """The figures of the turns of a way that have this place in their dialogues."""
    turns = [turn for turn in every if (turn.way, turn.place) == (way, place)]
    context, kept_columns = (float(np.mean([getattr(turn, name) for turn in turns])) for name in ("context", "kept"))
    return {"place": place, "context": context, "kept": kept_columns} | row(way, turns, alone)


def report_decode(measured: Measurements) -> tuple[dict[str, Any], str, int]:
    """The figures of a bench, its page, and its exit code.

    Returns:
        The code is 1 where a text of our engine is not the target's own, 3 where a shard is missing.
    """
    content = figures(measured) | {"missing": measured.missing, "resumed": measured.resumed}
    wrong = any(not agreement.agrees for agreement in measured.agreements if agreement.way in measured.draft_names)
    return content, decode_page(content), 1 if wrong else 3 if measured.missing else 0


def row(way: str, turns: list[Turn], alone: dict[Place, Turn]) -> dict[str, Any]:
    """The figures of one way.

    Returns:
        tokens, seconds, tokens_per_s; speed_up over the target alone (mean and percentiles over turns); ttft_ms,
        prefill_ms, tpot_ms (means over turns; None where the way shows none) and `spreads` of these three (mean and
        percentiles over turns); accepted (drafted tokens per step, mean
        and percentiles); by_depth (share of the trees that reach a depth in which it was accepted); steps,
        draft_calls, verify_calls, drafted, rejected; break_even (accepted tokens per step at which the way is as fast
        as the target alone: the cost of its step over that of the target's, less one); stages (share of the seconds);
        beyond_forwards (see the function).
    """
    tokens, seconds = sum(len(turn.tokens) for turn in turns), sum(turn.seconds for turn in turns)
    accepted = [count for turn in turns for count in turn.accepted]
    heights = [height for turn in turns for height in turn.height]
    drafted = sum(sum(turn.nodes) for turn in turns)
    stages: Counter[str] = Counter()
    for turn in turns:
        stages.update(turn.stages)
    speculates = drafted > 0
    pace = [turn.per_token_s for turn in turns if turn.per_token_s is not None]
    prefills = [turn.prefill_s for turn in turns if turn.prefill_s is not None]
    faster = [
        (len(turn.tokens) / turn.seconds) / (len(base.tokens) / base.seconds)
        for turn in turns
        for base in [alone[turn.prompt, turn.repeat, turn.place]]
    ]
    return {
        "way": way,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "speed_up": spread(faster),
        "ttft_ms": 1000 * float(np.mean([turn.first_token_s for turn in turns])),
        "prefill_ms": 1000 * float(np.mean(prefills)) if prefills else None,
        "tpot_ms": 1000 * float(np.mean(pace)) if pace else None,
        "spreads": {
            "ttft_ms": _milliseconds([turn.first_token_s for turn in turns]),
            "prefill_ms": _milliseconds(prefills),
            "tpot_ms": _milliseconds(pace),
        },
        "accepted": spread(accepted) if speculates else None,
        "by_depth": by_depth(accepted, heights) if speculates else [],
        "steps": sum(len(turn.steps) for turn in turns),
        "draft_calls": sum(turn.draft_calls for turn in turns),
        "verify_calls": sum(len(turn.steps) for turn in turns) if turns[0].stages else None,
        "drafted": drafted,
        "rejected": drafted - sum(accepted),
        "break_even": _step_s(turns) / _step_s(list(alone.values())) - 1 if speculates else None,
        "stages": {name: spent / seconds for name, spent in stages.most_common()},
        "beyond_forwards": beyond_forwards(turns),
        "fallbacks": sum((Counter(turn.fallbacks) for turn in turns), Counter()),
    }


def beyond_forwards(turns: list[Turn]) -> float | None:
    """The share of a step, without the prefill, that is neither verify forward nor the work of a draft with weights.

    A draft without weights has no forward: its time counts. None where the way shows no stages.
    """
    forwards = {"prefill", "verify"} | ({"draft"} if any(turn.draft_mb for turn in turns) else set())
    spent: Counter[str] = Counter()
    for turn in turns:
        spent.update(turn.stages)
    steps = sum(spent.values()) - spent["prefill"]
    return sum(seconds for name, seconds in spent.items() if name not in forwards) / steps if steps else None


def memory(turns: list[Turn]) -> dict[str, float | None]:
    """MiB over the turns of one way: weights of target and draft, most of the KV caches, most that was in use."""
    most: dict[str, float | None] = {}
    for name in ("target_mb", "draft_mb", "kv_mb", "peak_mb"):
        values = (getattr(turn, name) for turn in turns)
        most[name] = max((value for value in values if value is not None), default=None)
    return most


def _milliseconds(seconds: list[float]) -> dict[str, float] | None:
    return spread([1000 * value for value in seconds]) if seconds else None


def spread(values: list[Any]) -> dict[str, float]:
    """Mean and percentiles."""
    ranks = np.percentile(values, PERCENTILES)
    return {"mean": float(np.mean(values))} | {
        f"p{percent}": float(value) for percent, value in zip(PERCENTILES, ranks, strict=True)
    }


def by_depth(accepted: list[int], heights: list[int]) -> list[float]:
    """For each depth from 1 on, the share of the trees that reach it in which a node of that depth was accepted."""
    pairs = list(zip(accepted, heights, strict=True))
    return [
        sum(length >= depth for length, height in pairs if height >= depth) / sum(height >= depth for height in heights)
        for depth in range(1, max(heights, default=0) + 1)
    ]


def _step_s(turns: list[Turn]) -> float:
    """Mean seconds of a step after the prefill."""
    steps = sum(len(turn.steps) for turn in turns)
    return sum(turn.seconds - (turn.prefill_s or 0.0) for turn in turns) / steps
