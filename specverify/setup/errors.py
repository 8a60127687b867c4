"""The two errors of a command: its input is wrong (exit code 2), or this machine lacks something (exit code 3)."""


class UnusableInput(ValueError):
    """The input is wrong: what, where, and what to do, on one line."""


class MissingInput(RuntimeError):
    """Something that the machine lacks: what, and how to get it, on one line."""
