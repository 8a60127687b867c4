"""A rule of the user's own, `pkg.module:function`: imported, called with rows it cannot change, its answer checked."""

import importlib
import numbers
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from backends.registry import search_current_folder
from reference.oracle.acceptance import Answer, Program, Question
from reference.oracle.coin_source import Number
from specverify.setup.errors import UnusableInput

SIGNATURE = f"({', '.join(Question._fields)})"
"""The arguments of a rule, as of `reference.oracle.acceptance.verify`; it answers (path, weights of the next token)."""


def function_named(name: str, where: str) -> Callable[..., Any]:
    """The function `pkg.module:function`, its module looked for in the current folder too.

    Raises:
        UnusableInput: It cannot be imported, or is no function; the line begins with `where`.
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
    except (Exception, SystemExit) as why:  # a stranger's code: whatever it raises becomes one line
        raise UnusableInput(f"{where}: importing {module_name!r} raised {brief(why)}") from why
    found = getattr(module, attribute, None)
    if not callable(found):
        raise UnusableInput(f"{where}: {module_name!r} has no function called {attribute!r}")
    return found  # type: ignore[no-any-return]


def own_rule(name: str) -> Program:
    """The user's rule of that name; whatever it then does wrong is UnusableInput too.

    Raises:
        UnusableInput: as `function_named`.
    """
    where = f"--rule {name}"
    found = function_named(name, where)

    def program(*arguments: Any) -> Answer:
        asked = Question(*arguments)
        # Rows are shared by all runs: as tuples they cannot be changed by one.
        rows, laws = ([tuple(row) for row in table] for table in (asked.target, asked.proposal))
        try:
            answer = found(*asked._replace(target=rows, proposal=laws))
        except (Exception, SystemExit) as why:
            raise UnusableInput(f"{where}: raised {brief(why)}; a rule takes {SIGNATURE}") from why
        return _answer(answer, where, len(rows[0]))

    return program


def _answer(answer: Any, where: str, vocab: int) -> Answer:
    """Path and weights, in numbers that can be added up; `reference.oracle.law` says whether they fit the tree."""
    try:
        path, weights = answer
        nodes = tuple(operator.index(node) for node in path)
        counted = len(weights)
    except (TypeError, ValueError):
        raise UnusableInput(f"{where}: answered {_shown(answer)}, not (path of node indices, weights)") from None
    if counted != vocab:
        raise UnusableInput(f"{where}: answered {counted} weights for a vocabulary of {vocab}")
    return nodes, [_number(weight, where) for weight in weights]


def _number(weight: Any, where: str) -> Number:
    if isinstance(weight, numbers.Rational):
        return Fraction(weight)
    try:
        return float(weight)
    except (TypeError, ValueError, OverflowError):
        raise UnusableInput(f"{where}: answered the weight {_shown(weight)}, which is no number") from None


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:80]}…"


def brief(why: BaseException) -> str:
    """An error of a stranger's code in one line."""
    return f"{type(why).__name__}: {' '.join(str(why).split())[:200]}"
