"""Opening of the engine under test: a refusal is one line, and never a pass."""

from contextlib import closing

import pytest

from specverify.backends.base import Unavailable, WrongFlag
from specverify.backends.registry import UnknownBackend
from specverify.pytest_plugin import BackendUnderTest
from specverify.setup.errors import MissingInput, UnusableInput
from specverify.setup.selection import Unknown

UNUSABLE = (Unknown, UnknownBackend, UnusableInput, WrongFlag)
"""The errors of an engine that is wrong: exit code 2."""

ABSENT = (Unavailable, MissingInput)
"""The errors of an engine that this machine cannot run: exit code 3."""


def open_or_fail(name: str) -> closing[BackendUnderTest]:
    """The engine `name`, open; where it cannot be opened, the running test fails with one line."""
    try:
        return closing(BackendUnderTest(name))
    except (*UNUSABLE, *ABSENT) as why:
        pytest.fail(_line(why), pytrace=False)


def open_or_exit(name: str) -> closing[BackendUnderTest]:
    """The engine `name`, open; where it cannot be opened, the session ends with one line, and code 2 or 3."""
    try:
        return closing(BackendUnderTest(name))
    except UNUSABLE as why:
        pytest.exit(_line(why), returncode=2)
    except ABSENT as why:
        pytest.exit(_line(why), returncode=3)


def _line(why: Exception) -> str:
    return f"specverify: {' '.join(str(why).split())}"
