"""Pages of records: what a record of `diff` holds, and two records side by side."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from reports.format import clean, cut, number, plural
from reports.layout80 import plain_text

SHOWN = 10
"""Most turns that are named."""


def record_head(folder: str, manifest: Mapping[str, Any], turns: int, torn: int, failures: Sequence[str]) -> str:
    """The first lines on a record: what ran, when and where, and what is missing in it."""
    ran = f"{clean(folder)}: {clean(manifest['kind'])}, {plural(turns, 'turn')}"
    lines = [ran, f"settings {clean(manifest['settings'])}, started {clean(manifest.get('started', '-'))}"]
    model = manifest.get("model")
    if model is not None:
        lines.append(f"model {clean(cut(model['name'], 120))} {clean(cut(model['digest'], 80))}")
    lines += [f"draft {clean(cut(one['name'], 120))} {clean(one['digest'])}" for one in manifest.get("drafts", ())]
    found = manifest["environment"]
    lines.append(", ".join(f"{clean(name)} {clean(str(value))}" for name, value in found.items()))
    lines += [clean(one) for one in manifest.get("missing", ())]
    if torn:
        lines.append(f"{plural(torn, 'line')} left unfinished by a killed run: left out")
    lines += [f"failure {clean(one)}" for one in failures[:SHOWN]]
    if len(failures) > SHOWN:
        lines.append(f"and {plural(len(failures) - SHOWN, 'further failure')}")
    return "\n".join(lines) + "\n"


def diff_turns(turns: Sequence[Mapping[str, Any]]) -> str:
    """The turns of a `diff` by backend: outcomes, tokens, accepted tokens per step, seconds in forwards."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("backend", overflow="fold")
    for name in ("turns", "tokens", "accepted", "forward s"):
        table.add_column(name, justify="right")
    table.add_column("outcomes")
    for way in dict.fromkeys(turn["way"] for turn in turns):
        mine = [turn for turn in turns if turn["way"] == way]
        accepted = [length for turn in mine for length in turn.get("accepted", ())]
        outcomes = Counter(turn.get("outcome", "-") for turn in mine)
        table.add_row(
            clean(way), str(len(mine)), str(sum(len(turn["tokens"]) for turn in mine)),
            f"{sum(accepted) / len(accepted):.2f}" if accepted else "-",
            number(sum(turn["seconds"] for turn in mine)),
            ", ".join(f"{clean(name)} {count}" for name, count in outcomes.items()),
        )  # fmt: skip
    return plain_text(table)


def comparison_page(figures: Mapping[str, Any]) -> str:
    """Two records side by side, from the figures of `specverify.traces.command.compare`."""
    differ = figures["differ"]
    lines = [f"{plural(figures['same'], 'turn')} equal in {', '.join(figures['compared'])}; {len(differ)} differ"]
    lines += [f"{_turn_place(one)}, {clean(one['way'])}: {', '.join(one['fields'])} differ" for one in differ[:SHOWN]]
    if len(differ) > SHOWN:
        lines.append(f"and {plural(len(differ) - SHOWN, 'further turn')}")
    for side, count in zip(("first", "second"), figures["only"], strict=True):
        if count:
            lines.append(f"{plural(count, 'turn')} in the {side} record alone")
    for name, (one, other) in figures["settings"].items():
        lines.append(f"{clean(name)}: {clean(cut(str(one), 60))} and {clean(cut(str(other), 60))}")
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("way", overflow="fold")
    for name in ("first s", "second s", "ratio"):
        table.add_column(name, justify="right")
    for way, (one, other) in figures["seconds"].items():
        table.add_row(clean(way), number(one), number(other), f"{other / one:.2f}" if one else "-")
    return "\n".join(lines) + "\n" + (plain_text(table) if figures["seconds"] else "")


def _turn_place(turn: Mapping[str, Any]) -> str:
    """The prompt of a turn, or its dialogue and its number there."""
    name = clean(str(turn["prompt"]))
    return f"dialogue {name}, turn {turn['place']}" if turn.get("place") else f"prompt {name}"
