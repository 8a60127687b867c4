"""Trees of any size as text, and commands broken over lines: nothing is lost on the way."""

import re
import shlex
import subprocess

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from specverify.reference.tree import Tree
from specverify.reports.drawing import draw
from specverify.reports.pages.terminal import wrapped_command


@st.composite
def trees(draw_: st.DrawFn) -> Tree:
    size = draw_(st.integers(1, 64))
    reach = draw_(st.sampled_from([1, 3, 64]))
    parent = (0, *(draw_(st.integers(max(0, node - reach), node - 1)) for node in range(1, size)))
    order = (0, *draw_(st.permutations(range(1, size))))
    return Tree(parent, tuple(range(100, 100 + size))).renumber(order)


@settings(max_examples=120, deadline=None)
@given(trees(), st.data())
def test_drawing_counts_every_node_once_and_keeps_the_marked_one(tree: Tree, data: st.DataObject) -> None:
    marked = data.draw(st.none() | st.integers(0, len(tree) - 1))
    leaf = data.draw(st.none() | st.integers(0, len(tree) - 1))
    path = None if leaf is None else tree.path(leaf)
    text = draw(tree, path, marked)
    rows = re.findall(r"(\d+) token (\d+)", text)
    assert len(set(rows)) == len(rows)
    assert all(tree.token[int(node)] == int(token) for node, token in rows)
    hidden = sum(map(int, re.findall(r"\(\+(\d+) below\)", text) + re.findall(r"… (\d+) nodes? left", text)))
    assert len(rows) + hidden == len(tree)
    assert text.count("◀") == (marked is not None)
    assert max(map(len, text.splitlines())) <= 74
    assert len(rows) <= 25
    if marked is not None:
        assert re.search(rf"\b{marked} token .*◀", text)
        assert str(tree.parent[marked]) in {node for node, _ in rows}
    assert ("REJECTED" in text or "accepted" in text) == (path is not None)
    for line in text.splitlines():
        if path is not None and (row := re.search(r"(\d+) token", line)):
            assert ("accepted" in line) == (int(row[1]) in path)


def test_what_is_left_out_stands_where_its_branch_would() -> None:
    tree = Tree((0, 0, *range(1, 10), 1), tuple(range(12)))
    assert draw(tree, (0, 1, 11), 10, rows=4).splitlines() == [
        "0 token 0  accepted",
        "└── 1 token 1  accepted",
        "    ├── … 6 nodes left out",
        "    │   └── 8 token 8  REJECTED",
        "    │       └── 9 token 9  REJECTED",
        "    │           └── 10 token 10  REJECTED  ◀",
        "    └── 11 token 11  accepted",
        "6 of 12 nodes left out",
    ]


def test_drawing_hangs_children_under_parents_that_come_later() -> None:
    text = draw(Tree((0, 2, 0), (5, 6, 7)), (0, 2), 1)
    assert text == "0 token 5  accepted\n└── 2 token 7  accepted\n    └── 1 token 6  REJECTED  ◀\n"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("ab '\"$\\é漢", min_size=1, max_size=200), min_size=1, max_size=4))
def test_a_wrapped_command_is_the_same_command(parts: list[str]) -> None:
    command = shlex.join(
        ["specverify", "replay", parts[0], *(part for word in parts[1:] for part in ("--model", word))]
    )
    text = wrapped_command(command, "  replay  ")
    assert all(line.isprintable() and cell_len(line) <= 80 for line in text.splitlines())
    joined = text.removeprefix("  replay  ").replace("\\\n", "")
    assert shlex.split(joined) == shlex.split(command)


def test_a_wrapped_command_runs_in_a_shell() -> None:
    words = ["specverify", "replay", "a b" + "c'd" * 60, "--backend", "cuda-fused", "--model", "-m"]
    text = wrapped_command(shlex.join(words), "  replay  ").removeprefix("  replay  specverify")
    run = subprocess.run(["sh", "-c", "printf '%s\\n' " + text.strip()], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == words[1:]
