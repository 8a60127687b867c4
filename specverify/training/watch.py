"""The progress of a training, and the plot of its acceptance."""

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from specverify.reports.progress import EVERY_S, shows_bars

WIDTH, HEIGHT = 54, 10
"""The columns and lines of the plot."""


class Watch:
    """The progress of a run, on standard error: a bar on a terminal, elsewhere and in CI a line every 30 seconds.

    Args:
        seconds: The seconds of the run.
        quiet: Whether lines of progress are left out where there is no terminal.
        file: The output; standard error by default.
        clock: A clock in seconds that never goes back.
    """

    def __init__(
        self,
        seconds: float,
        quiet: bool = False,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = sys.stderr if file is None else file
        self._quiet = quiet
        self._clock = clock
        self._last = clock()
        self._bar = None
        if shows_bars(self._file) and not quiet:
            console = Console(file=self._file, force_terminal=True, highlight=False)
            columns = (TextColumn("training"), BarColumn(bar_width=20), TimeRemainingColumn())
            note = TextColumn("{task.fields[note]}", markup=False)
            self._bar = Progress(
                *columns, note, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._task = self._bar.add_task("training", total=seconds, note="")

    def __enter__(self) -> "Watch":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Write a line that stays, unless the watch is quiet."""
        if self._bar:
            self._bar.console.print(text, markup=False, soft_wrap=True)
        elif not self._quiet:
            self._file.write(text + "\n")
            self._file.flush()

    def advance(self, elapsed_s: float, note: Callable[[], str]) -> None:
        """Show that `elapsed_s` seconds are over, and the note beside them."""
        if self._bar:
            self._bar.update(self._task, completed=elapsed_s, note=note())
        elif self._clock() - self._last >= EVERY_S:
            self._last = self._clock()
            self.say(f"{elapsed_s:.0f} s: {note()}")


def plot(curve: list[dict[str, Any]], over: str = "seconds") -> str:
    """The curve as text: accepted drafted tokens per step of chain (c) and tree (T) on watched prompts, over time.

    Returns:
        Lines of at most 72 letters; an empty string where the curve has fewer than two measures.
    """
    points = [(line[over], line["chain"], line["tree"]) for line in curve if "tree" in line and over in line]
    if len(points) < 2:
        return ""
    most = max(max(chain, tree) for _, chain, tree in points) or 1.0
    last = max(position for position, _, _ in points) or 1.0
    grid = [[" "] * (WIDTH + 1) for _ in range(HEIGHT + 1)]
    for position, chain, tree in points:
        column = round(position / last * WIDTH)
        for value, letter in ((chain, "c"), (tree, "T")):
            grid[HEIGHT - round(value / most * HEIGHT)][column] = letter
    lines = [f"{most * (HEIGHT - row) / HEIGHT:6.2f} |{''.join(cells).rstrip()}" for row, cells in enumerate(grid)]
    axis = f"{'':6} +{'-' * WIDTH}"
    return "\n".join([*lines, axis, f"{'':8}0{last:>{WIDTH - 1}.0f} {over}", f"{'':8}T tree, c chain"])


def curve_table(curve: list[dict[str, Any]]) -> list[str]:
    """The measures of the curve as lines: steps, seconds, loss, and tokens per call of a chain and of a tree."""
    if not curve:
        return []
    lines = [f"{'step':>8}{'seconds':>9}{'loss':>9}{'chain':>8}{'tree':>8}"]
    for line in curve:
        loss = "–" if line["loss"] is None else f"{line['loss']:.4f}"
        chain, tree = 1 + line["chain"], 1 + line["tree"]
        lines.append(f"{line['step']:>8}{line['seconds']:>9.0f}{loss:>9}{chain:>8.2f}{tree:>8.2f}")
    return lines


def page(figures: dict[str, Any]) -> str:
    """The figures of a training in a few lines, with its plot."""
    rows = (
        ("chain of 4", "chain"),
        ("tree of 24", "tree"),
        ("n-gram, chain of 4", "ngram_chain"),
        ("n-gram, tree of 18", "ngram_tree"),
    )
    lines = [
        f"{figures['kind']} head in {figures['head']}: {figures['steps']} steps, {figures['learned']} rows learned,"
        f" {figures['seconds']:.0f} s ({figures['processor_seconds']:.0f} s of processor)",
        f"greedy, on {figures['prompts']} prompts that were held out:",
        f"{'':22}accepted per step  tokens per call  steps  accepted at least 1, 2, ...",
    ]
    for name, key in rows:
        row = figures[key]
        depths = " ".join(f"{share:.2f}" for share in row["by_depth"] if share > 0)
        lines.append(f"  {name:<20}{row['accepted']:>17.2f}{row['tokens_per_call']:>17.2f}{row['steps']:>7}  {depths}")
    table = curve_table(figures["curve"])
    if table:
        lines += ["", "tokens per call on watched prompts, over the training:", *table]
    drawn = plot(figures["curve"], "step")
    return "\n".join([*lines, *(["", "accepted per step on watched prompts:", drawn] if drawn else [])])
