"""The Markdown pages of this repository, and what stands in them: blocks, links, headings and named files."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FENCE = re.compile(
    r"(?:^<!-- (?P<note>[^>\n]+) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
ROOMS = ("backends", "properties", "reports", "reference", "specverify", "tests", "examples", "docs")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        language: The word behind the fence.
        text: The lines between the fences, with their ends.
        note: The comment on the line before the block, `<!-- note -->`; empty without one. `file PATH` says that the
            block is that file of this repository, `in PATH` that its commands run in a copy of that folder, and `slow`
            that they take longer than a second or two.
        span: Where `text` stands in the page, as the numbers of its first character and of the one behind it.
    """

    language: str
    text: str
    note: str
    span: tuple[int, int]

    @property
    def slow(self) -> bool:
        """Whether the commands of the block take longer than the fast tests may."""
        return "slow" in self.note.split()


def pages() -> list[Path]:
    """Every Markdown page of the repository: those of the root, of `docs` and of `examples`."""
    folders = (ROOT / "docs", ROOT / "examples")
    return sorted(ROOT.glob("*.md")) + sorted(page for folder in folders for page in folder.rglob("*.md"))


def page_name(page: Path) -> str:
    """The path of a page inside the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [
        Block(match["language"], match["text"], match["note"] or "", match.span("text"))
        for match in FENCE.finditer(text)
    ]


def without_blocks(text: str) -> str:
    """The prose of a page."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """The commands of a page: the lines of its `bash` blocks and the lines behind `$` of its `console` blocks."""
    lines: list[str] = []
    for block in blocks(text):
        if block.language == "bash":
            lines += block.text.splitlines()
        elif block.language == "console":
            lines += [line for line, _ in commands_of(block)]
    return [line.split(" #")[0].strip() for line in lines if line.strip()]


def commands_of(block: Block) -> list[tuple[str, str]]:
    """The commands of a `console` block, each with the text that it prints."""
    parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
    if parts[0]:
        raise ValueError(f"a console block begins with a command behind '$ ': {parts[0]!r}")
    pairs = []
    for part in parts[1:]:
        command, _, printed = part.partition("\n")
        pairs.append((command, printed))
    return pairs


def links(text: str) -> list[str]:
    """The targets of the links of a page, web addresses included."""
    prose = re.sub(r"`[^`\n]*`", "", without_blocks(text))
    return re.findall(r"\]\(([^)\s]+)\)", prose)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, by the rule of GitHub and of MyST."""
    headings = re.findall(r"^#{1,4} (.+)$", without_blocks(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def named_files(text: str) -> list[str]:
    """The paths of this repository that a page names between backquotes; a path with `<` or `*` stands for many."""
    return re.findall(rf"`((?:{'|'.join(ROOMS)})/[\w/.-]*\w/?)`", text)
