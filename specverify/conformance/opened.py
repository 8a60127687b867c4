"""Opening of the engine under test: a refusal is one line, and never a pass."""

from contextlib import closing

import pytest

from specverify.pytest_plugin import BackendUnderTest
from specverify.setup.refusals import ABSENT, UNUSABLE


def open_or_exit(name: str) -> closing[BackendUnderTest]:
    """The engine `name`, open; where it cannot be opened, the session ends with one line, and code 2 or 3."""
    try:
        return closing(BackendUnderTest(name))
    except UNUSABLE as why:
        pytest.exit(line_about(why), returncode=2)
    except ABSENT as why:
        pytest.exit(line_about(why), returncode=3)


def line_about(why: Exception) -> str:
    """The one line of an engine that cannot be opened."""
    return f"specverify: {' '.join(str(why).split())}"
