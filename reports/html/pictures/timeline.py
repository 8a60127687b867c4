"""The timeline of a run's workers: how many cases each judged when."""

from collections import Counter
from dataclasses import dataclass

from specverify.properties.verdict.run_log import (
    DIED,
    DIFFERED,
    ENDED,
    FOUND,
    JUDGED,
    LOCATED,
    OPENED,
    UNJUDGED,
    Event,
    RunLog,
)
from specverify.reports.format import number, plural

BINS = 80
"""Parts into which the time of the run is cut."""

MOST = 32
"""Most workers that are shown."""

WIDTH, HEIGHT, NAME_WIDTH = 720, 22, 78
"""Pixels of the time axis, of a worker's line, and of its name."""


@dataclass(frozen=True)
class Block:
    """A rectangle on a worker's line: where it begins, how wide it is, its style and its words."""

    x: float
    width: float
    state: str
    words: str


@dataclass(frozen=True)
class Lane:
    """A worker: its name, its line in the picture, and its row of the table."""

    name: str
    y: int
    blocks: tuple[Block, ...]
    judged: int
    differed: int
    first: str
    shrinking: str
    deaths: int


@dataclass(frozen=True)
class Timeline:
    """The picture, with its size in pixels, and a mark for each quarter of the time."""

    lanes: tuple[Lane, ...]
    marks: tuple[tuple[float, str], ...]
    width: int
    height: int
    words: str


def timeline(log: RunLog, seconds: float) -> Timeline | None:
    """The timeline of a run that took `seconds`; None where nothing was heard of its workers."""
    workers = sorted({event.worker for event in log.events})[:MOST]
    if not workers:
        return None
    duration = max(seconds, max(event.time_s for event in log.events), 1e-3)
    lanes = tuple(_lane(log.events, worker, line, duration) for line, worker in enumerate(workers))
    judged = sum(lane.judged for lane in lanes)
    words = f"{plural(len(lanes), 'worker')} judged {plural(judged, 'case')} in {number(seconds)} seconds"
    marks = tuple((NAME_WIDTH + WIDTH * part / 4, f"{number(duration * part / 4)} s") for part in range(5))
    return Timeline(lanes, marks, NAME_WIDTH + WIDTH + 40, HEIGHT * len(lanes) + 24, words)


def _lane(events: list[Event], worker: int, line: int, duration: float) -> Lane:
    worker_events = [event for event in events if event.worker == worker]
    scale = WIDTH / duration
    opened_at = next((event.time_s for event in worker_events if event.kind == OPENED), None)
    blocks = [Block(NAME_WIDTH, scale * opened_at, "starting", f"starting, {number(opened_at)} s")] if opened_at else []
    counts: Counter[int] = Counter()
    differing_bins = set()
    for event in worker_events:
        if event.kind in (JUDGED, UNJUDGED, DIFFERED):
            bin_ = min(BINS - 1, int(BINS * event.time_s / duration))
            counts[bin_] += 1
            differing_bins |= {bin_} if event.kind == DIFFERED else set()
    most = max(counts.values(), default=1)
    for bin_, count in sorted(counts.items()):
        state = "differs" if bin_ in differing_bins else f"busy{-(-4 * count // most)}"
        words = f"from {number(duration * bin_ / BINS)} s: {plural(count, 'case')}" + (
            ", a difference" if bin_ in differing_bins else ""
        )
        blocks.append(Block(NAME_WIDTH + WIDTH * bin_ / BINS, WIDTH / BINS, state, words))
    shrinking = 0.0
    found_at = None
    for event in worker_events:
        if event.kind == FOUND:
            found_at = event.time_s
        elif event.kind in (LOCATED, DIED, ENDED) and found_at is not None:
            words = f"a failure is made smaller, {number(event.time_s - found_at)} s"
            blocks.append(
                Block(NAME_WIDTH + scale * found_at, max(2.0, scale * (event.time_s - found_at)), "shrinking", words)
            )
            shrinking, found_at = shrinking + event.time_s - found_at, None
    deaths = [event for event in worker_events if event.kind == DIED]
    blocks += [
        Block(NAME_WIDTH + scale * event.time_s, 3, "died", f"died after {number(event.time_s)} s") for event in deaths
    ]
    kinds = Counter(event.kind for event in worker_events)
    return Lane(
        f"worker {worker}",
        20 + HEIGHT * line,
        tuple(blocks),
        kinds[JUDGED] + kinds[DIFFERED],
        kinds[DIFFERED],
        "never" if opened_at is None else f"{number(opened_at)} s",
        f"{number(shrinking)} s" if shrinking else "–",
        len(deaths),
    )
