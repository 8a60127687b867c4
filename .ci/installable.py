"""Resolve README's install command on every supported Python, from the public package index alone.

The check runs uv, which reads wheels' metadata and downloads no wheel. It hides this machine's own indexes and local
wheels from uv: pip's and uv's variables and files are not read. For each Python it resolves `constraints.txt`, and for
the oldest one also the lowest versions that `pyproject.toml` names, all together.

    python .ci/installable.py                     # every supported Python
    python .ci/installable.py --lowest 3.10       # print the lowest versions with all that they pull in
    python .ci/installable.py --find 3.10         # print where the interpreter is

Exit codes: 0 every supported Python was resolved; 1 one cannot be installed; 2 wrong usage, or uv is missing; 3 nothing
failed, but a Python is absent here or the index cannot be reached. Exit 3 is no pass: a line names each Python that was
not checked, and why.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUPPORTED = ("3.10", "3.11", "3.12", "3.13")
PUBLIC = "https://pypi.org/simple"
RESOLVED, FAILED, UNCHECKED = 0, 1, 3
SECONDS = 300
"""The longest time that one resolution may take."""


@dataclass(frozen=True)
class Outcome:
    """The exit code of a resolution, and its line of the report."""

    code: int
    sentence: str


def environment() -> dict[str, str]:
    """This process' variables without those that steer pip or uv; certificates and proxies stay."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}


def candidates(version: str) -> Iterator[Path]:
    """Files that may be the interpreter of `version` ("3.12"): this process', those on PATH, those of pyenv."""
    yield Path(sys.executable)
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        yield Path(folder) / f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from sorted(pyenv.glob(f"versions/{version}.*/bin/python"))


def interpreter(version: str) -> Path | None:
    """The first interpreter of `version` that runs (shims of pyenv may lie on PATH and run nothing), or None."""
    ask = "import platform, sys; print(platform.python_version(), sys.executable)"
    for file in candidates(version):
        if not file.is_file():
            continue
        try:
            ran = subprocess.run([file, "-I", "-c", ask], capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            continue
        python_version, _, executable = ran.stdout.strip().partition(" ")
        if ran.returncode == 0 and python_version.startswith(f"{version}."):
            return Path(executable)
    return None


def lowest_bounds(pyproject: str) -> list[str]:
    """The lower bounds of what `.[test]` installs, as pins: `numpy>=1.26` of the text gives `numpy==1.26`."""
    dependencies = re.search(r"^dependencies = \[(.*?)^\]", pyproject, re.DOTALL | re.MULTILINE)
    extras = re.findall(r"^(?:triton|test) = \[(.*)\]", pyproject, re.MULTILINE)
    if dependencies is None or len(extras) != 2:
        raise SystemExit("installable: pyproject.toml lists no `dependencies`, or no extras `triton` and `test`")
    bounds = re.findall(r'"([\w.-]+)>=([\w.]+)', "".join([dependencies[1], *extras]))
    return [f"{name}=={low}" for name, low in bounds]


def unreachable(index: str) -> str | None:
    """Why the index does not answer a request for pip's own page, or None where it answers."""
    try:
        with urllib.request.urlopen(f"{index}/pip/", timeout=20):
            return None
    except (urllib.error.URLError, OSError) as why:
        return str(why)


def resolve(python: Path, project: Path, constraints: Path, index: str, cache: str) -> tuple[int, str]:
    """Run uv; return its exit code (1: no solution, 2: any other failure) and the pins, or the reason for none."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config", "--no-header", "--no-annotate"]
    command += ["--no-python-downloads", "--cache-dir", cache, "--only-binary", ":all:", "--index-url", index]
    command += ["--python", str(python), "--constraints", str(constraints), "--extra", "test"]
    try:
        ran = subprocess.run(
            [*command, "pyproject.toml"],
            cwd=project,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return 2, f"no answer in {SECONDS} s"
    return ran.returncode, ran.stdout if ran.returncode == 0 else ran.stderr


def outcome(what: str, index: str, attempt: Callable[[], tuple[int, str]]) -> Outcome:
    """The line of one resolution: a failure is "not checked" only where the index does not answer either."""
    code, output = attempt()
    if code == 0:
        return Outcome(RESOLVED, f"{what}: {len(output.split())} packages")
    closed = unreachable(index) if code != 1 else None
    if closed is not None:
        return Outcome(UNCHECKED, f"{what}: not checked: the index {index} cannot be reached: {closed}")
    return Outcome(FAILED, f"{what}: CANNOT BE INSTALLED:\n{output.strip()}")


def _lowest_file(project: Path, folder: str) -> Path:
    """A constraints file in `folder` that pins every lower bound of the project's pyproject.toml."""
    file = Path(folder) / "lowest.txt"
    file.write_text("\n".join(lowest_bounds((project / "pyproject.toml").read_text())))
    return file


def check(index: str, project: Path) -> Iterator[Outcome]:
    """The outcomes: for each supported Python, and for the lowest versions on the oldest Python that is here."""
    with tempfile.TemporaryDirectory() as scratch:
        lowest = _lowest_file(project, scratch)
        oldest = True
        for version in SUPPORTED:
            python = interpreter(version)
            if python is None:
                yield Outcome(UNCHECKED, f"Python {version}: not checked: there is no such interpreter here")
                continue
            tried = [("constraints.txt", project / "constraints.txt")] + [("lowest versions", lowest)] * oldest
            oldest = False
            for name, constraints in tried:
                attempt = partial(resolve, python, project, constraints, index, scratch)
                yield outcome(f"Python {version}, {name}", index, attempt)


def main(arguments: list[str] | None = None) -> int:
    """Print one line for each resolution, and return the exit code of the module's docstring."""
    parser = argparse.ArgumentParser(description="Resolve the project's dependencies from the public index alone.")
    parser.add_argument("--index-url", default=PUBLIC, help="the only index that is read (%(default)s)")
    parser.add_argument("--project", type=Path, default=ROOT, help="folder of pyproject.toml and constraints.txt")
    parser.add_argument("--lowest", metavar="X.Y", choices=SUPPORTED, help="print the lowest versions for Python X.Y")
    parser.add_argument("--find", metavar="X.Y", choices=SUPPORTED, help="print the file of Python X.Y")
    options = parser.parse_args(arguments)
    if find_spec("uv") is None:
        print("installable: uv is not installed: pip install -e '.[dev]'", file=sys.stderr)
        return 2
    if options.lowest or options.find:
        return _print_for(options)
    codes = set()
    for result in check(options.index_url, options.project):
        print(result.sentence, flush=True)
        codes.add(result.code)
    return FAILED if FAILED in codes else UNCHECKED if UNCHECKED in codes else RESOLVED


def _print_for(options: argparse.Namespace) -> int:
    """Print what `--find` or `--lowest` asks for, or why that cannot be had on standard error."""
    python = interpreter(options.find or options.lowest)
    if python is None:
        print(f"installable: there is no Python {options.find or options.lowest} here", file=sys.stderr)
        return UNCHECKED
    if options.find:
        print(python)
        return RESOLVED
    with tempfile.TemporaryDirectory() as scratch:
        lowest = _lowest_file(options.project, scratch)
        code, output = resolve(python, options.project, lowest, options.index_url, scratch)
    print(output, end="", file=sys.stderr if code else sys.stdout)
    return FAILED if code == 1 else UNCHECKED if code else RESOLVED


if __name__ == "__main__":
    raise SystemExit(main())
