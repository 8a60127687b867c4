"""Places: which words of which stream a draw reads, and from which line of code."""

import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType

LIBRARIES = ("torch", "numpy", "random")
"""The libraries whose draws have places."""

_STANDARD = str(Path(sys.modules["os"].__file__ or "").parent)
_PASSED_FOLDERS = tuple(
    str(Path(folder)) + "/"
    for folder in (Path(__file__).parent, Path(__file__).parent.parent / "interception", Path(_STANDARD) / "random.py")
)


@dataclass(frozen=True)
class Position:
    """Where a generator stands: the next word that it will read.

    Attributes:
        stream: The name of its sequence of words; equal names are equal sequences.
        offset: The number of the next word. The first word of a seeded stream may have any number.
    """

    stream: str
    offset: int


@dataclass(frozen=True)
class Place:
    """The words that one draw reads.

    Attributes:
        stream: The name of the sequence of words.
        offset: The number of the first word.
        size: How many words are read; 0 where a generator does not tell.
    """

    stream: str
    offset: int
    size: int

    def overlaps(self, place: "Place") -> bool:
        """Whether both read a common word; two draws of unknown size do where they begin at one word."""
        if self.stream != place.stream:
            return False
        return self.offset < place.offset + max(place.size, 1) and place.offset < self.offset + max(self.size, 1)

    def part(self, number: int, count: int) -> "Place":
        """The place of element `number` of a draw of `count` elements that read equally many words each.

        Where the words do not divide among the elements, an element is told by its number alone.
        """
        if count and self.size and self.size % count == 0:
            words = self.size // count
            return Place(self.stream, self.offset + number * words, words)
        return Place(f"{self.stream} element {number} of", self.offset, self.size)

    def __str__(self) -> str:
        words = f"word {self.offset}" if self.size < 2 else f"words {self.offset} to {self.offset + self.size - 1}"
        return f"{words} of {self.stream}"


def place_between(before: Position, after: Position) -> Place:
    """The place of a draw before which its generator stood at `before`, and behind which it stands at `after`."""
    size = after.offset - before.offset if after.stream == before.stream else 0
    return Place(before.stream, before.offset, max(size, 0))


@dataclass(frozen=True)
class Site:
    """A line of code: `file:line in function`."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Draw:
    """Draw of random numbers.

    Attributes:
        call: The function that was called, `torch.rand` or `random.Random.random`.
        source: The generator in words: `torch's default generator`, `a torch.Generator seeded 5`.
        place: The words that it read.
        stack: The lines of code that led to it, the innermost first; frames of torch, NumPy and `random` are left out.
    """

    call: str
    source: str
    place: Place
    stack: tuple[Site, ...]

    @property
    def site(self) -> Site:
        """The line of code that drew."""
        return self.stack[0]

    def __str__(self) -> str:
        return f"{self.call} at {self.site} ({self.source}, {self.place})"


def stack_here(most: int = 12) -> tuple[Site, ...]:
    """The lines of code that led to this call, the innermost first, without lines of the libraries that draw."""
    sites: list[Site] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(sites) < most:
        file = frame.f_code.co_filename
        if not is_library(file):
            sites.append(Site(file, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(sites) or (Site("?", 0, "?"),)


@lru_cache(maxsize=1 << 12)
def is_library(file: str) -> bool:
    """Whether the file belongs to torch, NumPy, `random`, or to this package."""
    parts = Path(file).parts
    is_installed_library = "site-packages" in parts and parts[parts.index("site-packages") + 1] in LIBRARIES
    return is_installed_library or f"{file}/".startswith(_PASSED_FOLDERS) or file.startswith("<frozen")
