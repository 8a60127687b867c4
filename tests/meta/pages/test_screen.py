"""The screen: as wide as the terminal within limits, coloured only where a person sees it."""

import io
import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from specverify.reports.pages.screen import Screen, screen_of
from tests.meta.pages.test_reports import PAGES

CODE = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "width"), [({}, 80), ({"COLUMNS": "40"}, 80), ({"COLUMNS": "120"}, 120), ({"COLUMNS": "999"}, 160)]
)
def test_the_width_is_the_terminals_between_80_and_160(environment: Mapping[str, str], width: int) -> None:
    assert screen_of(io.StringIO(), environment) == Screen(width, False)
    assert screen_of(Terminal(), environment) == Screen(width, True)


def test_the_width_of_a_real_terminal_is_asked_of_it() -> None:
    import fcntl
    import struct
    import termios

    outer, inner = os.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 133, 0, 0))
    with os.fdopen(inner, "w") as terminal, os.fdopen(outer):
        assert screen_of(terminal, {}) == Screen(133, True)


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"CI": "true"}, {"TERM": "dumb"}])
def test_there_is_no_colour_where_nobody_wants_it(environment: Mapping[str, str]) -> None:
    screen = screen_of(Terminal(), environment)
    assert not screen.colour
    assert screen.paint(PAGES["crash"]()) == PAGES["crash"]()
    assert screen_of(Terminal(), {"NO_COLOR": "", "CI": "0"}).colour


@pytest.mark.parametrize("name", PAGES)
def test_colours_change_no_character(name: str) -> None:
    page = PAGES[name]()
    painted = Screen(80, True).paint(page)
    assert CODE.sub("", painted) == page
    assert painted.count("\x1b[0m") * 2 == len(CODE.findall(painted))


def test_the_result_and_the_marked_node_are_red() -> None:
    painted = Screen(80, True).paint(PAGES["small_failure"]())
    assert painted.startswith("\x1b[1;31mDIFFER\x1b[0m  cuda-fused")
    (marked,) = (line for line in painted.split("\n") if "◀" in line)
    assert marked.startswith("\x1b[1;31m")
    assert marked.index("◀\x1b[0m") < marked.index("there is not that")
    assert Screen(80, True).paint(PAGES["agree"]()).startswith("\x1b[1;32mAGREE\x1b[0m")


def test_a_strangers_words_bring_no_colour_of_their_own() -> None:
    painted = Screen(80, True).paint(PAGES["crash"]())
    assert "\x1b[31man" not in painted
    assert r"\x1b[31man" in painted


def test_a_file_gets_no_codes(tmp_path: Path) -> None:
    with (tmp_path / "page").open("w") as file:
        assert screen_of(file, {"TERM": "xterm"}) == Screen(80, False)
