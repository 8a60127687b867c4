"""The contract of a component: its arguments by name, and the check of its answer.

A component is a function of a user. It takes any of the arguments that its kind offers, by name, and the names that it
takes say what it can do.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specverify.backends.admission import Misshapen
from specverify.backends.admission.arrays import Axis, admit_array
from specverify.backends.admission.numbers import admit_int, admit_ints
from specverify.backends.base import StageFailure
from specverify.reference.trace import Stage


@dataclass(frozen=True)
class Contract:
    """A kind of component.

    Attributes:
        kind: The keyword of `component` that names it.
        stage: The stage that the component computes.
        offers: The arguments that a function of this kind may take, each with what it is given.
        needs: Arguments without which a function could not do its work; one of each group suffices.
        returns: What it returns.
        judged_by: The invariants of its stage, as patterns of their names.
    """

    kind: str
    stage: Stage
    offers: Mapping[str, str]
    needs: tuple[tuple[str, ...], ...]
    returns: str
    judged_by: tuple[str, ...]


class Component:
    """A function under test, called with the arguments that it takes.

    Attributes:
        contract: Its kind.
        name: The function's name.
        parameters: The names of the arguments that it takes.

    Raises:
        TypeError: The function lacks an argument that its kind needs, or needs one that its kind does not offer.
    """

    def __init__(self, function: Callable[..., Any], contract: Contract) -> None:
        self.contract = contract
        self.name = str(getattr(function, "__name__", type(function).__name__))
        self.parameters = _parameters_of(function, self.name, contract)
        self._function = function

    def __call__(self, **arguments: Any) -> Any:
        """Call the function; arguments that it does not take are left out."""
        with torch.no_grad():
            return self._function(**{name: value for name, value in arguments.items() if name in self.parameters})

    def tensor(self, field: str, value: object, kind: str, axes: tuple[Axis, ...]) -> Tensor:
        """An answer as a tensor of `kind` ("float", "int", "bool") with these axes.

        Raises:
            StageFailure: at the component's stage, naming the field, what was returned and what was expected.
        """
        try:
            # The copy is writeable: a tensor on a read-only array would warn.
            return torch.from_numpy(admit_array(f"{self.name}: {field}", value, kind, axes, read_only=False).copy())
        except Misshapen as wrong:
            raise self.failure(wrong.why) from None

    def walk(self, answer: object, nodes: int, vocabulary: int) -> tuple[list[int], int]:
        """An answer of accepted rows and one token: the rows as a list from the root downwards, and the token.

        Raises:
            StageFailure: unless it is such a pair, with rows of the tree from row 0 on and a token of the vocabulary.
        """
        if not isinstance(answer, (tuple, list)) or len(answer) != 2:
            raise self.wrong_answer(
                answer, "a pair: the accepted rows from the root (0) downwards, and the token after them"
            )
        try:
            path = admit_ints(f"{self.name}: path", answer[0], 0, nodes - 1, ("a row", "rows"))
            bonus = admit_int(f"{self.name}: bonus", answer[1], 0, vocabulary - 1, ("a token", "tokens"))
        except Misshapen as wrong:
            raise self.failure(wrong.why) from None
        if path[:1] != (0,):
            raise self.wrong_answer(answer[0], f"rows that begin with the root (0), in {self.name}'s path")
        return list(path), bonus

    def wrong_answer(self, answer: object, expected: str) -> StageFailure:
        """The failure of an answer of another form."""
        description = (
            f"{type(answer).__name__} of {len(answer)}" if isinstance(answer, (tuple, list)) else type(answer).__name__
        )
        return self.failure(f"{self.name} returned {description}, expected {expected}")

    def failure(self, why: str) -> StageFailure:
        """The failure of a run at the component's stage."""
        return StageFailure(self.contract.stage, why)


def _parameters_of(function: Callable[..., Any], name: str, contract: Contract) -> frozenset[str]:
    """The names of the offered arguments that the function takes."""
    parameters = inspect.signature(function).parameters
    line = f"component: {name} as {contract.kind}"
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in parameters.values():
        if (
            parameter.name not in contract.offers
            and parameter.default is parameter.empty
            and parameter.kind not in variable
        ):
            raise TypeError(f"{line} needs {parameter.name}, which is none of {', '.join(contract.offers)}")
        if parameter.name in contract.offers and parameter.kind is parameter.POSITIONAL_ONLY:
            raise TypeError(f"{line} takes {parameter.name} by position alone; arguments are given by name")
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    names = frozenset(contract.offers) if takes_any else frozenset(parameters) & frozenset(contract.offers)
    for group in contract.needs:
        if not names & set(group):
            raise TypeError(f"{line} takes no {' or '.join(group)}; it is given {', '.join(contract.offers)}")
    return names
