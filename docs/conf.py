"""The site of these pages: Sphinx reads them as Markdown (MyST)."""

import re
from pathlib import Path
from typing import Any

project = "SpecVerify"
extensions = ["myst_parser"]
exclude_patterns = ["_site"]
html_theme = "furo"
html_title = "SpecVerify"
myst_heading_anchors = 4
# `console` blocks hold what commands print, which no lexer knows in full.
suppress_warnings = ["misc.highlighting_failure"]


def _tables_of_contents(_: Any, name: str, source: list[str]) -> None:
    """Give Sphinx the tree of the pages: those that `index.md` links, by its headings. GitHub needs none."""
    if name != "index":
        return
    blocks = []
    for section in source[0].split("\n## ")[1:]:
        title = section.splitlines()[0].split(":")[0]
        pages = dict.fromkeys(re.findall(r"\]\((\w+/\w+)\.md\)", section))
        blocks.append(f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(pages) + "\n```\n")
    blocks.append("\n```{toctree}\n:hidden:\n:caption: Newcomers\n\nnewcomer\n```\n")
    source[0] += "".join(blocks)


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _tables_of_contents)
    assert Path(app.srcdir, "index.md").is_file()
