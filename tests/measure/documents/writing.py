"""Write pages anew: those made from the program, the files that pages show, and what the commands on them print."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.measure.documents.pages import ROOT, blocks, page_name, pages
from tests.measure.documents.reference_pages import FOLDER, reference_pages
from tests.measure.documents.shown import in_a_process, shown_again


def write_pages(names: tuple[str, ...], slow: bool) -> Iterator[str]:
    """Write the pages named, or all, and yield the name of each page that changed."""
    chosen_pages = {*names} or {page_name(page) for page in pages()}
    if not names or any(name.startswith("docs/reference/") for name in names):
        for name, text in reference_pages().items():
            chosen_pages.discard(page_name(FOLDER / name))
            yield from _write_page(FOLDER / name, text)
    for name in sorted(chosen_pages):
        page = ROOT / name
        text = with_files(page.read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as folder:
            text = shown_again(text, Path(folder), in_a_process, slow)
        yield from _write_page(page, text)


def with_files(text: str) -> str:
    """A page whose blocks with a `file` note hold that file as it is now."""
    for block in reversed(blocks(text)):
        words = block.note.split()
        if "file" in words:
            content = (ROOT / words[words.index("file") + 1]).read_text(encoding="utf-8")
            text = text[: block.span[0]] + content + text[block.span[1] :]
    return text


def _write_page(page: Path, text: str) -> Iterator[str]:
    if not page.is_file() or page.read_text(encoding="utf-8") != text:
        page.write_text(text, encoding="utf-8")
        yield page_name(page)
