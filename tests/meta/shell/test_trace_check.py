"""`trace check`: a file of any engine's traces is judged without the engine, or refused with the line that is wrong."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from specverify.adapt import save_checkpoint
from specverify.backends.registry import open_backend
from specverify.cli import main
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.files.json_types import encode
from specverify.reference.layout import KvLayout
from specverify.reference.recorded.lines import read_runs, trace_lines
from specverify.reference.recorded.schema import schema
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Stage, Trace
from specverify.reference.tree import Tree
from tests.models import LLAMA

CASE = Case(
    LLAMA,
    (3, 1, 4),
    Scripted((Tree((0, 0, 1, 0), (4, 13, 13, 5)), Tree((0, 0), (13, 2)))),
    KvLayout(padded_nodes=6),
    stops=Stops(6, eos=(2,)),
)
"""Greedy decoding repeats token 13, so that the first tree is accepted two deep and the second not at all."""

Line = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def trace() -> Trace:
    """The engine's own run of CASE."""
    recorded_trace = open_backend("cpu-eager").run(CASE)
    assert [step.accepted.path for step in recorded_trace.steps if step.accepted][:2] == [(0, 1, 2), (0,)]
    return recorded_trace


@pytest.fixture
def lines(trace: Trace) -> list[Line]:
    """The recorded run as objects, to be changed; a bare request in place of the case."""
    records: list[Line] = [json.loads(line) for line in trace_lines(CASE, trace)]
    stops = {"max_new_tokens": 6, "eos": [2]}
    records[0] = {"run": {"prompt": [3, 1, 4], "vocabulary": LLAMA.vocab_size, "stops": stops, "engine": "mine 1.2"}}
    return records


