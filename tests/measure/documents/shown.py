"""What the commands of a page print: they run in order, in one folder for each page."""

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.measure.documents.pages import ROOT, blocks, commands_of

Runner = Callable[[str, Path, int], tuple[str, int]]
"""Runs a command in a folder, after a command with the exit code given; returns what it printed, and its exit code."""

MEASURED = (
    (r"\bin \d+(\.\d+)? s, \d+(\.\d+)? per second", "in … s, … per second"),
    (r"\d+ of (\d+) cases were judged, then", r"… of \1 cases were judged, then"),
    (r"[\d.e+]+ times what is allowed", "… times what is allowed"),
    (r"torch [\d.]+(\+\w+)?", "torch …"),
    (r"also seen .*?one cause ", ""),
    (r" +", " "),
)
"""What differs from run to run and from machine to machine, and what stands in its place where texts are compared."""

PROGRESS = re.compile(r"\d+ of \d+ cases, ")
"""Lines that a slow run writes every half minute; no page shows them."""


def in_a_process(command: str, folder: Path, before: int) -> tuple[str, int]:
    """Run a command as a user does; `specverify`, `python` and `pytest` are those of this process' environment."""
    names = (("specverify", "-m specverify"), ("pytest", "-m pytest"), ("python", ""))
    python = shlex.quote(sys.executable)
    functions = "".join(f'{name}() {{ {python} {words} "$@"; }}\n' for name, words in names)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COLUMNS"))}
    variables |= {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    ended = subprocess.run(
        ["bash", "-c", f"{functions}(exit {before})\n{command}"],
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    return ended.stdout, ended.returncode


def in_this_process(command: str, folder: Path, before: int) -> tuple[str, int]:
    """Run a command of ours without a new process; any other command gets one."""
    words = shlex.split(command)
    if words[0] != "specverify" or {"|", ">", "<", "&&"} & {*words}:
        return in_a_process(command, folder, before)
    from specverify.cli import main

    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    code = 0
    here = Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            main(words[1:])
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        os.chdir(here)
    printed.seek(0)
    return printed.read(), code


def prepare(text: str, folder: Path) -> Path:
    """Put into `folder` what the commands of a page find there; returns the folder in which they run.

    A block with the note `in examples/NAME` runs in a copy of that folder, beside copies of the other examples. A block
    with the note `save FILE` is written to that file.
    """
    here = folder
    for block in blocks(text):
        words = block.note.split()
        if "in" in words:
            shutil.copytree(ROOT / "examples", folder / "examples", dirs_exist_ok=True)
            here = folder / words[words.index("in") + 1]
        if "save" in words:
            (here / words[words.index("save") + 1]).write_text(block.text)
    return here


def shown_again(text: str, folder: Path, run: Runner, slow: bool) -> str:
    """A page with what its commands print now; those of slow blocks run where `slow` is set, and else stay."""
    here = prepare(text, folder)
    code = 0
    replacements = []
    for block in blocks(text):
        if block.language != "console" or (block.slow and not slow):
            continue
        answers = []
        for command, text_before in commands_of(block):
            printed, code = run(command, here, code)
            answers.append(f"$ {command}\n{_shorten(printed, text_before)}")
        replacements.append((block, "".join(answers)))
    for block, new in reversed(replacements):
        if comparable(block.text) != comparable(new):
            text = text[: block.span[0]] + new + text[block.span[1] :]
    return text


def comparable(text: str) -> str:
    """A text without what differs from run to run; where lines are broken does not count."""
    words = " ".join(text.split())
    for pattern, replacement in MEASURED:
        words = re.sub(pattern, replacement, words)
    return words


def _shorten(printed: str, text_before: str) -> str:
    """What a command printed, cut where the page cuts it: a line `...` of the page stands for all further lines."""
    lines = [line.rstrip() for line in printed.splitlines() if not PROGRESS.match(line)]
    page_lines = text_before.splitlines()
    if "..." in page_lines:
        lines = [*lines[: page_lines.index("...")], "..."]
    while lines and not lines[-1]:
        lines.pop()
    return "".join(f"{line}\n" for line in lines)
