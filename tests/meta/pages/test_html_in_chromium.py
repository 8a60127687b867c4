"""HTML pages in a real Chromium: they render, ask for nothing, and write nothing to the console."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specverify.laws.command import Options, laws_of
from specverify.reports.html.law import law_page
from specverify.reports.html.pages import diff_page
from tests.chromium import Browser, installed
from tests.meta.pages.planted import FAULTS, failure_of, tally_of

WIDTHS = (1200, 390)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = installed()
    if program is None:
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium)")
    with Browser(program, tmp_path_factory.mktemp("chromium")) as started:
        yield started


def page_of(name: str) -> bytes:
    if name == "law":
        return law_page(laws_of(Options(rule="typical")), "0")
    return diff_page(tally_of(failure_of(FAULTS[name])), "0")


@pytest.mark.parametrize("name", [*FAULTS, "law"])
def test_a_page_renders_asks_for_nothing_and_says_nothing(
    name: str, browser: Browser, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    file = tmp_path / f"{name}.html"
    file.write_bytes(page_of(name))
    for width in WIDTHS:
        visit = browser.visit(file, width, dark=width == WIDTHS[1])
        assert visit.console == []
        assert visit.requests == [file.as_uri()]
        browser.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"wider than {width} pixels"
        narrow = "[...document.querySelectorAll('table.list th')].filter(cell => cell.clientWidth < 40)"
        assert browser.evaluate(f"{narrow}.map(cell => cell.textContent).join()") == "", "words break letter by letter"
        assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(255, 255, 255)" if width == WIDTHS[0] else "rgb(20, 24, 28)"
        )
        picture = tmp_path / f"{name}-{width}.png"
        browser.screenshot(picture)
        record_property("screenshot", str(picture))
        assert picture.stat().st_size > 20_000
    browser.evaluate("document.querySelectorAll('details').forEach(one => one.open = false)")
    browser.do("Emulation.setEmulatedMedia", media="print")
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.evaluate("[...document.querySelectorAll('details table')].every(one => one.checkVisibility())")
    if name != "law":
        # The wrong cell is on the first screen, and it is red.
        browser.visit(file)
        cell = "document.querySelector('table.did td.wrong.here, table.slots td.wrong.here')"
        assert browser.evaluate(f"getComputedStyle({cell}).backgroundColor") == "rgb(201, 19, 47)"
        assert browser.evaluate(f"{cell}.getBoundingClientRect().bottom") < 800


def test_the_browser_sees_what_a_page_must_not_do(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "bad.html"
    file.write_text('<img src="http://example.org/x.png"><script>console.error("said"); missing()</script>')
    visit = browser.visit(file)
    assert "http://example.org/x.png" in visit.requests
    assert any("said" in line for line in visit.console)
    assert len(visit.console) >= 3
    # Under the policy of our pages neither the request nor the script happens, and both are told.
    policy = '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'">'
    file.write_text(policy + file.read_text())
    refused = browser.visit(file)
    assert not any("said" in line for line in refused.console)
    assert any("Content Security Policy" in line for line in refused.console)
