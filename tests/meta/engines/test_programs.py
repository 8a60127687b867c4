"""Programs: any language is judged in lines of JSON, and what breaks or babbles is told in one line."""

import json
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from specverify.backends.adapt.blackbox import PARAMETERS
from specverify.backends.base import ProgramFailure, Unavailable, Unsupported
from specverify.backends.programs import command, lines
from specverify.backends.registry import UnknownBackend, open_backend
from specverify.cli import main
from specverify.isolation.backend_spec import BackendSpec
from specverify.isolation.isolated import Isolated
from specverify.isolation.limits import Patience
from specverify.reference.case import Case
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Speculated
from tests.cases import PLAIN
from tests.inprocess import in_this_process

PROGRAMS = Path(__file__).resolve().parents[2] / "strangers" / "programs"
PAGE = (Path(__file__).resolve().parents[3] / "docs" / "how_to" / "program.md").read_text()
SCHEMA = json.loads(command.SCHEMA.read_text())
NODE = f"command:node {PROGRAMS / 'greedy_llama.mjs'}"
ASSISTED = f"command:{sys.executable} {PROGRAMS / 'assisted.py'}"

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")

Diff = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def diff(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Diff:
    """Runs `diff` on a program: exit code, result, and all that was printed, on one line."""
    in_this_process(monkeypatch)
    monkeypatch.chdir(tmp_path)

    def run(backend: str, *words: str) -> tuple[int, dict[str, Any], str]:
        with pytest.raises(SystemExit) as ended:
            main(["diff", "--backend", backend, "--cases", "8", "--jobs", "1", "--json", "result.json", *words])
        assert isinstance(ended.value.code, int)
        output = capfd.readouterr()
        page = " ".join((output.out + output.err).split())
        result = {"judged": 0, "findings": [], "errors": [page.partition("specverify: ")[2]]}
        if Path("result.json").exists():
            result = json.loads(Path("result.json").read_text())
        return ended.value.code, result, page

    return run


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    """Writes a program whose body answers `request` with `say(...)`; returns the backend's name."""

    def write(body: str) -> str:
        head = """
        import json, os, sys, time
        def say(request, **answer):
            print(json.dumps({"id": request["id"], **answer}), flush=True)
        declared = {"declaration": {"name": "tiny", "takes": ["seed"]}}
        for line in sys.stdin:
            request = json.loads(line)
        """
        file = tmp_path / f"program_{len(body)}.py"
        file.write_text(textwrap.dedent(head) + textwrap.indent(textwrap.dedent(body), "    "))
        return f"command:{sys.executable} {file}"

    return write


HELLO = """
if request["ask"] == "declare":
    say(request, **declared)
    continue
"""


@needs_node
def test_a_program_in_another_language_is_judged_on_all_that_is_drawn(diff: Diff) -> None:
    code, result, _ = diff(NODE)
    assert (code, result["judged"], result["declined"]) == (0, 8, {})
    assert result["invariants"]["lossless.greedy-match"]["checked"] == 8


@needs_node
@pytest.mark.parametrize(
    ("fault", "invariant"), [("mask", "lossless.greedy-match"), ("short", "lossless.stops")], ids=["mask", "short"]
)
def test_an_error_in_another_language_is_found(
    fault: str, invariant: str, diff: Diff, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GREEDY_LLAMA_FAULT", fault)
    code, result, _ = diff(NODE, "--invariant", invariant, "--cases", "24")
    assert code == 1
    assert [finding["invariant"] for finding in result["findings"]] == [invariant]


@needs_node
def test_a_crash_in_the_middle_is_a_finding_with_the_last_words(diff: Diff, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREEDY_LLAMA_FAULT", "crash")
    code, result, page = diff(NODE)
    assert code == 1
    (finding,) = result["findings"]
    assert finding["invariant"] == "lossless.completes"
    assert "the program exited with code 1" in page
    assert "RangeError: planted" in page


@needs_node
def test_a_line_beside_the_protocol_ends_the_run(diff: Diff, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREEDY_LLAMA_FAULT", "chatty")
    code, result, _ = diff(NODE)
    assert (code, result["findings"]) == (3, [])
    (error,) = result["errors"]
    assert "wrote on its standard output what is no line of the protocol: 'loading the model ...'" in error
    assert "write anything else to standard error" in error


@needs_node
def test_a_hang_is_a_finding_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREEDY_LLAMA_FAULT", "hang")
    with Isolated(BackendSpec(NODE), Patience(user_limit_s=1.0)) as apart:
        verdict = apart.subject(0).run_fresh(PLAIN)
        assert "gave no answer within 1 s" in getattr(verdict, "why", "")


@pytest.mark.slow
def test_transformers_in_a_program_of_its_own_agrees(diff: Diff) -> None:
    code, result, _ = diff(ASSISTED)
    assert (code, result["judged"], result["declined"]) == (0, 8, {})


def test_all_that_a_program_takes_is_sent_and_fits_the_schema(program: Callable[[str], str], tmp_path: Path) -> None:
    # The protocol has no words for a grammar, and objects of Python cannot be sent.
    elsewhere = ("prompt_ids", "max_new_tokens", "engine", "model", "draft_model", "grammar")
    every = [name for name in PARAMETERS if name not in elsewhere]
    log = tmp_path / "kept"
    body = f"""
    open({str(log)!r}, "a").write(line)
    declared["declaration"]["takes"] = {every}
    {{0}}
    counts = {{"proposed": 5, "accepted": 2}}
    say(request, tokens=[1] * request["max_new_tokens"], logprobs=[-1] * request["max_new_tokens"], **counts)
    """.replace("{0}", 'if request["ask"] == "declare": say(request, **declared); continue')
    backend = open_backend(program(body))
    case = Case(PLAIN.model, (3, 1), sampling=Sampling(0.5, top_k=3, seed=2**40 + 5), stops=Stops(4, (2,), (9,)))
    trace = backend.run(case)
    assert trace.output == (1,) * 4
    assert trace.steps[0].emitted is not None
    assert trace.steps[0].emitted.logprobs == (-1.0,) * 4
    assert trace.speculated == Speculated(5, 2)
    requests = [json.loads(line) for line in log.read_text().splitlines()]
    for request in requests:
        schema = {"$ref": "#/$defs/request", "$defs": SCHEMA["$defs"]}
        assert not list(Draft202012Validator(schema).iter_errors(request)), request
    assert requests[0] == {"id": 0, "ask": "declare", "protocol": 1}
    assert {name: requests[1][name] for name in ("id", "prompt_ids", "temperature", "top_k", "seed", "stops")} == {
        "id": 1, "prompt_ids": [3, 1], "temperature": 0.5, "top_k": 3, "seed": 5 + 2**40 % 2**31, "stops": [2, 9],
    }  # fmt: skip
    assert set(requests[1]) == {"id", "ask", "prompt_ids", "max_new_tokens", *every}
    parameters = SCHEMA["$defs"]["declared"]["properties"]["declaration"]["properties"]["takes"]["items"]["enum"]
    assert set(parameters) == set(every), "the schema names the parameters of a black box that are no Python objects"


def test_the_lines_in_the_docs_are_lines_of_the_protocol() -> None:
    (block,) = [block for block in PAGE.split("```") if block.startswith("json\n") and '"ask"' in block]
    lines_of = [json.loads(line) for line in block.splitlines()[1:] if line]
    kinds = ["declare", "declared", "generate", "generated", "unsupported", "error"]
    for kind, line in zip(kinds, lines_of, strict=True):
        schema = {"$ref": f"#/$defs/{kind}", "$defs": SCHEMA["$defs"], "unevaluatedProperties": False}
        assert not list(Draft202012Validator(schema).iter_errors(line)), (kind, line)


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(SCHEMA)


def test_a_program_is_started_again_after_it_ended(program: Callable[[str], str]) -> None:
    backend = open_backend(
        program(HELLO + "if request['prompt_ids'] == [9]: os._exit(7)\nsay(request, tokens=[1] * request['id'])")
    )
    assert backend.run(PLAIN).output == (1,)
    with pytest.raises(ProgramFailure, match="the program exited with code 7"):
        backend.run(Case(PLAIN.model, (9,)))
    assert len(backend.run(PLAIN).output) == 3


def test_an_error_line_is_a_finding_and_the_program_stays(program: Callable[[str], str], diff: Diff) -> None:
    name = program(
        HELLO + "print('reading weights', file=sys.stderr, flush=True)\nsay(request, error='no such tensor')"
    )
    code, _, page = diff(name)
    assert code == 1
    assert "the program tells an error: no such tensor" in page
    with pytest.raises(ProgramFailure):
        open_backend(name).run(PLAIN)


def test_a_case_that_a_program_does_not_take_is_declined(program: Callable[[str], str], diff: Diff) -> None:
    name = program(HELLO + "say(request, unsupported='prompts of 3 tokens')")
    with pytest.raises(Unsupported, match="tiny: prompts of 3 tokens"):
        open_backend(name).run(PLAIN)
    code, result, _ = diff(name)
    assert (code, result["judged"]) == (3, 0), "a run that declines everything is no pass"


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("say(request, tokens=['1'])", "answered against the protocol: "),
        ("say({'id': 99}, tokens=[1])", "answered request 1 with the id 99"),
        ("print('[1, 2]', flush=True)", "what is no line of the protocol: '[1, 2]'"),
        ("sys.stdout.buffer.write(b'\\xff\\x00\\n'); sys.stdout.flush()", "what is no line of the protocol: "),
        ("print('1' * 3000, flush=True)", "writes a line without an end"),
    ],
    ids=["no tokens", "another id", "no object", "no text", "endless"],
)
def test_an_answer_that_is_none_ends_the_run(
    body: str, line: str, program: Callable[[str], str], diff: Diff, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "without an end" in line:
        monkeypatch.setattr(lines, "LARGEST_LINE", 1000)
    code, result, page = diff(program(HELLO + body))
    assert (code, result["findings"]) == (3, [])
    (error,) = result["errors"]
    assert line in error
    assert "Traceback" not in page


def test_what_was_judged_before_is_told(program: Callable[[str], str], diff: Diff) -> None:
    name = program(HELLO + "say(request, **({'tokens': [1]} if request['id'] < 20 else {}))")
    code, result, _ = diff(name, "--cases", "40", "--invariant", "lossless.completes")
    assert code == 3
    assert 0 < result["judged"] < 40


@pytest.mark.parametrize(
    ("body", "kind", "line"),
    [
        ("sys.stderr.write('no module named engine'); sys.exit(3)", Unavailable,
         "the program exited with code 3 before its declaration: no module named engine"),
        ("os.kill(os.getpid(), 9)", Unavailable, "the program was ended by SIGKILL before its declaration"),
        ("os.close(1); time.sleep(60)", Unavailable, "closed its standard output and went on before its declaration"),
        ("time.sleep(60)", Unavailable, "told no declaration within 1 s"),
        ("print('hello', flush=True)", Unavailable, "what is no line of the protocol: 'hello'"),
        ("say(request, declaration={'name': 'tiny'})", Unavailable, "'takes' is a required property"),
        ("say(request, declaration={'name': 'tiny', 'takes': ['model']})", Unavailable, "'model' is not one of"),
        ("say(request, declaration={'name': 'tiny', 'takes': [], 'families': ['bert']})", UnknownBackend, "bert"),
    ],
    ids=["exits", "killed", "closes", "hangs", "babbles", "nothing taken", "takes what there is not", "family"],
)  # fmt: skip
def test_a_program_without_a_declaration_is_refused(
    body: str, kind: type[Exception], line: str, program: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "HANDSHAKE_S", 1.0 if "60" in body else 60.0)
    monkeypatch.setattr(lines, "ENDED_S", 0.5)
    with pytest.raises(kind) as refused:
        open_backend(program(body))
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("command:there-is-no-such-program --fast", "there-is-no-such-program cannot be started (No such file"),
        ("command:", "command: names no program"),
        ("command:sh -c 'unclosed", "No closing quotation"),
        ("command:/", "cannot be started (Permission denied)"),
    ],
)
def test_a_program_that_is_not_there_is_wrong_input(name: str, line: str, diff: Diff) -> None:
    code, _, page = diff(name)
    assert code == 2
    assert line in page
