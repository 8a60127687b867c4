"""`dispatch learn`: its formula is brute force's, its trees are the best, and what it cannot read is one line."""

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from specverify.backends.compositions import open_cpu
from specverify.checkpoints.given_draft import trees_in
from specverify.cli import main
from specverify.dispatch.measure import forward_seconds, tree_of
from specverify.dispatch.table import best_tree, expected_accepted, rates_of, rows, table
from specverify.properties.accepted_ranks import RankCounts, counts_of, counts_of_run
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel
from specverify.reference.draft_trees import Dispatch, named_tree, tree_of_paths
from specverify.reference.recorded.lines import trace_lines
from specverify.reference.sampling import Stops
from specverify.reference.tree import RankTree, Tree
from tests.models import OTHER_LLAMA

RATES = {(1, 0): 0.6, (1, 1): 0.2, (1, 2): 0.1, (2, 0): 0.5, (2, 1): 0.3, (3, 0): 0.4}
COSTS = {"1": {"1": 10, "4": 11, "16": 12}, "4": {"1": 10, "4": 16, "16": 30}, "16": {"1": 10, "4": 35, "16": 90}}


def walk_ends(tree: RankTree, rates: dict[tuple[int, int], float], node: int = 0) -> Iterator[tuple[int, float]]:
    """Each way in which a step can end, by brute force: the accepted nodes below `node`, and the probability."""
    stays = 1.0
    for child in tree.children[node]:
        rate = rates.get((tree.depth[child], tree.rank[child]), 0.0)
        stays -= rate
        for length, share in walk_ends(tree, rates, child):
            yield 1 + length, rate * share
    yield 0, stays


@pytest.mark.parametrize("name", ["D1", "D3", "D1-BF3", "D3-BF2", "D2-BF3", "D3-BF2-N8", "D3-BF3-N12"])
def test_the_expected_length_is_that_of_all_ways_to_end(name: str) -> None:
    tree = named_tree(name)
    ways = list(walk_ends(tree, RATES))
    assert sum(share for _, share in ways) == pytest.approx(1)
    assert expected_accepted(tree, RATES) == pytest.approx(sum(length * share for length, share in ways))


def test_no_tree_of_as_many_nodes_is_expected_to_be_longer() -> None:
    full = [tuple(path) for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)]
    rated_paths = [path for path in full if all((index + 1, rank) in RATES for index, rank in enumerate(path))]
    for nodes in range(1, 7):
        lengths = [
            expected_accepted(tree_of_paths(paths), RATES)
            for paths in itertools.combinations(rated_paths, nodes - 1)
            if all(path[:-1] in {(), *paths} for path in paths)
        ]
        assert len(best_tree(RATES, nodes)) == nodes
        assert expected_accepted(best_tree(RATES, nodes), RATES) == pytest.approx(max(lengths))
    assert len(best_tree({(1, 0): 0.5, (1, 1): 0.0}, 4)) == 2, "a node that is never accepted is left out"


def test_counts_give_back_the_rates_from_which_steps_were_drawn() -> None:
    rng, tree = random.Random(3), named_tree("D3-BF2")
    steps = []
    for _ in range(8_000):
        path, node = [0], 0
        while tree.children[node]:
            coin = rng.random()
            for child in tree.children[node]:
                coin -= RATES.get((tree.depth[child], tree.rank[child]), 0.0)
                if coin < 0:
                    break
            else:
                break
            path, node = [*path, child], child
        steps.append((Tree(tree.parent, (0,) * len(tree)), path))
    rates = rates_of(counts_of(steps, [tree]))
    for place, rate in rates.items():
        assert rate == pytest.approx(RATES.get(place, 0.0), abs=0.06)
    turned = RankTree((0, 0, 0), (0, 1, 0))
    shown_steps = [(Tree((0, 0, 0), (0, 1, 2)), (0, 1))]
    assert counts_of(shown_steps, [turned]).accepted == {(1, 1): 1}, "row 1 holds the second-best child"
    assert counts_of(shown_steps).accepted == {(1, 0): 1}


def test_large_batches_get_small_trees_and_equal_neighbours_one_row() -> None:
    costs = {int(batch): {int(nodes): float(time) for nodes, time in times.items()} for batch, times in COSTS.items()}
    table_rows = rows(RATES, costs)
    sizes = [len(row.tree) for row in table_rows]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1] == 1
    assert table_rows[0].per_time == pytest.approx(
        (1 + expected_accepted(table_rows[0].tree, RATES)) / table_rows[0].time
    )
    equal_rows = rows(RATES, {1: costs[1], 2: costs[1], 3: costs[16]})
    assert table(equal_rows) == Dispatch((2, 3), (equal_rows[1].tree, equal_rows[2].tree))


