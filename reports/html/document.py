"""HTML documents: templates, escaping, and the limits of what a page holds.

A page is one file that loads nothing. Its policy (Content-Security-Policy) forbids scripts and every request. Foreign
words, such as names and messages of engines, go through `bounded_text` on their way into a template, then through
Jinja's escaping: they cannot make an element, an attribute, a control code or a change of direction.
"""

import base64
from collections.abc import Mapping
from datetime import datetime, timezone
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from specverify.reports.format import escape, number, plural
from specverify.reports.writing import as_json

LARGEST = 1_000_000
"""Most bytes of a page of an ordinary run."""

LONGEST = 1200
"""Most characters of one foreign text."""

LARGEST_DATA = 200_000
"""Most bytes of a file that a page holds for download."""

MOST_DATA = 300_000
"""Most bytes of all files that a page holds for download."""


def bounded_text(value: Any) -> Any:
    r"""A foreign text, bounded and without control codes; markup of our own and other values are unchanged.

    >>> str(bounded_text("a\u202eb<i>")), bounded_text(3)
    ('a\\u202eb<i>', 3)
    """
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value  # text of a template or of a macro, which is escaped already
    text = escape(value[: LONGEST + 1])
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("specverify.reports.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=bounded_text,
    )
    environment.filters["plural"] = plural
    environment.filters["number"] = number
    return environment


def render_page(template: str, facts: Mapping[str, Any]) -> bytes:
    """The page that `template` makes of `facts` and the time in UTC, as UTF-8."""
    made_at = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"
    text = _environment().get_template(template).render(made=made_at, **facts)
    # A lone surrogate, which UTF-8 cannot hold, is escaped by `bounded_text` already.
    return text.encode()


class Downloads:
    """The files that one page holds, as long as there is room.

    Args:
        room: Most bytes of all files together.
    """

    def __init__(self, room: int = MOST_DATA) -> None:
        self._room = room

    def embed(self, content: Any) -> str | None:
        """`content` as a JSON file in base64, for a `data:` address; None if it is too large for this page."""
        raw = as_json(content, indent=1).encode()
        if len(raw) > min(LARGEST_DATA, self._room):
            return None
        self._room -= len(raw)
        # A template may call it safe: base64 has no character that HTML could take for markup.
        return base64.b64encode(raw).decode()
