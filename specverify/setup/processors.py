"""Custom processors of a run: admitted in every process that runs cases, on the vocabularies that it will meet."""

import contextlib
import itertools
import sys
from collections.abc import Iterable

from backends.registry import search_current_folder
from properties.strategies.models import GALLERY
from reference import user_processors
from reference.case import Case
from specverify.setup.errors import UnusableInput


def admit(names: Iterable[str], *vocabularies: int) -> None:
    """Admit the processors `names`, tried on each of `vocabularies`; on the built-in models' extremes if none is given.

    Raises:
        UnusableInput: One cannot be found, cannot be replayed, or fails when tried.
    """
    search_current_folder()
    sizes = [arch.vocab_size for arch in GALLERY]
    try:
        # Whatever the user's module prints while it is imported is no part of our output.
        with contextlib.redirect_stdout(sys.stderr):
            for name, vocab in itertools.product(names, vocabularies or (64, min(sizes), max(sizes))):
                user_processors.admit(name, vocab)
    except user_processors.Inadmissible as why:
        raise UnusableInput(f"--processor {why.why}") from None


def check_admitted(case: Case, file: str) -> None:
    """Raise UnusableInput where the case in `file` names a processor that the user did not name."""
    try:
        for name in case.sampling.processors:
            user_processors.admitted(name)
    except user_processors.Inadmissible as why:
        raise UnusableInput(f"{file}: {why}") from None
