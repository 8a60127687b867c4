"""What README shows is true: its commands parse, its engine runs, its page is printed, its paths and families are."""

import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from backends.adapt.blackbox import PARAMETERS
from backends.adapt.component import CONTRACTS
from backends.registry import open_backend
from properties.invariants import ALL
from properties.strategies.models import GALLERY
from properties.verdict.judge import judge
from reference.architecture import Seeded
from reference.case import Case
from reference.oracle.decoder import Oracle
from reference.oracle.family import FAMILIES
from reference.sampling import Stops
from specverify.adapters.init_command import KINDS
from specverify.cli import cli, main
from specverify.setup.subjects import subject_of
from tests.inprocess import in_this_process

ROOT = Path(__file__).resolve().parents[3]
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
LINES = [line.split(" #")[0].strip() for block in BLOCKS for line in block.splitlines() if line.strip()]
COMMANDS = [line for line in LINES if line.startswith("specverify ")]


@pytest.mark.parametrize("line", COMMANDS)
def test_command_parses(line: str) -> None:
    name, *arguments = shlex.split(line)[1:]
    command = cli.commands[name]
    command.make_context(name, arguments)


def test_setup_commands_install_what_they_run() -> None:
    setup = [line for line in LINES if line.startswith("python3 -m venv")]
    assert [line.rsplit("/", 1)[1] for line in setup] == ["specverify diff", "pytest -n 2"]
    assert all("-c constraints.txt" in line for line in setup)


@pytest.mark.parametrize("page", ["README.md", "DESIGN.md", "DECISIONS.md", "CONTRIBUTING.md"])
def test_named_files_exist(page: str) -> None:
    named = re.findall(
        r"`((?:backends|properties|reports|reference|specverify|tests)/[\w/.]+)`", (ROOT / page).read_text()
    )
    assert named
    for name in named:
        assert (ROOT / name).exists(), name


README = (ROOT / "README.md").read_text()


