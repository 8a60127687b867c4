"""The two errors of a command: wrong input (exit code 2), a missing part (3)."""


class UnusableInput(ValueError):
    """The input is wrong; the message says in one line what is wrong, where, and what to do."""


class MissingInput(RuntimeError):
    """This machine lacks something; the message says in one line what, and how to get it."""
