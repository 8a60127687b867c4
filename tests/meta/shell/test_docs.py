"""What the pages show is true: commands parse and print what stands there; links and named files exist.

`python -m tests.measure docs` writes anew what is made from the program; with `--slow`, also what long commands print.
"""

import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

from tests.measure.__main__ import cli as measures
from tests.measure.documents import shown
from tests.measure.documents.pages import ROOT, anchors, blocks, commands, links, named_files, page_name, pages
from tests.measure.documents.reference_pages import FOLDER, reference_pages
from tests.measure.documents.writing import with_files

PAGES = pages()
HAND_WRITTEN = [page for page in PAGES if "<!-- made by" not in page.read_text()]
TEXTS = {page_name(page): page.read_text() for page in PAGES}
COMMANDS = sorted({line for page in PAGES for line in commands(page.read_text())})
AGAIN = "run `python -m tests.measure docs`, and read what changed"
CAMPAIGNS = {"bench", "diff", "gate", "replay", "selftest", "train"}
"""Commands that start processes; a block with one of these is slow."""


def runs(block_language: str, name: str, slow: bool) -> bool:
    return any(block.language == block_language and block.slow == slow for block in blocks(TEXTS[name]))


def parse_words(command: click.Command, words: list[str]) -> None:
    """Parse the words as `command`, or as the command below it that they name."""
    if isinstance(command, click.Group) and words[1:] and words[1] in command.commands:
        parse_words(command.commands[words[1]], words[1:])
    else:
        command.make_context(words[0], words[1:])


@pytest.mark.parametrize("line", [line for line in COMMANDS if re.search(r"(^|&& )([A-Z_]+=\w+ )*specverify ", line)])
def test_a_command_parses(line: str) -> None:
    from specverify.cli import cli

    for part in re.split(r"&& | \| ", line):
        words = shlex.split(re.sub(r" \d?>.*| &$", "", re.sub(r"^([A-Z_]+=\w+ )*", "", part.strip())))
        if words[0] == "specverify":
            parse_words(cli, words)


SOURCES = TEXTS["docs/how_to/published_figures.md"]


@pytest.mark.parametrize("line", sorted(set(re.findall(r"^\|.*?`(specverify [^`]+)`", SOURCES, re.MULTILINE))))
def test_a_command_of_a_table_of_the_sources_parses(line: str) -> None:
    from specverify.cli import cli

    parse_words(cli, shlex.split(line))


def test_every_table_and_figure_of_the_sources_has_its_command_and_was_run() -> None:
    rows = re.findall(
        r"^\| ([^|]+?) \| [^|]+ \| (?:`specverify|the command of) [^|]+ \| ([^|]+?) \|$", SOURCES, re.MULTILINE
    )
    figures = {name: here for source, here in rows for name in source.split(", ")}
    figure_names = ("E1", "E2", "E3", "E4", *(f"figure {number}" for number in (3, 5, 7, 8, 9)), "table 1", "table 2")
    assert [name for name in figure_names if not re.search(r"\d", figures.get(name, ""))] == []


@pytest.mark.parametrize("line", [line for line in COMMANDS if "tests.measure" in line])
def test_a_measure_parses(line: str) -> None:
    parse_words(measures, shlex.split(line)[2:])


@pytest.mark.parametrize("name", [name for name in TEXTS if runs("console", name, slow=False)])
def test_what_short_commands_print_stands_on_the_page(name: str, tmp_path: Path) -> None:
    again = shown.shown_again(TEXTS[name], tmp_path, shown.in_this_process, slow=False)
    assert again == TEXTS[name], AGAIN


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TEXTS if runs("console", name, slow=True)])
def test_what_long_commands_print_stands_on_the_page(name: str, tmp_path: Path) -> None:
    again = shown.shown_again(TEXTS[name], tmp_path, shown.in_a_process, slow=True)
    assert again == TEXTS[name], "run `python -m tests.measure docs --slow`, and read what changed"


def test_a_command_that_starts_processes_is_marked_slow() -> None:
    for name, text in TEXTS.items():
        for block in blocks(text):
            if block.language == "console" and not block.slow:
                begun = re.findall(r"^\$ specverify ([\w-]+)", block.text, re.MULTILINE)
                assert not CAMPAIGNS & {*begun}, name


