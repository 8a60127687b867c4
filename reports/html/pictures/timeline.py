"""The timeline of a run's workers: how many cases each judged when."""

from collections import Counter
from dataclasses import dataclass

from properties.verdict.run_log import (
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
from reports.format import number, plural

BINS = 80
"""Parts into which the time of the run is cut."""

MOST = 32
"""Most workers that are shown."""

WIDTH, HEIGHT, LEFT = 720, 22, 78
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
    whole = max(seconds, max(event.at for event in log.events), 1e-3)
    lanes = tuple(_lane(log.events, worker, line, whole) for line, worker in enumerate(workers))
    judged = sum(lane.judged for lane in lanes)
    words = f"{plural(len(lanes), 'worker')} judged {plural(judged, 'case')} in {number(seconds)} seconds"
    marks = tuple((LEFT + WIDTH * part / 4, f"{number(whole * part / 4)} s") for part in range(5))
    return Timeline(lanes, marks, LEFT + WIDTH + 40, HEIGHT * len(lanes) + 24, words)


def _lane(events: list[Event], worker: int, line: int, whole: float) -> Lane:
    own = [event for event in events if event.worker == worker]
    scale = WIDTH / whole
    opened = next((event.at for event in own if event.kind == OPENED), None)
    blocks = [Block(LEFT, scale * opened, "starting", f"starting, {number(opened)} s")] if opened else []
    counts: Counter[int] = Counter()
    differed = set()
    for event in own:
        if event.kind in (JUDGED, UNJUDGED, DIFFERED):
            part = min(BINS - 1, int(BINS * event.at / whole))
            counts[part] += 1
            differed |= {part} if event.kind == DIFFERED else set()
    most = max(counts.values(), default=1)
    for part, count in sorted(counts.items()):
        state = "differs" if part in differed else f"busy{-(-4 * count // most)}"
        words = f"from {number(whole * part / BINS)} s: {plural(count, 'case')}" + (
            ", a difference" if part in differed else ""
        )
        blocks.append(Block(LEFT + WIDTH * part / BINS, WIDTH / BINS, state, words))
    shrinking = 0.0
    found = None
    for event in own:
        if event.kind == FOUND:
            found = event.at
        elif event.kind in (LOCATED, DIED, ENDED) and found is not None:
            words = f"a failure is made smaller, {number(event.at - found)} s"
            blocks.append(Block(LEFT + scale * found, max(2.0, scale * (event.at - found)), "shrinking", words))
            shrinking, found = shrinking + event.at - found, None
    deaths = [event for event in own if event.kind == DIED]
    blocks += [Block(LEFT + scale * event.at, 3, "died", f"died after {number(event.at)} s") for event in deaths]
    kinds = Counter(event.kind for event in own)
    return Lane(
        f"worker {worker}",
        20 + HEIGHT * line,
        tuple(blocks),
        kinds[JUDGED] + kinds[DIFFERED],
        kinds[DIFFERED],
        "never" if opened is None else f"{number(opened)} s",
        f"{number(shrinking)} s" if shrinking else "–",
        len(deaths),
    )
