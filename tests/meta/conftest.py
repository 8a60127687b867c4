"""Fixtures of all tests in this folder."""

from collections.abc import Iterator
from typing import Any

import pytest

from specverify.backends.programs import lines


@pytest.fixture(autouse=True)
def _programs_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End the programs (`command:`) that a test started in this process; other tests count its children."""
    started: list[lines.Child] = []
    original = lines.Child.__init__

    def note_start(self: lines.Child, *arguments: Any) -> None:
        original(self, *arguments)
        started.append(self)

    monkeypatch.setattr(lines.Child, "__init__", note_start)
    yield
    for child in started:
        child.end()