def check_trace(
    folder: Path, lines: list[Line] | str, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `trace check` on a file with these lines."""
    file = folder / "run.jsonl"
    file.write_text(lines if isinstance(lines, str) else "".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(SystemExit) as ended:
        main(["trace", "check", str(file), "--verbose", *options])
    output = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, output.out, output.err


def test_a_recorded_run_is_read_as_it_was_written_and_is_valid_under_the_schema(trace: Trace) -> None:
    written = list(trace_lines(CASE, trace))
    validator = jsonschema.Draft202012Validator(schema())
    assert [error for line in written for error in validator.iter_errors(json.loads(line))] == []
    (run,) = read_runs(written)
    assert run.case(None) == CASE
    assert encode(run.trace(CASE)) == encode(trace) | {"forward_s": 0.0}
    wrong = {"step": {"accepted": {"path": [0], "bonus": 1, "paht": [0]}}}
    assert list(validator.iter_errors(wrong))


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["trace", "schema"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out) == schema()


def test_a_right_trace_agrees_and_tells_what_was_not_asked(
    lines: list[Line], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, page, _ = check_trace(tmp_path, lines, capsys, "--json", str(tmp_path / "told.json"))
    result = json.loads((tmp_path / "told.json").read_text())
    assert (code, result["outcome"], result["judged"]) == (0, "agree", 1)
    compared = {name for name, counts in result["invariants"].items() if counts["checked"]}
    assert {
        "structure.mask-is-ancestry", "acceptance.greedy-walk", "lossless.stops", "lossless.accounting",
        "cache.isolation", "cache.untouched-slots", "draft.fidelity", "trace.continues",
    } <= compared  # fmt: skip
    why = {entry["invariant"]: entry["why"] for entry in result["unasked"]}
    assert why["lossless.greedy-match"] == "needs the model: name its checkpoint with --model"
    assert "further runs of the engine" in why["lossless.deterministic"]
    assert compared.isdisjoint(why)
    assert "not asked" in page


def test_a_page_has_one_line_a_stage(lines: list[Line], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_trace(tmp_path, lines, capsys)
    with pytest.raises(SystemExit):
        main(["trace", "check", str(tmp_path / "run.jsonl")])
    head, *rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert head[0] == "AGREE"
    assert [row[0] for row in rows] == [*(stage.word for stage in Stage), "more"]
    assert all("compared" in row or row[1:3] == ["not", "judged:"] for row in rows[:-1])


def change_at(*path: Any, value: Any) -> Callable[[list[Line]], None]:
    """The change of one value: the number of the line, then the path inside it."""

    def change(lines: list[Line]) -> None:
        inside: Any = lines
        for part in path[:-1]:
            inside = inside[part]
        assert inside[path[-1]] != value
        inside[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "line", "field", "invariant"),
    [
        (
            change_at(1, "step", "lowered", "parent", 2, value=0),
            2,
            "step 0, lowered.parent, row 2",
            "structure.parent-range",
        ),
        (
            change_at(1, "step", "lowered", "visible", 0, 3, 3, value=True),
            2,
            "lowered.visible",
            "structure.mask-is-ancestry",
        ),
        (
            change_at(1, "step", "lowered", "position", 1, value=9),
            2,
            "lowered.position",
            "structure.positions-are-depth",
        ),
        (change_at(1, "step", "accepted", "path", value=[0, 1]), 2, "step 0, accepted.path", "acceptance.greedy-walk"),
        (change_at(2, "step", "accepted", "bonus", value=5), 3, "step 1, accepted.bonus", "acceptance.greedy-walk"),
        (change_at(1, "step", "emitted", "tokens", 0, value=7), 2, "step 0, emitted.tokens", "lossless.stops"),
        (change_at(-1, "end", "output", 5, value=2), -1, "emitted.tokens", "lossless.stops"),
        (change_at(-1, "end", "finish", value="eos"), -1, "emitted.tokens", "lossless.stops"),
        (change_at(-1, "end", "accounting", "accepted", value=9), 0, "accounting.accepted", "lossless.accounting"),
        (change_at(2, "step", "context", 1, value=2), 3, "step 1, context", "trace.continues"),
        (change_at(2, "step", "drafted", "tree", "token", 0, value=2), 3, "drafted", "draft.fidelity"),
        (
            change_at(2, "step", "committed", "verified", "keys", 0, 0, 1, 0, value=9.0),
            3,
            "committed",
            "cache.isolation",
        ),
        (
            change_at(2, "step", "committed", "after", "keys", 0, 0, 1, 0, value=9.0),
            3,
            "committed",
            "cache.untouched-slots",
        ),
    ],
)
def test_a_wrong_value_is_a_line_with_file_line_step_and_field(
    change: Callable[[list[Line]], None],
    line: int,
    field: str,
    invariant: str,
    lines: list[Line],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(lines)
    number = line if line > 0 else len(lines) + line  # 0: the line `end`; -1: the last step
    code, page, _ = check_trace(tmp_path, lines, capsys)
    assert code == 1
    matching_lines = [line for line in page.splitlines() if line.endswith(f"({invariant})")]
    assert matching_lines, page
    assert matching_lines[0].startswith(f"{tmp_path / 'run.jsonl'}:{number}: run 0, ")
    assert field in matching_lines[0]
    assert "expected" in matching_lines[0]


REQUEST: Line = {"run": {"prompt": [3, 1, 4], "vocabulary": 64, "stops": {"max_new_tokens": 20}}}


def step(parent: list[int], path: list[int], **more: Any) -> Line:
    """A step of two drafted nodes, 9 and 5, and the tokens that the accepted nodes and the bonus 7 are."""
    token = [4, 9, 5]
    emitted = [*(token[node] for node in path[1:]), 7]
    tree = {"parent": parent, "token": token}
    stages = {"drafted": {"tree": tree}, "accepted": {"path": path, "bonus": 7}, "emitted": {"tokens": emitted}}
    return {"step": {**stages, **more}}


@pytest.mark.parametrize(
    ("parent", "path", "message"),
    [
        ([0, 0, 0], [0, 1, 2], "accepted.path, node 2: expected a child of node 1, observed a child of node 0"),
        ([0, 0, 0], [0, 2, 1], "accepted.path, node 1: expected a child of node 2, observed a child of node 0"),
        ([0, 0, 1], [0, 2], "accepted.path, node 2: expected a child of node 0, observed a child of node 1"),
        ([0, 0, 1], [1, 2], "accepted.path, node 1: expected the root, observed node 1"),
        ([0, 0, 1], [0, 0], "accepted.path, node 0: expected a child of node 0, observed the root"),
    ],
)
def test_accepted_nodes_that_are_no_path_of_the_tree_are_found_without_scores(
    parent: list[int], path: list[int], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, page, _ = check_trace(tmp_path, [REQUEST, step(parent, path), {"end": {"finish": None}}], capsys)
    findings = [line for line in page.splitlines() if line.startswith(str(tmp_path))]
    assert (code, findings) == (1, [f"{tmp_path / 'run.jsonl'}:2: run 0, step 0, {message} (acceptance.path-in-tree)"])


def test_accepted_nodes_without_any_tree_are_not_judged_as_a_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = step([0, 0, 0], [0, 1])
    del record["step"]["drafted"]
    _, page, _ = check_trace(tmp_path, [REQUEST, record, {"end": {"finish": None}}], capsys)
    assert "acceptance.path-in-tree" not in page.split("not asked")[0]
    rows = {"parent": [0, 0, 0], "valid": [True] * 3, "token": [4, 9, 5]}
    _, page, _ = check_trace(tmp_path, [REQUEST, {"step": {**record["step"], "lowered": rows}}, {"end": {}}], capsys)
    assert "acceptance.path-in-tree" in page.split("not asked")[0]


def test_emitted_tokens_that_are_not_those_of_the_path_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = step([0, 0, 0], [0, 1], emitted={"tokens": [5, 7]})
    options = ("--invariant", "acceptance.path-in-tree")
    code, page, _ = check_trace(tmp_path, [REQUEST, wrong, {"end": {"finish": None}}], capsys, *options)
    assert (code, "step 0, emitted.tokens: expected [9, 7], observed [5, 7]" in page) == (1, True), page


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        ([], "has no line `end`: it was cut off after step 0"),
        ([{"end": {}}], "ends after 2 of 20 tokens, at no stop, and `end.finish` does not say why"),
    ],
)
def test_a_run_that_was_cut_off_is_no_pass_unless_beginnings_are_meant(
    ending: list[Line], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where another run follows it."""
    cut_off = [REQUEST, step([0, 0, 0], [0, 1]), *ending]
    whole_run = [REQUEST, step([0, 0, 0], [0, 1]), {"end": {"finish": None}}]
    for lines, line in ((cut_off, 1), ([*whole_run, *cut_off, *whole_run], 4)):
        code, page, _ = check_trace(tmp_path, lines, capsys)
        assert (code, f"run {line // 3} (line {line}) {message}" in " ".join(page.split())) == (3, True), page
        assert check_trace(tmp_path, lines, capsys, "--prefix")[0] == 0
    wrong = [REQUEST, step([0, 0, 0], [0, 1, 2]), *ending]
    assert check_trace(tmp_path, wrong, capsys)[0] == check_trace(tmp_path, wrong, capsys, "--prefix")[0] == 1


def test_rows_of_a_lowering_are_judged_without_the_tree_that_they_lower(
    lines: list[Line], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in lines[1:-1]:
        del line["step"]["drafted"]
    code, page, _ = check_trace(tmp_path, lines, capsys)
    assert code == 0, page
    compared, unasked_part = page.split("not asked", 1)
    for name in ("depth-consistent", "ancestor-table", "mask-is-ancestry", "positions-are-depth", "links-walk"):
        assert f"structure.{name}" in compared
    for name in ("structure.parent-range", "structure.validity-closed", "lossless.accounting"):
        assert (name in compared, name in unasked_part) == (False, True)
    assert "acceptance.greedy-walk" in compared
    lines[1]["step"]["lowered"]["depth"][2] += 1
    code, page, _ = check_trace(tmp_path, lines, capsys)
    assert (code, "run.jsonl:2: run 0, step 0, lowered.depth, row 2" in page) == (1, True)


def test_a_bonus_is_judged_by_the_scores_before_it_without_any_tree(
    lines: list[Line], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in lines[1:-1]:
        del line["step"]["drafted"], line["step"]["lowered"]
    code, page, _ = check_trace(tmp_path, lines, capsys)
    assert (code, "acceptance.greedy-walk" in page.split("not asked")[0]) == (0, False), page
    lines[2]["step"]["accepted"]["bonus"] = 5
    code, page, _ = check_trace(tmp_path, lines, capsys)
    assert (code, "run.jsonl:3: run 0, step 1, accepted.bonus, node 0" in page) == (1, True)


@pytest.mark.parametrize(
    ("hidden", "counter"),
    [(("drafted",), "accepted"), (("accepted",), "proposed"), (("drafted", "accepted"), "rejected")],
)
def test_counters_are_judged_by_what_the_steps_show(
    hidden: tuple[str, ...], counter: str, lines: list[Line], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in lines[1:-1]:
        for name in (*hidden, "lowered", "scored"):
            del line["step"][name]
    code, page, _ = check_trace(tmp_path, lines, capsys)
    assert (code, "lossless.accounting" in page.split("not asked")[0]) == (0, False), page
    lines[-1]["end"]["accounting"][counter] += 1
    code, page, _ = check_trace(tmp_path, lines, capsys)
    assert (code, f"accounting.{counter}" in page) == (1, True), page


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint(LLAMA, "float32", tmp_path_factory.mktemp("model")))


def tokens_alone(output: list[int]) -> list[Line]:
    """A run of which nothing but the tokens is known."""
    return [{"run": {"prompt": [3, 1, 4], "stops": {"max_new_tokens": 6}}}, {"end": {"output": output}}]


def test_tokens_are_judged_against_the_checkpoint_that_is_named(
    checkpoint: str, trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = list(trace.output)
    code, page, _ = check_trace(tmp_path, tokens_alone(right), capsys, "--model", checkpoint)
    assert (code, "lossless.greedy-match (6)" in page) == (0, True)
    wrong = [*right[:3], (right[3] + 1) % LLAMA.vocab_size, *right[4:]]
    code, page, _ = check_trace(tmp_path, tokens_alone(wrong), capsys, "--model", checkpoint)
    assert code == 1
    assert page.startswith(
        f"{tmp_path / 'run.jsonl'}:2: run 0, step 0, emitted.tokens, position 3: expected {right[3]}"
    )


def test_every_stage_is_judged_against_the_checkpoint_that_is_named(
    checkpoint: str, lines: list[Line], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result_file = str(tmp_path / "told.json")
    assert check_trace(tmp_path, lines, capsys, "--model", checkpoint, "--json", result_file)[0] == 0
    invariants = json.loads(Path(result_file).read_text())["invariants"]
    for name in ("attention.context-exact", "cache.commit-equivalence", "lossless.greedy-match", "lossless.logprobs"):
        assert invariants[name]["checked"] == 1
    lines[2]["step"]["scored"]["logits"][1][0] += 1.0
    code, page, _ = check_trace(tmp_path, lines, capsys, "--model", checkpoint)
    assert code == 1
    assert "run.jsonl:3: run 0, step 1, scored.logits, node 1" in page


def test_a_step_that_shows_some_stages_is_judged_by_those(
    lines: list[Line], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without context, output and finish, which follow from the blocks."""
    few = [{"step": {name: line["step"][name] for name in ("drafted", "accepted", "emitted")}} for line in lines[1:-1]]
    code, page, _ = check_trace(tmp_path, [lines[0], *few, {"end": {}}], capsys)
    assert code == 0, page
    assert "lossless.stops" in page.split("not asked")[0]
    assert "the trace shows no lowered" in " ".join(page.split())
    few[1]["step"]["emitted"]["tokens"].append(13)
    code, page, _ = check_trace(tmp_path, [lines[0], *few, {"end": {}}], capsys)
    assert (code, "run.jsonl:3: run 0, step 1, emitted.tokens" in page) == (1, True)


def test_a_step_without_a_tree_between_others_moves_no_block(
    lines: list[Line], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("drafted", "accepted"):
        del lines[1]["step"][name]
    lines[-1]["end"].pop("accounting")
    code, page, _ = check_trace(tmp_path, lines, capsys)
    assert code == 0, page
    assert "lossless.stops" in page.split("not asked")[0]


def test_padding_to_several_sizes_is_not_judged_by_one(
    lines: list[Line], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "structure.validity-closed" in check_trace(tmp_path, lines, capsys)[1].split("not asked")[0]
    lowered = lines[2]["step"]["lowered"]
    for name in ("token", "parent", "depth", "position", "valid", "slot", "next_token", "next_sibling", "ancestor"):
        del lowered[name][-1]
    lowered["visible"] = [[row[:-1] for row in layer[:-1]] for layer in lowered["visible"]]
    code, page, _ = check_trace(tmp_path, lines, capsys)
    assert code == 0, page
    assert "structure.validity-closed" not in page.split("not asked")[0]
    lines[0]["run"]["padded_nodes"] = 6
    code, page, _ = check_trace(tmp_path, lines, capsys)
    assert (code, "run.jsonl:3: run 0, step 1, lowered.valid" in page) == (1, True)


@pytest.mark.parametrize(
    ("content", "doubt"),
    [
        ([], "the file holds no run"),
        ([{"run": {"prompt": [1], "vocabulary": 8, "stops": {"max_new_tokens": 4}}}], "nothing could be judged in 1"),
        ([*tokens_alone([])[:1], {"end": {"output": []}}], "missing: the number of token ids"),
    ],
)
def test_where_nothing_is_compared_there_is_no_pass(
    content: list[Line], doubt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, page, error = check_trace(tmp_path, content, capsys)
    assert code == (2 if "missing" in doubt else 3)
    assert doubt in " ".join((page + error).split())


RUN = '{"run": {"prompt": [1], "vocabulary": 8, "stops": {"max_new_tokens": 4}}}\n'


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("nonsense", "1: no JSON: Expecting value"),
        ("[1, 2]", "1: an object with one key is expected here: run, step, end"),
        ('{"step": {}}', "1: step: a line `run` comes before it"),
        ('{"run": {"prompt": [1], "vocabulary": 8}}', "1: run: 'stops' is a required property"),
        ('{"run": {"prompt": [1], "stops": {"max_new_tokens": 4}}}', "1: run.vocabulary: missing"),
        ('{"run": {"prompt": [9], "vocabulary": 8, "stops": {"max_new_tokens": 4}}}', "1: run.prompt[0]: 9 is not in"),
        (RUN + '{"step": {"acceptd": {}}}', "2: step: Additional properties are not allowed ('acceptd'"),
        (RUN + '{"step": {"accepted": {"path": ["x"], "bonus": 1}}}', "2: step.accepted.path[0]: 'x' is not of type"),
        (RUN + '{"step": {"emitted": {"tokens": [9]}}}', "2: end.output: 9 is not in the vocabulary of 8"),
        (
            RUN + '{"step": {"scored": {"logits": [[1, 2]]}}}',
            "2: step 0, scored.logits: list of float64 [1, 2], expected",
        ),
        (RUN + '{"step": {"scored": {"logits": [["x"]]}}}', "2: step.scored.logits: 'x' stands among numbers"),
        (RUN + '{"step": {"drafted": {"tree": {"parent": [1], "token": [1]}}}}', "2: step.drafted.tree.parent[0]: the"),
        (RUN + '{"step": {}}\n{"step": {"emitted": {"tokens": [1]}}}', "3: step.context: missing, and step 0 does not"),
        (RUN + '{"end": {"output": [1], "finish": "done"}}', "2: step 0, emitted.finish: 'done', expected eos"),
        (RUN + '{"end": {}}\n{"end": {}}', "3: end: a line `run` comes before it"),
        ('{"run": {"case": {"schema": 1}}}', "1: run.case: "),
        (RUN.replace("[1]", '[1], "sampling": {"processors": ["os:system"]}'), "1: run.sampling.processors: a name in"),
        (RUN.replace("[1]", '[1], "windows": [-1]'), "1: run.windows: a window is a number of tokens"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_in_one_line(
    content: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, page, error = check_trace(tmp_path, content, capsys)
    assert (code, page) == (2, "")
    assert error.startswith(f"specverify: {tmp_path / 'run.jsonl'}:{line}")
    assert error.count("\n") == 1


def test_a_file_that_is_not_there_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, why in (("absent.jsonl", "No such file"), ("pipe", "it is a FIFO")):
        with pytest.raises(SystemExit) as ended:
            main(["trace", "check", str(tmp_path / name)])
        assert ended.value.code == 2
        assert why in capsys.readouterr().err


def test_a_sampled_run_is_judged_by_its_own_laws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = Case(LLAMA, (3, 1, 4), Scripted((Tree((0, 0), (4, 13)),)), sampling=Sampling(0.7, top_k=3), stops=Stops(4))
    written: list[Line] = [json.loads(line) for line in trace_lines(case, open_backend("cpu-eager").run(case), True)]
    code, page, _ = check_trace(tmp_path, written, capsys)
    assert code == 0, page
    for name in ("lossless.processors-per-node", "acceptance.sampled-walk", "acceptance.support"):
        assert name in page.split("not asked")[0]
    law = written[1]["step"]["scored"]["law"][0]
    law[0], law[1] = law[0] + 0.1, law[1] - 0.1
    code, page, _ = check_trace(tmp_path, written, capsys)
    assert (code, "run.jsonl:2: run 0, step 0, scored.law" in page) == (1, True)
