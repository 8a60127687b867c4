"""The check of a saved case's grammars, before an engine runs it."""

from specverify.reference.case import Case
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.sampled_step import check_grammar
from specverify.setup.errors import UnusableInput


def check_grammars(case: Case, file: str) -> None:
    """Check that the grammar of every request of the case in `file` is of its dialect, and has a first token.

    Raises:
        UnusableInput: It is not, with the reason in one line.
    """
    mates = 0 if case.session is None else len(case.session.mates)
    try:
        for number in range(1 + mates):
            check_grammar(case.alone(number))
    except Malformed as why:
        raise UnusableInput(f"{file}: {why}") from None
