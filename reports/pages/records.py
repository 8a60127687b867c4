"""Pages of records: what a record of `diff` holds, and two records side by side."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from specverify.reports.format import clean, cut, number, plural
from specverify.reports.layout80 import plain_text

MOST_TURNS = 10
"""Most turns that are named."""


def record_head(folder: str, manifest: Mapping[str, Any], turns: int, torn: int, failures: Sequence[str]) -> str:
    """The first lines on a record: what ran, when and where, and what is missing in it."""
    headline = f"{clean(folder)}: {clean(manifest['kind'])}, {plural(turns, 'turn')}"
    lines = [headline, f"settings {clean(manifest['settings'])}, started {clean(manifest.get('started', '-'))}"]
    model = manifest.get("model")
    if model is not None:
        lines.append(f"model {clean(cut(model['name'], 120))} {clean(cut(model['digest'], 80))}")
    lines += [
        f"draft {clean(cut(draft['name'], 120))} {clean(draft['digest'])}" for draft in manifest.get("drafts", ())
    ]
    environment = manifest["environment"]
    lines.append(", ".join(f"{clean(name)} {clean(str(value))}" for name, value in environment.items()))
    lines += [clean(text) for text in manifest.get("missing", ())]
    if torn:
        lines.append(f"{plural(torn, 'line')} left unfinished by a killed run: left out")
    lines += [f"failure {clean(failure)}" for failure in failures[:MOST_TURNS]]
    if len(failures) > MOST_TURNS:
        lines.append(f"and {plural(len(failures) - MOST_TURNS, 'further failure')}")
    return "\n".join(lines) + "\n"


def diff_turns(turns: Sequence[Mapping[str, Any]]) -> str:
    """The turns of a `diff` by backend: outcomes, tokens, accepted tokens per step, seconds in forwards."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("backend", overflow="fold")
    for name in ("turns", "tokens", "accepted", "forward s"):
        table.add_column(name, justify="right")
    table.add_column("outcomes")
    for way in dict.fromkeys(turn["way"] for turn in turns):
        way_turns = [turn for turn in turns if turn["way"] == way]
        accepted = [length for turn in way_turns for length in turn.get("accepted", ())]
        outcomes = Counter(turn.get("outcome", "-") for turn in way_turns)
        table.add_row(
            clean(way), str(len(way_turns)), str(sum(len(turn["tokens"]) for turn in way_turns)),
            f"{sum(accepted) / len(accepted):.2f}" if accepted else "-",
            number(sum(turn["seconds"] for turn in way_turns)),
            ", ".join(f"{clean(name)} {count}" for name, count in outcomes.items()),
        )  # fmt: skip
    return plain_text(table)


def comparison_page(figures: Mapping[str, Any]) -> str:
    """Two records side by side, from the figures of `specverify.traces.command.compare`."""
    differing_turns = figures["differ"]
    lines = [
        f"{plural(figures['same'], 'turn')} equal in {', '.join(figures['compared'])}; {len(differing_turns)} differ"
    ]
    lines += [
        f"{_turn_place(turn)}, {clean(turn['way'])}: {', '.join(turn['fields'])} differ"
        for turn in differing_turns[:MOST_TURNS]
    ]
    if len(differing_turns) > MOST_TURNS:
        lines.append(f"and {plural(len(differing_turns) - MOST_TURNS, 'further turn')}")
    for side, count in zip(("first", "second"), figures["only"], strict=True):
        if count:
            lines.append(f"{plural(count, 'turn')} in the {side} record alone")
    for name, (first_s, second_s) in figures["settings"].items():
        lines.append(f"{clean(name)}: {clean(cut(str(first_s), 60))} and {clean(cut(str(second_s), 60))}")
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("way", overflow="fold")
    for name in ("first s", "second s", "ratio"):
        table.add_column(name, justify="right")
    for way, (first_s, second_s) in figures["seconds"].items():
        table.add_row(clean(way), number(first_s), number(second_s), f"{second_s / first_s:.2f}" if first_s else "-")
    return "\n".join(lines) + "\n" + (plain_text(table) if figures["seconds"] else "")


def _turn_place(turn: Mapping[str, Any]) -> str:
    """The prompt of a turn, or its dialogue and its number there."""
    name = clean(str(turn["prompt"]))
    return f"dialogue {name}, turn {turn['place']}" if turn.get("place") else f"prompt {name}"