def test_the_reference_is_what_the_program_says() -> None:
    stale = [name for name, text in reference_pages().items() if (FOLDER / name).read_text(encoding="utf-8") != text]
    assert stale == [], AGAIN


@pytest.mark.parametrize("name", TEXTS)
def test_a_block_that_shows_a_file_is_that_file(name: str) -> None:
    assert with_files(TEXTS[name]) == TEXTS[name], AGAIN


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name: str) -> None:
    for link in links(TEXTS[name]):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("name", TEXTS)
def test_named_files_exist(name: str) -> None:
    """Paths from the root are there; a bare file name, or the end of a path, is that of some file."""
    for path in named_files(TEXTS[name]):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`([\w/]+\.(?:py|mjs))`", TEXTS[name]):
        assert any(file.as_posix().endswith(f"/{path}") for file in ROOT.glob(f"*/**/{Path(path).name}")), path


def test_every_page_is_reached_from_the_index() -> None:
    linked = {(ROOT / "docs" / link.partition("#")[0]).resolve() for link in links(TEXTS["docs/index.md"])}
    assert {page for page in PAGES if page.is_relative_to(ROOT / "docs")} - linked == {ROOT / "docs" / "index.md"}


def test_the_readme_is_short_and_its_commands_follow_each_other() -> None:
    text = TEXTS["README.md"]
    assert len(text.splitlines()) <= 160
    lines = commands(text)
    assert lines[0].startswith("python3 -m venv .venv && . .venv/bin/activate && pip install -c constraints.txt -e .")
    assert lines[0].endswith("&& specverify diff")
    assert lines[1] == "specverify diff --fault kv-truncated-not-gathered --jobs 1"
    assert lines[-1].endswith("pip install -c constraints.txt -e '.[test]' && pytest -n 2")


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert "pytest -n 2" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("page", HAND_WRITTEN, ids=page_name)
def test_a_page_has_short_lines_and_one_title(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    prose = [line for line in text.splitlines() if not line.startswith(("|", "{", "$ "))]
    assert [line for line in prose if len(line) > 160] == []
    assert len(re.findall(r"^# ", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)) == 1


@pytest.mark.parametrize("name", ["DECISIONS.md", "DESIGN.md"])
def test_a_decision_has_its_day_and_a_commit_of_that_day(name: str) -> None:
    rows = re.findall(r"^\| (\S+) \| (\S+) \|.*\|$", TEXTS[name].split("| day | commit |")[1], re.MULTILINE)[1:]
    assert len(rows) > 10
    assert [row for row in rows if not re.fullmatch(r"\d{4}-\d\d-\d\d `[0-9a-f]{8}`", " ".join(row))] == []
    commits = {row[1].strip("`") for row in rows}
    program = ["git", "show", "--no-patch", "--format=%cs `%h`", "--abbrev=8", *commits]
    ended = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    if ended.returncode != 0:
        pytest.skip("no git, or a clone without its history")
    assert {" ".join(row) for row in rows} == {*ended.stdout.splitlines()}


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for package in ("sphinx", "myst_parser", "furo"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed (pip install -e '.[docs]')")
    program = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", str(tmp_path / "site")]
    ended = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "site" / "tutorials" / "black_box.html").is_file()


def test_these_tests_see_what_is_wrong() -> None:
    text = (
        "# A\n\n<!-- slow -->\n```console\n$ specverify list rules\nrules\n...\n```\n\n[x](no.md#a) `tests/none.py`\n"
    )
    (block,) = blocks(text)
    assert block.slow
    assert links(text) == ["no.md#a"]
    assert named_files(text) == ["tests/none.py"]
    assert anchors("# A, b\n## What `x` is\n") == {"a-b", "what-x-is"}
    assert commands(text) == ["specverify list rules"]
    printed = lambda *_: ("trees\nmore\n", 0)  # noqa: E731
    assert "$ specverify list rules\ntrees\n...\n" in shown.shown_again(text, ROOT, printed, slow=True)
    assert shown.shown_again(text, ROOT, printed, slow=False) == text
