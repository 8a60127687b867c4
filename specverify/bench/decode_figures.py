"""The figures of `bench decode`, computed from its turns.

Speeds are compared turn by turn: each generation with that of the target alone for the same prompt in the same round,
and in a batch of the same size.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from specverify.bench.budgets import grids, series
from specverify.bench.decode_record import Measurements
from specverify.bench.estimates import Estimate, estimate
from specverify.bench.turn import TARGET, Turn
from specverify.reports.pages.decode import decode_page

PERCENTILES = (50, 90, 99)

Place = tuple[int, int, int, int]
"""Prompt or dialogue, repeat, turn of the dialogue, and size of the batch."""


@dataclass(frozen=True)
class Pair:
    """A turn, and that of the target alone for the same prompt in the same round."""

    turn: Turn
    alone: Turn

    @property
    def speed_up(self) -> float:
        """Tokens per second of the turn over those of the target alone."""
        return (len(self.turn.tokens) / self.turn.seconds) / (len(self.alone.tokens) / self.alone.seconds)


def figures(measured: Measurements) -> dict[str, Any]:
    """The figures of every way, the comparisons of texts, and the facts of the run.

    Returns:
        facts; ways: for each way (and size of batch) a row (see `row`); texts: for each way the numbers of equal texts,
        of texts that part at a tie, and the first other ones; grids, chains, weights, vocabularies: the budgets, draft
        lengths, widths of weights and vocabularies of each draft (`specverify.bench.budgets`); cells: a row for each
        way, size of batch and length of the prompts, where batches or lengths were asked for; dialogues: a row for each
        way and place of a turn, with the means of its context and of the columns that were kept, where dialogues ran.
    """
    alone = {place_of(turn): turn for turn in measured.turns if turn.way == TARGET}
    sizes = sorted({turn.batch for turn in measured.turns})
    rows = []
    for way in measured.ways:
        for batch in sizes:
            turns = [turn for turn in measured.turns if (turn.way, turn.batch) == (way, batch)]
            if turns:  # shards that are missing may have had all
                rows.append(row(label(way, batch), turns, alone) | {"memory": memory(turns)})
    places = sorted({(turn.prefix, turn.history, turn.place) for turn in measured.turns if turn.place})
    dialogues = [_place_row(way, place, measured.turns, alone) for way in measured.ways for place in places]
    first_names = {label(way, sizes[0]): way for way in measured.ways} if sizes else {}
    first_rows = [row_ | {"way": first_names[row_["way"]]} for row_ in rows if row_["way"] in first_names]
    return {
        "facts": measured.facts,
        "ways": rows,
        "grids": grids(measured.draft_ways, first_rows),
        **series(measured.draft_ways, first_rows),
        "cells": _cells(measured, alone),
        "dialogues": dialogues,
        "texts": _texts(measured, sizes),
    }


def place_of(turn: Turn) -> Place:
    """What the turns of all ways have in common with this one."""
    return turn.prompt, turn.repeat, turn.place, turn.batch


def label(way: str, batch: int) -> str:
    """The name of a way in batches of this size; 0 for prompts by themselves."""
    return f"{way} b{batch}" if batch else way


def _texts(measured: Measurements, sizes: list[int]) -> list[dict[str, Any]]:
    if not measured.facts.get("compared", True):
        return []
    texts = []
    for way in measured.ways:
        for batch in sizes:
            if way == TARGET and batch == sizes[0]:  # what the others are compared with
                continue
            agreements = [
                agreement for agreement in measured.agreements if (agreement.way, agreement.batch) == (way, batch)
            ]
            texts.append(
                {
                    "way": label(way, batch),
                    "equal": sum(agreement.at is None for agreement in agreements),
                    "tied": sum(agreement.tied for agreement in agreements),
                    "other": [asdict(agreement) for agreement in agreements if not agreement.agrees],
                }
            )
    return texts


def _cells(measured: Measurements, alone: dict[Place, Turn]) -> list[dict[str, Any]]:
    """A row for each way, size of batch and length of the prompts; none where neither was asked for."""
    if not measured.facts.get("lengths") and not measured.facts.get("batches"):
        return []
    # Prompts that were not brought to lengths have one row together.
    by_length = bool(measured.facts.get("lengths"))
    measured_cells = {(turn.way, turn.batch, turn.context if by_length else None) for turn in measured.turns}
    cells = sorted(measured_cells, key=lambda cell: (measured.ways.index(cell[0]), cell[1], cell[2] or 0))
    rows = []
    for way, batch, context in cells:
        turns = [
            turn
            for turn in measured.turns
            if (turn.way, turn.batch) == (way, batch) and context in (None, turn.context)
        ]
        together = batch_throughput(turns, alone)
        rows.append({"batch": batch, "context": context, **together} | row(way, turns, alone))
    return rows


def batch_throughput(turns: list[Turn], alone: dict[Place, Turn]) -> dict[str, Any]:
    """The tokens per second of whole batches.

    Returns:
        batch_tokens_per_s; batch_speed_up and batch_speed_up_error (over the target alone in the same batches; the
        error is None for one batch).
    """
    batches: dict[tuple[int, int], list[Turn]] = {}
    for turn in turns:
        batches.setdefault((turn.prompt // max(turn.batch, 1), turn.repeat), []).append(turn)
    ratios, seconds = dict[int, list[float]](), 0.0
    for (number, _), batch_turns in batches.items():
        spent, target_spent = (
            max(turn.seconds for turn in group)
            for group in (batch_turns, [alone[place_of(turn)] for turn in batch_turns])
        )
        tokens, target_tokens = (
            sum(len(turn.tokens) for turn in group)
            for group in (batch_turns, [alone[place_of(turn)] for turn in batch_turns])
        )
        ratios.setdefault(number, []).append((tokens / spent) / (target_tokens / target_spent))
        seconds += spent
    speed_up = estimate(list(ratios.values()), lambda groups: float(np.mean(np.concatenate(groups))))
    return {
        "batch_tokens_per_s": sum(len(turn.tokens) for turn in turns) / seconds,
        "batch_speed_up": speed_up.mean,
        "batch_speed_up_error": speed_up.error,
    }


def _place_row(way: str, place: tuple[int, int, int], every: list[Turn], alone: dict[Place, Turn]) -> dict[str, Any]:
    """The figures of the turns of a way with this prefix, this history, and this place in their dialogues."""
    turns = [turn for turn in every if (turn.way, turn.prefix, turn.history, turn.place) == (way, *place)]
    prefix, history, number = place
    context, kept_columns = (float(np.mean([getattr(turn, name) for turn in turns])) for name in ("context", "kept"))
    lengths = {"prefix": prefix, "history": history, "place": number, "context": context, "kept": kept_columns}
    return lengths | row(way, turns, alone)


def report_decode(measured: Measurements) -> tuple[dict[str, Any], str, int]:
    """The figures of a bench, its page, and its exit code.

    Returns:
        The code is 1 where a text of our engine is not the target's own, 3 where a shard is missing.
    """
    content = figures(measured) | {"missing": measured.missing, "resumed": measured.resumed}
    ours = {TARGET, *measured.draft_names}
    wrong = any(not agreement.agrees for agreement in measured.agreements if agreement.way in ours)
    return content, decode_page(content), 1 if wrong else 3 if measured.missing else 0


def row(way: str, turns: list[Turn], alone: dict[Place, Turn]) -> dict[str, Any]:
    """The figures of one way.

    Returns:
        tokens, seconds, tokens_per_s; speed_up over the target alone (mean and percentiles over turns) and
        speed_up_error; ttft_ms, prefill_ms, tpot_ms (means over turns; None where the way shows none) and `spreads` of
        these three (mean and percentiles over turns); tokens_per_call and tokens_per_call_error (emitted tokens per
        verify call of a request; None where the way shows none); accepted (drafted tokens per step, mean
        and percentiles); by_depth (share of the trees that reach a depth in which it was accepted); steps,
        draft_calls, verify_calls, drafted, rejected; break_even (accepted tokens per step at which the way is as fast
        as the target alone: the cost of its step over that of the target's, less one, and 0 where it costs no more) and
        break_even_error; stages (share of the seconds); stage_ms (see `stage_milliseconds`); beyond_forwards (see the
        function). Errors are standard errors over prompts, None for a single prompt.
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
    pairs = [Pair(turn, alone[place_of(turn)]) for turn in turns]
    speed_up = over_prompts(pairs, lambda pairs: float(np.mean([pair.speed_up for pair in pairs])))
    calls = over_prompts(pairs, tokens_per_call) if turns[0].stages else None
    break_even = over_prompts(pairs, lambda pairs: step_cost(pairs) - 1).above(0.0) if speculates else None
    return {
        "way": way,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "speed_up": spread([pair.speed_up for pair in pairs]),
        "speed_up_error": speed_up.error,
        "ttft_ms": 1000 * float(np.mean([turn.first_token_s for turn in turns])),
        "prefill_ms": 1000 * float(np.mean(prefills)) if prefills else None,
        "tpot_ms": 1000 * float(np.mean(pace)) if pace else None,
        "spreads": {
            "ttft_ms": _milliseconds([turn.first_token_s for turn in turns]),
            "prefill_ms": _milliseconds(prefills),
            "tpot_ms": _milliseconds(pace),
        },
        "tokens_per_call": None if calls is None else calls.mean,
        "tokens_per_call_error": None if calls is None else calls.error,
        "accepted": spread(accepted) if speculates else None,
        "by_depth": by_depth(accepted, heights) if speculates else [],
        "steps": sum(len(turn.steps) for turn in turns),
        "draft_calls": sum(turn.draft_calls for turn in turns),
        "verify_calls": sum(len(turn.steps) for turn in turns) if turns[0].stages else None,
        "drafted": drafted,
        "rejected": drafted - sum(accepted),
        "break_even": None if break_even is None else break_even.mean,
        "break_even_error": None if break_even is None else break_even.error,
        "stages": {name: spent / seconds for name, spent in stages.most_common()},
        "stage_ms": stage_milliseconds(turns),
        "beyond_forwards": beyond_forwards(turns),
        "fallbacks": sum((Counter(turn.fallbacks) for turn in turns), Counter()),
        "attention_calls": sum(turn.attention_calls for turn in turns),
    }


def over_prompts(pairs: list[Pair], statistic: Callable[[list[Pair]], float]) -> Estimate:
    """`statistic` of all pairs, with its standard error over prompts."""
    by_prompt: dict[int, list[Pair]] = {}
    for pair in pairs:
        by_prompt.setdefault(pair.turn.prompt, []).append(pair)

    def of_prompts(prompts: Sequence[list[Pair]]) -> float:
        return statistic([pair for prompt_pairs in prompts for pair in prompt_pairs])

    return estimate(list(by_prompt.values()), of_prompts)


def tokens_per_call(pairs: list[Pair]) -> float:
    """Emitted tokens per verify call of a request: the drafted tokens that were accepted, and the target's own."""
    return sum(sum(pair.turn.emitted) for pair in pairs) / sum(len(pair.turn.emitted) for pair in pairs)


def step_cost(pairs: list[Pair]) -> float:
    """The cost of a step in units of a step of the target alone, prefills left out."""
    return _step_s([pair.turn for pair in pairs]) / _step_s([pair.alone for pair in pairs])


def stage_milliseconds(turns: list[Turn]) -> dict[str, dict[str, float]]:
    """For each stage its milliseconds in a step (`prefill`: in a turn).

    Returns:
        For each stage mean, and tail: the 99th percentile over the mean (0.0 for a stage without time).
    """
    spent: dict[str, list[float]] = {}
    prefills = [turn.prefill_s for turn in turns if turn.prefill_s is not None]
    if prefills:
        spent["prefill"] = prefills
    for turn in turns:
        for name, seconds in turn.stage_steps.items():
            spent.setdefault(name, []).extend(seconds)
    return {
        name: {"mean": 1000 * mean, "tail": float(np.percentile(seconds, 99)) / mean if mean else 0.0}
        for name, seconds in spent.items()
        for mean in [float(np.mean(seconds))]
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


MEMORY = ("target_mb", "draft_mb", "draft_parameters", "target_kv_mb", "draft_kv_mb", "peak_mb")
"""The parts of what a way holds: MiB, and the number of the draft's weights."""


def memory(turns: list[Turn]) -> dict[str, float | None]:
    """The most of each of MEMORY over the turns of one way; None where no turn shows it."""
    most: dict[str, float | None] = {}
    for name in MEMORY:
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