def test_a_run_of_diff_teaches_a_table_that_a_case_file_takes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    case = Case(
        OTHER_LLAMA, (3, 1, 4, 1, 5), LanguageModel(OTHER_LLAMA, named_tree("D3-BF2")), stops=Stops(20), dtype="float64"
    )
    run = open_cpu().run(case)
    counts = counts_of_run(case.draft, run.steps)
    assert counts.offered[1, 0] == len(run.steps)
    assert counts.accepted == {(depth, 0): counts.offered[depth, 0] for depth in (1, 2, 3)}, "the draft is the target"
    results, trace, costs, out = (
        tmp_path / name for name in ("results.jsonl", "trace.jsonl", "costs.json", "out.json")
    )
    ranks = [[*place, offered, counts.accepted.get(place, 0)] for place, offered in counts.offered.items()]
    results.write_text(json.dumps({"id": "x", "ranks": {"model": ranks, "ngram": [[1, 0, 4, 1]]}}) + "\n")
    trace.write_text("\n".join(trace_lines(case, run)) + "\n")
    costs.write_text(json.dumps(COSTS))
    for arguments in ([str(results), "--draft", "model"], [str(trace)]):
        assert status(["dispatch", "learn", *arguments, "--costs", str(costs), "--out", str(out)]) == 0
        assert json.loads(out.read_text())["trees"][0] == "D3", "only best tokens were accepted"
        table = trees_in(out)
        assert isinstance(table, Dispatch)
        assert table.trees[0] == named_tree("D3")
        assert "4 nodes (D3)" in capfd.readouterr().out


def status(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    ("results", "costs", "code", "line"),
    [
        ('{"id": "x", "ranks": {"model": [[1, 0, 4, 1]], "ngram": [[1, 0, 4, 1]]}}', COSTS, 2, "of model, ngram"),
        ('{"id": "x"}', COSTS, 3, "no step in"),
        ('{"id": "x", "ranks": {"model": [[1, 0, 4, 5]]}}', COSTS, 2, "line 1: ranks [1, 0, 4, 5]"),
        ('{"id": "x", "ranks": {"model": [[1, 0]]}}', COSTS, 2, "no line of results.jsonl"),
        ("text", COSTS, 2, "line 1 is no JSON"),
        ('{"step": {}}\n{"run": 1}', COSTS, 2, "no line of results.jsonl"),
        ('{"run": {}}', COSTS, 2, "line 1"),
        ('{"id": "x", "ranks": {"model": [[1, 0, 4, 1]]}}', {}, 2, "step times are an object"),
        ('{"id": "x", "ranks": {"model": [[1, 0, 4, 1]]}}', {"1": {"0": 3}}, 2, "3 is no time of a batch"),
        ('{"id": "x", "ranks": {"model": [[1, 0, 4, 1]]}}', {"1": {"2": -3}}, 2, "-3 is no time of a batch"),
        ('{"id": "x", "ranks": {"model": [[1, 0, 4, 1]]}}', {"1": 3}, 2, "1: no object of times"),
    ],
)
def test_what_cannot_be_learned_from_is_one_line(
    results: str, costs: object, code: int, line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r").write_text(results)
    (tmp_path / "c").write_text(json.dumps(costs))
    out = tmp_path / "out.json"
    arguments = ["dispatch", "learn", str(tmp_path / "r"), "--costs", str(tmp_path / "c"), "--out", str(out)]
    assert status(arguments) == code
    assert line in capfd.readouterr().err
    assert not out.exists()


def test_a_file_that_is_no_table_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    for content, line in (
        ({"up_to": [1]}, "'trees' is a required property"),
        ({"up_to": [1], "trees": ["D0"]}, r"trees\[0\]: 'D0' is not"),
        ({"up_to": [2, 1], "trees": ["D1", "D2"]}, "ascend"),
    ):
        file.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=line):
            trees_in(file)


def test_counts_add_up() -> None:
    counts = RankCounts({(1, 0): 3}, {(1, 0): 1})
    assert counts + RankCounts({(1, 0): 2, (2, 0): 1}, {}) == RankCounts({(1, 0): 5, (2, 0): 1}, {(1, 0): 1})


def test_forwards_are_timed_by_batch_and_nodes() -> None:
    backend = open_cpu()
    seconds = [
        forward_seconds(backend, OTHER_LLAMA, batch=batch, nodes=nodes, prefix=6, steps=2, dtype="float32")
        for batch, nodes in ((1, 1), (3, 9))
    ]
    assert all(0 < second < 10 for second in seconds)
    for nodes in (1, 2, 9, 40):
        assert len(tree_of(nodes)) == nodes


@pytest.mark.parametrize("value", ["", "0,1", "2,1", "1,1", "1,x"])
def test_numbers_of_batches_ascend(value: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert status(["dispatch", "costs", "--model", "m", "--batches", value, "--out", "-"]) == 2
    assert "ascending" in capfd.readouterr().err
