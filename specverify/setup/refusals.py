"""The errors of an engine, a file or a name that cannot be used: each is one line, and never a pass."""

from specverify.backends.base import Unavailable, WrongFlag
from specverify.backends.registry import UnknownBackend
from specverify.reports.bundle import Unreadable
from specverify.setup.errors import MissingInput, UnusableInput
from specverify.setup.selection import Unknown

UNUSABLE = (Unknown, UnknownBackend, UnusableInput, Unreadable, WrongFlag)
"""What is wrong: exit code 2."""

ABSENT = (Unavailable, MissingInput)
"""What this machine cannot run: exit code 3."""
