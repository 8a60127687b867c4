"""The two ways in which what a command was given can fail it: wrong input (exit 2), or something missing (exit 3)."""


class UnusableInput(ValueError):
    """The input is wrong: what, where, and what to do, on one line."""


class MissingInput(RuntimeError):
    """Something that the machine lacks: what, and how to get it, on one line."""
