"""The docs show one picture of each kind that a page may have, and each is a PNG of a readable size."""

import re
import struct

import pytest

from tests.measure.documents.pages import ROOT
from tests.measure.documents.pictures import FOLDER, PICTURES

PAGE = (ROOT / "docs/how_to/reading_a_page.md").read_text(encoding="utf-8")
# In a source archive the templates lie in the package alone.
MACROS = ROOT / "specverify/reports/html/templates/pictures.html.j2"


def test_every_kind_of_picture_is_shown() -> None:
    # `grid` is a part of others, and `pairs` a list of names and values.
    kinds = set(re.findall(r"macro (\w+)\(", MACROS.read_text(encoding="utf-8"))) - {"grid", "pairs"}
    assert {picture.name for picture in PICTURES} == kinds
    assert {file.stem for file in FOLDER.iterdir()} == kinds
    assert set(re.findall(r"\]\(\.\./pictures/(\w+)\.png\)", PAGE)) == kinds


@pytest.mark.parametrize("name", [picture.name for picture in PICTURES])
def test_a_picture_is_readable_and_small(name: str) -> None:
    content = (FOLDER / f"{name}.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n")
    width, height = struct.unpack(">II", content[16:24])
    assert 200 < width <= 1200
    assert 80 < height < 600
    assert len(content) < 60_000
