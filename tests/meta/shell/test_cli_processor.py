"""`--processor`: cases name it, engine and oracle apply it, faults with it replay, and bad ones cost one clear line."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specverify.cli import main
from specverify.reference import user_processors
from specverify.reference.case import Case
from specverify.reference.case_json import case_from_json, case_to_json
from specverify.reference.draft import Scripted
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.tree import Tree
from tests.inprocess import in_this_process
from tests.models import ELEVEN_TOKENS

ROOT = Path(__file__).resolve().parents[3]
LATE = "processors-see-path-one-late"
PER_NODE = "lossless.processors-per-node"

OWN_PROCESSORS = """
import numpy as np

seen = []
calls = [0]

def shy(tokens, logits):
    seen.append(len(logits))
    return logits - 3.0 * (np.arange(len(logits)) == tokens[-1])

def narrow(tokens, logits):
    return np.where(logits < logits.max() - 2 - tokens[-1] % 3, -np.inf, logits)

lam = lambda tokens, logits: logits
number = 3
def raises(tokens, logits): raise RuntimeError("no\\n license")
def leaves(tokens, logits): raise SystemExit(0)
def takes(tokens): return tokens
def fifth(tokens, logits): return logits + 0 * logits[4]
def short(tokens, logits): return logits[1:]
def bans(tokens, logits): return logits - np.inf
def counts(tokens, logits):
    calls[0] += 1
    return logits + calls[0]
def later(tokens, logits):
    if len(tokens) > 4:
        raise RuntimeError("too\\n long")
    return logits + 0.0
"""


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command in a folder with processors of a user's own, as a process that has admitted none would."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    in_this_process(monkeypatch)
    (tmp_path / "processors_own.py").write_text(OWN_PROCESSORS)
    (tmp_path / "broken_own.py").write_text("def f(:\n")
    (tmp_path / "leaving_own.py").write_text("raise SystemExit(0)\n")
    sys.modules.pop("processors_own", None)

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(user_processors, "_ADMITTED", {})
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        assert isinstance(ended.value.code, int)
        return (ended.value.code, *capfd.readouterr())

    return command


def complaint(ended: tuple[int, str, str]) -> str:
    """The one line with which wrong input ends, whatever was said of progress before it."""
    code, out, err = ended
    assert (code, out) == (2, "")
    assert err.endswith("\n")
    *progress, line = err[:-1].split("\n")
    assert not [line for line in progress if " cases" not in line]
    assert line.startswith("specverify: ")
    assert len(line) < 400
    return line.removeprefix("specverify: ")


def sampled_case(*names: str, temperature: float = 1.0) -> Case:
    """A path of the tokens 4 and 2 below the root, with a sibling for each."""
    tree = Tree((0, 0, 0, 1, 1), (5, 4, 7, 2, 9))
    return Case(
        ELEVEN_TOKENS, (3, 5), Scripted((tree,)), sampling=Sampling(temperature, processors=names), stops=Stops(4)
    )


def write_case(case: Case) -> str:
    Path("case.json").write_text(json.dumps(case_to_json(case)))
    return "case.json"


BAD = {
    "no module": ("gone.own:f", "cannot import gone.own (ModuleNotFoundError: No module named 'gone')"),
    "no syntax": ("broken_own:f", "cannot import broken_own (SyntaxError: "),
    "no stay": ("leaving_own:f", "cannot import leaving_own (SystemExit: 0)"),
    "no function": ("processors_own:gone", "module processors_own has no gone"),
    "no name": ("processors_own", "is not of the form pkg.module:function"),
    "a number": ("processors_own:number", "is of type int, not a plain function"),
    "a lambda": ("processors_own:lam", "is a lambda or closure, not a plain function"),
    "raises": ("processors_own:raises", "raised RuntimeError: no license, on "),
    "leaves": ("processors_own:leaves", "raised SystemExit: 0, on "),
    "arguments": ("processors_own:takes", "raised TypeError: "),
    "a shape": ("processors_own:short", "returns shape ("),
    "no token": ("processors_own:bans", "leaves no token"),
    "state": ("processors_own:counts", "answers differently when called twice with the same arguments"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_processor_that_cannot_be_had_is_one_line_before_anything_runs(name: str, run: Run) -> None:
    processor, words = BAD[name]
    good = ("--processor", "processors_own:shy", "--processor", processor)
    for command in (("diff",), ("replay", write_case(sampled_case()))):
        assert complaint(run(*command, *good)).startswith(f"--processor {processor}: {words}")
    assert [file.name for file in Path().iterdir() if file.name == ".specverify"] == []


def test_a_processor_must_suit_every_vocabulary_that_it_will_meet(run: Run) -> None:
    """The smallest built-in model has two tokens, the case's own eleven."""
    line = complaint(run("diff", "--processor", "processors_own:fifth"))
    assert line.startswith("--processor processors_own:fifth: raised IndexError: ")
    assert line.endswith(", on 2 logits")
    code, out, err = run(
        "replay", write_case(sampled_case("processors_own:fifth")), "--processor", "processors_own:fifth"
    )
    assert (code, err) == (0, "")
    assert out.startswith("AGREE")


