"""The files of `dispatch learn`: results and traces, and step times."""

import json
from pathlib import Path

from specverify.dispatch.table import Costs
from specverify.properties.accepted_ranks import RankCounts, counts_of
from specverify.reference.malformed import Malformed
from specverify.reference.recorded.lines import UnreadableLine, read_runs
from specverify.reference.tree import Tree
from specverify.setup.errors import UnusableInput
from specverify.setup.files import json_in, text_in


def counts_in(path: Path, kind: str | None) -> dict[str, RankCounts]:
    """The counts of a file, by kind of draft, of `kind` alone if it is given.

    A file is the `results.jsonl` of `diff`, or a recorded trace (`trace schema`), whose counts stand under `trace` and
    whose ranks are the places of siblings in row order.

    Raises:
        UnusableInput: The file cannot be read, or holds no such lines.
    """
    lines = text_in(path).splitlines()
    first = next((line for line in lines if line.strip()), "")
    try:
        head = json.loads(first)
    except ValueError:
        raise UnusableInput(f"{path}: line 1 is no JSON: results.jsonl of diff, or a recorded trace, is read") from None
    counts_by_kind = (
        _trace_counts(path, lines) if isinstance(head, dict) and "run" in head and "id" not in head else None
    )
    counts_by_kind = _result_counts(path, lines) if counts_by_kind is None else counts_by_kind
    return {tag: counts for tag, counts in counts_by_kind.items() if kind is None or tag == kind}


def _trace_counts(path: Path, lines: list[str]) -> dict[str, RankCounts]:
    steps = []
    try:
        runs = read_runs(lines)
    except UnreadableLine as why:
        raise UnusableInput(f"{path}: {why}") from None
    for run in runs:
        for number, step in zip(run.lines, run.steps, strict=True):
            if step.get("drafted") and step.get("accepted"):
                written_tree, nodes = step["drafted"]["tree"], tuple(step["accepted"]["path"])
                try:
                    tree = Tree(tuple(written_tree["parent"]), tuple(written_tree["token"]))
                except Malformed as why:
                    raise UnusableInput(f"{path}: line {number}: drafted.tree.{why}") from None
                if not all(0 <= node < len(tree) for node in nodes):
                    raise UnusableInput(f"{path}: line {number}: accepted.path: {list(nodes)} leaves the tree")
                steps.append((tree, nodes))
    return {"trace": counts_of(steps)} if steps else {}


def _result_counts(path: Path, lines: list[str]) -> dict[str, RankCounts]:
    counts_by_kind: dict[str, RankCounts] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
            if "id" not in content:
                raise ValueError("no case")
            for tag, rows in content.get("ranks", {}).items():
                counts = RankCounts(
                    {(depth, rank): offered for depth, rank, offered, _ in rows},
                    {(depth, rank): accepted for depth, rank, _, accepted in rows if accepted},
                )
                _check(counts)
                counts_by_kind[tag] = counts_by_kind.get(tag, RankCounts()) + counts
        except (ValueError, TypeError, AttributeError) as why:
            raise UnusableInput(f"{path}: line {number}: {why}: no line of results.jsonl") from None
    return counts_by_kind


def _check(counts: RankCounts) -> None:
    """Raise ValueError for counts that no run has."""
    for place, offered in counts.offered.items():
        are_integers = all(isinstance(number, int) for number in (*place, offered))
        if not are_integers or place[0] < 1 or place[1] < 0 or not 0 <= counts.accepted.get(place, 0) <= offered:
            raise ValueError(f"ranks {[*place, offered, counts.accepted.get(place, 0)]}")


def costs_in(path: Path) -> Costs:
    """The step times of a file: `{"1": {"1": 10.2, "8": 11.0}}` for batch sizes and numbers of nodes, in any unit.

    Raises:
        UnusableInput: The file cannot be read, or holds anything else.
    """
    content = json_in(path)
    costs: dict[int, dict[int, float]] = {}
    if not isinstance(content, dict) or not content:
        raise UnusableInput(f'{path}: step times are an object such as {{"1": {{"1": 10.2, "8": 11.0}}}}')
    for batch, times in content.items():
        if not isinstance(times, dict) or not times:
            raise UnusableInput(f"{path}: {batch}: no object of times by number of nodes")
        for nodes, time in times.items():
            number = isinstance(time, (int, float)) and not isinstance(time, bool) and 0 < time < float("inf")
            if not (batch.isdecimal() and nodes.isdecimal() and int(batch) and int(nodes) and number):
                raise UnusableInput(f"{path}: {batch}: {nodes}: {time} is no time of a batch and a number of nodes")
            costs.setdefault(int(batch), {})[int(nodes)] = float(time)
    return costs
