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

from backends.admission import Misshapen
from backends.admission.arrays import Axis, array
from backends.admission.numbers import whole, wholes
from backends.base import StageFailure
from reference.trace import Stage


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
    """A function under test, called with those arguments that it takes.

    Attributes:
        contract: Its kind.
        name: The function's name.
        takes: The names of the arguments that it takes.

    Raises:
        TypeError: The function lacks an argument that its kind needs, or needs one that its kind does not offer.
    """

    def __init__(self, function: Callable[..., Any], contract: Contract) -> None:
        self.contract = contract
        self.name = str(getattr(function, "__name__", type(function).__name__))
        self.takes = _taken(function, self.name, contract)
        self._function = function

    def __call__(self, **given: Any) -> Any:
        """Call the function; arguments that it does not take are left out."""
        with torch.no_grad():
            return self._function(**{name: value for name, value in given.items() if name in self.takes})

    def tensor(self, field: str, value: object, kind: str, axes: tuple[Axis, ...]) -> Tensor:
        """An answer as a tensor of `kind` ("float", "int", "bool") with these axes.

        Raises:
            StageFailure: at the component's stage, naming the field, what was returned and what was expected.
        """
        try:
            # The copy is writeable: a tensor on a read-only array would warn.
            return torch.from_numpy(array(f"{self.name}: {field}", value, kind, axes, read_only=False).copy())
        except Misshapen as wrong:
            raise self.failed(wrong.why) from None

    def walk(self, told: object, nodes: int, vocabulary: int) -> tuple[list[int], int]:
        """An answer of accepted rows and one token: the rows as a list from the root downwards, and the token.

        Raises:
            StageFailure: unless it is such a pair, with rows of the tree from row 0 on and a token of the vocabulary.
        """
        if not isinstance(told, (tuple, list)) or len(told) != 2:
            raise self.refused(told, "a pair: the accepted rows from the root (0) downwards, and the token after them")
        try:
            path = wholes(f"{self.name}: path", told[0], 0, nodes - 1, ("a row", "rows"))
            bonus = whole(f"{self.name}: bonus", told[1], 0, vocabulary - 1, ("a token", "tokens"))
        except Misshapen as wrong:
            raise self.failed(wrong.why) from None
        if path[:1] != (0,):
            raise self.refused(told[0], f"rows that begin with the root (0), in {self.name}'s path")
        return list(path), bonus

    def refused(self, found: object, expected: str) -> StageFailure:
        """The failure of an answer of another form."""
        told = f"{type(found).__name__} of {len(found)}" if isinstance(found, (tuple, list)) else type(found).__name__
        return self.failed(f"{self.name} returned {told}, expected {expected}")

    def failed(self, why: str) -> StageFailure:
        """The failure of a run at the component's stage."""
        return StageFailure(self.contract.stage, why)


def _taken(function: Callable[..., Any], name: str, contract: Contract) -> frozenset[str]:
    """The names of the offered arguments that the function takes."""
    parameters = inspect.signature(function).parameters
    line = f"component: {name} as {contract.kind}"
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for one in parameters.values():
        if one.name not in contract.offers and one.default is one.empty and one.kind not in variable:
            raise TypeError(f"{line} needs {one.name}, which is none of {', '.join(contract.offers)}")
        if one.name in contract.offers and one.kind is one.POSITIONAL_ONLY:
            raise TypeError(f"{line} takes {one.name} by position alone; arguments are given by name")
    every = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    taken = frozenset(contract.offers) if every else frozenset(parameters) & frozenset(contract.offers)
    for group in contract.needs:
        if not taken & set(group):
            raise TypeError(f"{line} takes no {' or '.join(group)}; it is given {', '.join(contract.offers)}")
    return taken
