"""Follow README literally: a fresh clone, a fresh environment, every block in order, each command as it is printed.

Variables that a command sets, such as those of an activated environment, stay for the next one, as in one terminal. A
`file` block is written under its name where the reader stands. A `console` block must print what it shows, and its
command must end with 1 where it shows DIFFER; every other command must end with 0.

    python .ci/readme.py                      # everything, the test suite too
    python .ci/readme.py --without pytest     # without the commands that contain a word

The commands need the package index. Exit codes: 0 all blocks did what they say; 1 a command did not; 2 wrong usage.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.measure.documents.pages import Block, blocks, commands_of  # noqa: E402

ELLIPSIS = "..."
"""The line of a console block behind which more is printed than it shows."""


class Wrong(Exception):
    """A block did not do what the page says."""


@dataclass
class Terminal:
    """A reader's terminal: a folder and variables that commands change.

    Attributes:
        folder: Where the reader stands.
        variables: The environment of the next command.
        scratch: A folder outside the clone for the terminal's own files.
    """

    folder: Path
    variables: dict[str, str]
    scratch: Path

    def run(self, command: str) -> tuple[int, str]:
        """The exit code of a command, and what it printed to standard output and standard error."""
        after = self.scratch / "variables"
        script = f"{command}\ncode=$?\nenv -0 >{after}\nexit $code\n"
        process = subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if after.exists():
            pairs = [pair.partition("=") for pair in after.read_text().split("\0") if pair]
            self.variables = {name: value for name, _, value in pairs}
            after.unlink()
        return process.returncode, process.stdout


def commands(block: Block) -> Iterator[tuple[str, str | None]]:
    """The commands of a block, each with the text that it must print; None where the page shows none."""
    if block.language == "console":
        yield from commands_of(block)
    elif block.language == "bash":
        yield from ((line, None) for line in block.text.splitlines() if line.strip())


def check(command: str, shown_text: str | None, code: int, printed: str) -> None:
    """Compare a command's end with what the page shows.

    Raises:
        Wrong: The exit code or the text is another.
    """
    expected = 1 if shown_text is not None and "\nDIFFER" in f"\n{shown_text}" else 0
    if code != expected:
        raise Wrong(f"{command!r} ended with {code}, not {expected}:\n{printed}")
    if shown_text is None:
        return
    lines = shown_text.rstrip().splitlines()
    if ELLIPSIS in lines:
        lines = lines[: lines.index(ELLIPSIS)]
    if lines != printed.splitlines()[: len(lines)]:
        raise Wrong(f"{command!r} prints another text than the page shows:\n{printed}")


def follow(page: Path, terminal: Terminal, without: tuple[str, ...] = ()) -> Iterator[str]:
    """Do what a page says; a line for each command that did it.

    Raises:
        Wrong: A block did not do what the page says.
    """
    for block in blocks(page.read_text()):
        if block.note.startswith("file "):
            (terminal.folder / Path(block.note.removeprefix("file ")).name).write_text(block.text)
        for command, shown_text in commands(block):
            if any(word in command for word in without):
                yield f"left out   {command}"
                continue
            began = time.monotonic()
            check(command, shown_text, *terminal.run(command))
            yield f"{time.monotonic() - began:7.1f} s  {command}"


def main() -> int:
    """Follow README in a fresh clone; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without", action="append", default=[], metavar="WORD")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder_name:
        clone, scratch = Path(folder_name, "specverify"), Path(folder_name, "terminal")
        scratch.mkdir()
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        environment = subprocess.run(["env", "-0"], stdout=subprocess.PIPE, text=True, check=True).stdout
        variables = dict(pair.split("=", 1) for pair in environment.split("\0") if pair)
        # The reader's environment is not this one.
        for name in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME"):
            variables.pop(name, None)
        terminal = Terminal(clone, variables, scratch)
        try:
            for line in follow(clone / "README.md", terminal, tuple(options.without)):
                print(line, flush=True)
        except Wrong as why:
            print(f"README is wrong: {why}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