@pytest.fixture
def in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A block of README, known by a line that it holds, as a module in the current folder; the module's name."""
    (block,) = [one for one in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if request.param in one]
    name = f"engine_{len(block)}"
    (tmp_path / f"{name}.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.mark.parametrize("in_its_folder", ["open_ = blackbox(generate, "], indirect=True)
def test_the_engine_in_ten_lines_is_judged_on_every_case(
    in_its_folder: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    in_this_process(monkeypatch)
    with pytest.raises(SystemExit) as ended:
        cli(["diff", "--backend", f"{in_its_folder}:open_", "--cases", "25", "--jobs", "1"])
    assert ended.value.code == 0
    assert "25 judged / 25 drawn" in capfd.readouterr().out


@pytest.mark.parametrize("in_its_folder", ["class MyEngine"], indirect=True)
def test_the_engine_that_shows_its_steps_is_judged(in_its_folder: str) -> None:
    """Opened by name, it agrees where it says what it emits."""
    case = Case(Seeded(GALLERY[1], 0), (3, 1, 4), stops=Stops(4))
    verdict = judge(case, ALL, Oracle(), subject_of(open_backend(f"{in_its_folder}:MyEngine")))
    assert verdict.findings == ()
    assert {verdict.outcomes[f"lossless.{name}"] for name in ("completes", "greedy-match")} == {"checked"}
    assert verdict.outcomes["cache.commit-equivalence"] == "unobserved"


def test_the_trace_of_readme_is_judged_and_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [one for one in re.findall(r"```json\n(.*?)```", README, re.DOTALL) if one.startswith('{"run"')]
    objects = re.sub(r"\n +", " ", block)  # README breaks one object into two lines
    file = tmp_path / "run.jsonl"
    for text, code in ((objects, 0), (objects.replace('"path": [0, 1]', '"path": [0, 2]'), 1)):
        file.write_text(text)
        with pytest.raises(SystemExit) as ended:
            main(["trace", "check", str(file)])
        assert ended.value.code == code
    assert f"{file}:2: run 0, step 0, emitted.tokens" in capsys.readouterr().out


def test_the_lines_from_an_empty_folder_name_what_is_there() -> None:
    (block,) = [one for one in BLOCKS if "mkdir my_gate" in one]
    words = block.split()
    assert "blackbox" in words
    assert set(re.findall(r"or ([\w, ]+); and a test", block)[0].split(", ")) | {"blackbox"} == set(KINDS)
    assert find_spec(words[words.index("--pyargs") + 1]) is not None


def test_readme_names_every_parameter_of_a_black_box() -> None:
    table = README.split("| parameter | what it is given |")[1].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", table)) - {"random"} == set(PARAMETERS)


@pytest.mark.parametrize("in_its_folder", ["def my_kernel"], indirect=True)
def test_the_kernel_of_readme_is_judged(in_its_folder: str) -> None:
    case = Case(Seeded(GALLERY[1], 0), (3, 1, 4), stops=Stops(4))
    verdict = judge(case, ALL, Oracle(), subject_of(open_backend(f"{in_its_folder}:open_")))
    assert verdict.findings == ()
    assert verdict.outcomes["attention.context-exact"] == "checked"


def test_readme_names_every_argument_of_every_component() -> None:
    table = README.split("| kind | what it may be given | judged first by |")[1].split("\n\n")[0]
    told = {
        row[0]: (row[1:-1], row[-1])
        for row in (re.findall(r"`([\w.*-]+)`", line) for line in table.splitlines())
        if row
    }
    assert {kind: names for kind, (names, _) in told.items()} == {
        kind: list(one.offers) for kind, one in CONTRACTS.items()
    }
    assert all(first in CONTRACTS[kind].judged_by for kind, (_, first) in told.items())


@pytest.mark.slow
def test_the_failure_page_is_what_its_command_prints(tmp_path: Path) -> None:
    """The first page of README, from the command beside it; the seed, and so the case, is the default.

    How many cases were judged by then, and what the other worker saw, depends on the machine.
    """

    def told(text: str) -> list[str]:
        text = re.sub(r"also seen .*?one cause", "", " ".join(text.split()))
        return re.sub(r"^\d+ of 500", "some of 500", text).split()

    (page,) = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    program = [sys.executable, "-m", "specverify", "diff", "--fault", "kv-truncated-not-gathered"]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert told(page) == told(done.stdout.split("\nDIFFER  cpu-eager\n")[0])


def test_the_families_that_readme_names_are_those_that_the_oracle_reads() -> None:
    (named,) = re.findall(r"config\.json and safetensors;\s+(.*?)\);", README, re.DOTALL)
    told = {word.lower().replace("openpangu-embedded", "pangu") for word in named.split(",")}
    read = {family.name for family in FAMILIES.values() if family.model_types}
    assert {re.sub("[^a-z0-9]", "", name) for name in told} == {name.replace("_", "") for name in read}


TRACED = {
    "structure": ("structure.parent-range", "structure.depth-consistent", "structure.positions-are-depth"),
    "walk": ("acceptance.greedy-walk", "acceptance.path-in-tree", "acceptance.support"),
    "blocks": ("lossless.stops", "draft.fidelity"),
    "stops": ("lossless.stops",),
    "accounting": ("lossless.accounting",),
}
"""The words of README's sentence on `trace check`, and the invariants that each means on its example."""


def test_the_recorded_trace_is_judged_by_all_that_its_sentence_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = [one for one in re.findall(r"```json\n(.*?)```", README, re.DOTALL) if one.startswith('{"run"')]
    lines = re.sub(r"\n +", " ", block)
    (tmp_path / "run.jsonl").write_text(lines)
    with pytest.raises(SystemExit) as ended:
        main(["trace", "check", str(tmp_path / "run.jsonl")])
    compared = capsys.readouterr().out.split("not asked")[0]
    assert ended.value.code == 0
    sentence = README[README.index("judges such a file without the engine:") :].split(", and with")[0]
    for word, names in TRACED.items():
        assert word in sentence
        assert [name for name in names if name not in compared] == [], word