@pytest.mark.slow
def test_one_that_fails_later_is_no_finding_of_the_backend(run: Run) -> None:
    """It passes its trial, and fails on longer contexts: engine and oracle alike cannot go on."""
    arguments = ("--processor", "processors_own:later")
    message = "--processor processors_own:later: raised RuntimeError: too long, on "
    assert complaint(run("diff", *arguments, "--cases", "100", "--jobs", "1", "--invariant", PER_NODE)).startswith(
        message
    )
    case = sampled_case("processors_own:later")
    assert complaint(run("replay", write_case(case), *arguments)) == f"{message}11 logits"


def test_a_case_that_names_what_was_not_named_to_replay(run: Run) -> None:
    name = "processors_own:shy"
    for case in (sampled_case(name), sampled_case("processors_own:narrow", name), sampled_case(name, temperature=0.0)):
        line = complaint(run("replay", write_case(case), "--processor", "processors_own:narrow"))
        assert line == f"case.json: sampling.processors: {name}: not admitted; name it with --processor {name}"
    assert "processors_own" not in sys.modules or "processors_own:shy" not in user_processors._ADMITTED


def test_prompts_with_a_processor_are_sampled(run: Run) -> None:
    line = complaint(run("diff", "--model", "builtin:smollm2", "--processor", "processors_own:shy"))
    assert line.startswith("--processor needs --temperature here")


def test_engine_and_oracle_apply_it_alike(run: Run) -> None:
    arguments = ("--processor", "processors_own:shy", "--processor", "processors_own:narrow")
    chosen = [PER_NODE, "acceptance.sampled-walk", "acceptance.support", "lossless.completes", "lossless.deterministic"]
    globs = [word for name in chosen for word in ("--invariant", name)]
    code, out, err = run("diff", *arguments, "--cases", "16", *globs, "--json", "-")
    assert code == 0, err
    result = json.loads(out)
    assert result["cases"] == 16
    assert result["invariants"][PER_NODE]["checked"] > 2
    # Beyond its trials it saw vocabularies of models.
    assert {*sys.modules["processors_own"].seen} - {64, 2, 127}
    for case in (
        sampled_case("processors_own:shy", "processors_own:narrow"),
        sampled_case("processors_own:shy", temperature=0.0),
    ):
        code, out, err = run("replay", write_case(case), *arguments)
        assert (code, out, err) == (0, "AGREE  the file holds a case and no finding\n", "")


def test_a_fault_that_only_a_processor_shows(run: Run) -> None:
    """It sees the row before its own: the plain case does not tell, the case with the processor does."""
    arguments = ("--processor", "processors_own:shy", "--fault", LATE)
    assert run("replay", write_case(sampled_case()), *arguments)[0] == 0
    code, out, _ = run("replay", write_case(sampled_case("processors_own:shy")), *arguments)
    assert code == 1
    assert out.startswith(f"DIFFER  cpu-eager  {PER_NODE}")
    assert "--processor processors_own:shy" in out.replace("\\\n", " ")


@pytest.mark.slow
def test_a_fault_is_found_and_its_replay_names_the_processor(run: Run) -> None:
    name = "processors_own:shy"
    for seed in range(12):
        arguments = ("--processor", name, "--fault", LATE, "--invariant", PER_NODE)
        code, out, err = run("diff", *arguments, "--cases", "60", "--seed", str(seed), "--json", "-")
        (finding,) = json.loads(out)["findings"]
        assert code == 1, err
        words = shlex.split(finding["replay"])
        case = case_from_json(finding["case"])
        assert (name in words) == bool(case.sampling.processors)
        if case.sampling.processors:
            break
    assert case.sampling.processors == (name,)
    assert words[-2:] == ["--processor", name]
    code, out, _ = run(*words[1:])
    assert code == 1
    assert f"FAILED  {PER_NODE} fails as saved" in out
    without_fault = [word for word in words[1:] if word not in ("--fault", LATE)]
    code, out, _ = run(*without_fault)
    assert (code, out.startswith(f"FIXED  {PER_NODE} holds; saved with --fault {LATE} planted")) == (0, True)
    assert re.search(f"{name}: not admitted", complaint(run(*words[1:-2])))


@pytest.mark.slow
def test_real_workers_admit_it_too(run: Run) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{Path.cwd()}"}
    words = ["diff", "--cases", "12", "--jobs", "2", "--invariant", PER_NODE, "--processor", "processors_own:shy"]
    command = [sys.executable, "-m", "specverify", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert ended.returncode == 0, ended.stderr
