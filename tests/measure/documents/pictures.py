"""The pictures of `docs/how_to/reading_a_page.md`: one of each kind, taken from pages by a real Chromium."""

import base64
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from specverify import diff
from specverify.laws.command import Options, laws_of
from specverify.reports.html.law import law_page
from specverify.reports.html.pages import diff_page
from tests.chromium import Browser, installed
from tests.measure.documents.pages import ROOT
from tests.meta.pages.planted import FAULTS, failure_of, tally_of
from tests.mistaken_adapters import prompt_returned

FOLDER = ROOT / "docs" / "pictures"

WIDTH = 1200
"""Pixels of the window."""

EDGE = 8
"""Pixels around a picture."""


@dataclass(frozen=True)
class Picture:
    """A picture of the docs.

    Attributes:
        name: Its file is `NAME.png`; the name is that of the macro in `pictures.html.j2` that draws it.
        page: The page that it is taken from.
        place: The CSS selector of its elements; they are taken together.
    """

    name: str
    page: Callable[[], bytes]
    place: str


def _of_fault(stage: str) -> Callable[[], bytes]:
    return lambda: diff_page(tally_of(failure_of(FAULTS[stage])), "0")


@cache
def _of_text() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return diff_page(diff(prompt_returned, cases=2, invariants=["lossless.greedy-match"], report=folder).tally, "0")


@cache
def _of_run() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return diff_page(diff(cases=60, jobs=2, report=folder).tally, "0")


PICTURES = (
    Picture("tree", _of_fault("committed"), "figure:has(svg .dot)"),
    Picture("mask", _of_fault("lowered"), "figure:has(table.must), figure:has(table.did)"),
    Picture("slots", _of_fault("committed"), "figure:has(table.slots)"),
    Picture("heat", _of_fault("committed"), "figure:has(table.heat)"),
    Picture("tokens", _of_text, "figure:has(table.slots)"),
    Picture("bars", lambda: law_page(laws_of(Options(rule="typical")), "0"), "figure:has(svg .bar)"),
    Picture("lanes", _of_run, "figure:has(svg .busy1), figure:has(svg .busy2)"),
)


def write_pictures() -> Iterator[Path]:
    """Take every picture anew; yields its file.

    Raises:
        FileNotFoundError: Chromium is not installed.
        LookupError: A page does not have the picture.
    """
    program = installed()
    if program is None:
        raise FileNotFoundError("Chromium is not installed (Debian: apt-get install chromium)")
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, Browser(program, Path(folder, "profile")) as browser:
        for picture in PICTURES:
            page = Path(folder, f"{picture.name}.html")
            page.write_bytes(picture.page())
            browser.visit(page, WIDTH)
            file = FOLDER / f"{picture.name}.png"
            file.write_bytes(_screenshot(browser, picture))
            yield file


def _screenshot(browser: Browser, picture: Picture) -> bytes:
    """The part of the page around the first element, and around those beside it that belong to the picture."""
    rectangles = browser.evaluate(
        f"JSON.stringify([...document.querySelectorAll({json.dumps(picture.place)})]"
        ".map(element => element.getBoundingClientRect()).filter(box => box.width))"
    )
    boxes = json.loads(rectangles)
    if not boxes:
        raise LookupError(f"no {picture.name} on its page: {picture.place}")
    first_row = [box for box in boxes if abs(box["y"] - boxes[0]["y"]) < EDGE]
    x_min, y_min = min(box["x"] for box in first_row), min(box["y"] for box in first_row)
    x_max, y_max = max(box["x"] + box["width"] for box in first_row), max(box["y"] + box["height"] for box in first_row)
    clip = {
        "x": x_min - EDGE,
        "y": y_min - EDGE,
        "width": x_max - x_min + 2 * EDGE,
        "height": y_max - y_min + 2 * EDGE,
        "scale": 1,
    }
    screenshot = browser.do("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
    return base64.b64decode(screenshot["data"])
