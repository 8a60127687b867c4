"""Admission of a run's custom processors, in every process that runs cases."""

import contextlib
import itertools
import sys
from collections.abc import Iterable

from specverify.backends.registry import search_current_folder
from specverify.properties.strategies.models import GALLERY
from specverify.reference import user_processors
from specverify.reference.case import Case
from specverify.setup.errors import UnusableInput


def admit(names: Iterable[str], *vocabularies: int) -> None:
    """Admit the processors `names` after a trial on each of `vocabularies`, the sizes that the run will meet.

    Without `vocabularies` they are tried on 64 tokens and on the smallest and largest built-in vocabulary.

    Raises:
        UnusableInput: A processor cannot be found, cannot be replayed, or fails when tried.
    """
    # `python -m` has the current folder on its path; the installed command has not.
    search_current_folder()
    sizes = [arch.vocab_size for arch in GALLERY]
    try:
        # The user's module may print while it is imported, which must not mix with our output.
        with contextlib.redirect_stdout(sys.stderr):
            for name, vocab in itertools.product(names, vocabularies or (64, min(sizes), max(sizes))):
                user_processors.admit(name, vocab)
    except user_processors.Inadmissible as why:
        raise UnusableInput(f"--processor {why.why}") from None


def check_admitted(case: Case, file: str) -> None:
    """Check that the user has named every processor of the case in `file`.

    Raises:
        UnusableInput: The case uses a processor that the user has not named.
    """
    try:
        for name in case.sampling.processors:
            user_processors.admitted_processor(name)
    except user_processors.Inadmissible as why:
        raise UnusableInput(f"{file}: {why}") from None
