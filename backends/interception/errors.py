"""Errors: why a function that draws has no law here."""

from typing import NoReturn


class NotInterceptable(Exception):
    """The function uses randomness in a way that hides its law from the draws."""


class TooManyRuns(Exception):
    """The function has more courses, or longer courses, than were allowed."""


class DecidesTooOften(Exception):
    """Random numbers of one place decide several times, in a way whose joint law is not known here.

    Attributes:
        shared: What decided twice, each with both places in the code.
    """

    def __init__(self, why: str, shared_numbers: tuple[str, ...] = ()) -> None:
        super().__init__(why)
        self.shared_numbers = shared_numbers


def refuse(description: str) -> NoReturn:
    """Raise NotInterceptable for `description`."""
    raise NotInterceptable(
        f"not interceptable: {description}; give the engine a tape of coins, or use the black-box test"
    )
