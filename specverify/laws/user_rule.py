"""A user's acceptance rule, `pkg.module:function`: import, calls and checks."""

import importlib
import numbers
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from specverify.backends.registry import search_current_folder
from specverify.reference.oracle.acceptance import Answer, Program, ProgramArguments
from specverify.reference.oracle.coin_source import Number
from specverify.setup.errors import UnusableInput

SIGNATURE = f"({', '.join(ProgramArguments._fields)})"
"""The arguments of a rule, those of `specverify.reference.oracle.acceptance.verify`.

A rule returns (path, weights of the next token).
"""


def function_named(name: str, where: str) -> Callable[..., Any]:
    """The function `pkg.module:function`, whose module may lie in the current folder.

    Raises:
        UnusableInput: It cannot be imported, or is no function; the message begins with `where`.
    """
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        raise UnusableInput(f"{where}: is not of the form pkg.module:function")
    search_current_folder()
    try:
        module = importlib.import_module(module_name)
    except ImportError as why:
        raise UnusableInput(
            f"{where}: cannot import {module_name!r} ({why}); is it in the current folder or on PYTHONPATH?"
        ) from why
    except (Exception, SystemExit) as why:  # the user's code may raise anything, which becomes one line
        raise UnusableInput(f"{where}: importing {module_name!r} raised {brief(why)}") from why
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UnusableInput(f"{where}: {module_name!r} has no function called {attribute!r}")
    return function  # type: ignore[no-any-return]


def own_rule(name: str) -> Program:
    """The user's rule of that name; the returned program raises UnusableInput if the rule raises or answers wrongly.

    Raises:
        UnusableInput: As in `function_named`.
    """
    where = f"--rule {name}"
    function = function_named(name, where)

    def program(*arguments: Any) -> Answer:
        question = ProgramArguments(*arguments)
        # All runs share the rows; as tuples, no run can change them.
        rows, laws = ([tuple(row) for row in table] for table in (question.target, question.proposal))
        try:
            answer = function(*question._replace(target=rows, proposal=laws))
        except (Exception, SystemExit) as why:
            raise UnusableInput(f"{where}: raised {brief(why)}; a rule takes {SIGNATURE}") from why
        return _answer(answer, where, len(rows[0]))

    return program


def _answer(answer: Any, where: str, vocab: int) -> Answer:
    """Path and weights of a rule's answer, as numbers; `specverify.reference.oracle.law` checks the path."""
    try:
        path, weights = answer
        nodes = tuple(operator.index(node) for node in path)
        counted = len(weights)
    except (TypeError, ValueError):
        raise UnusableInput(f"{where}: answered {_quote(answer)}, not (path of node indices, weights)") from None
    if counted != vocab:
        raise UnusableInput(f"{where}: answered {counted} weights for a vocabulary of {vocab}")
    return nodes, [_number(weight, where) for weight in weights]


def _number(weight: Any, where: str) -> Number:
    # Exact weights stay exact: ints and fractions are not turned into floats.
    if isinstance(weight, numbers.Rational):
        return Fraction(weight)
    try:
        return float(weight)
    except (TypeError, ValueError, OverflowError):
        raise UnusableInput(f"{where}: answered the weight {_quote(weight)}, which is no number") from None


def _quote(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:80]}…"


def brief(why: BaseException) -> str:
    """An error of the user's code in one line."""
    return f"{type(why).__name__}: {' '.join(str(why).split())[:200]}"
