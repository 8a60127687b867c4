"""The README's commands parse: every option it shows exists, and every path it names is there."""

import re
import shlex
from pathlib import Path

import pytest

from specverify.cli import cli

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


@pytest.mark.parametrize("page", ["README.md", "DESIGN.md", "CONTRIBUTING.md"])
def test_named_files_exist(page: str) -> None:
    named = re.findall(
        r"`((?:backends|properties|reports|reference|specverify|tests)/[\w/.]+)`", (ROOT / page).read_text()
    )
    assert named
    for name in named:
        assert (ROOT / name).exists(), name
