"""Interception of NumPy and `random`: their draws become values, one by one or in arrays."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from specverify.backends.interception.errors import refuse
from specverify.backends.interception.ledger import Ledger
from specverify.backends.interception.values import EXPONENTIAL, LOGARITHM, PLAIN, Value, ranking
from specverify.backends.randomness.hooks import Call
from specverify.backends.randomness.places import Draw

MOST_BITS = 10
"""The most bits of one `getrandbits` that are enumerated."""


class ValueArray(np.ndarray[Any, Any]):
    """An array of values, which computes by element and whose arg-max decides."""

    def argmax(self, axis: Any = None, out: Any = None, **kwargs: Any) -> Any:
        """The place of the largest element of each row."""
        return self._first(axis, True)

    def argmin(self, axis: Any = None, out: Any = None, **kwargs: Any) -> Any:
        """The place of the smallest element of each row."""
        return self._first(axis, False)

    def _first(self, axis: Any, largest: bool) -> Any:
        rows = np.asarray(self).reshape(1, -1) if axis is None else np.moveaxis(np.asarray(self), axis, -1)
        decision = "argmax" if largest else "argmin"
        first = [ranking(list(row), 1, largest, decision)[0] for row in rows.reshape(-1, rows.shape[-1])]
        return first[0] if axis is None or rows.ndim == 1 else np.array(first).reshape(rows.shape[:-1])

    def argsort(self, *args: Any, **kwargs: Any) -> Any:
        """The places of the elements of a row in rising order."""
        if self.ndim != 1:
            refuse("argsort of several rows")
        return np.array(ranking(list(self), len(self), False, "argsort"))

    def astype(self, *args: Any, **kwargs: Any) -> Any:
        """The same values: none is rounded."""
        return self

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        refuse("a NumPy function of random numbers that is not arithmetic, a comparison or an arg-max")

    max = min = sort = sum = prod = mean = cumsum = std = var = any = all = dot = partition = argpartition = _refuse


class PythonDraws:
    """Answers the draws of one run."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def __call__(self, call: Call) -> Any:
        """Answer one draw."""
        return self._random(call) if call.library == "random" else self._numpy(call)

    def _random(self, call: Call) -> Any:
        if call.method == "random":
            return self._coins(call, ())
        outcomes = call.args[0] if call.method == "_randbelow" else 1 << call.args[0]
        if call.method == "getrandbits" and call.args[0] > MOST_BITS:
            refuse(f"random.getrandbits({call.args[0]})")
        _, draw = self.ledger.draw(call.name, call.generator, call.make)
        return self.ledger.pick(draw, 0, 1, outcomes, call.method)

    def _numpy(self, call: Call) -> Any:
        args, kwargs = call.args, call.kwargs
        if call.method in ("random", "random_sample", "ranf", "sample"):
            if (
                kwargs.get("dtype", np.float64) not in (np.float64, float, "float64", "d")
                or kwargs.get("out") is not None
            ):
                refuse(f"{call.name} with {sorted(kwargs)}")
            return self._coins(call, kwargs.get("size", args[0] if args else None))
        if call.method == "rand":
            return self._coins(call, args or None)
        if call.method == "uniform":
            low, high, size = _arguments_in_order(("low", "high", "size"), (0.0, 1.0, None), args, kwargs)
            return self._map_values(
                self._coins(call, size), lambda value: (high - low) * value + low, (low, high) == (0, 1)
            )
        if call.method in ("exponential", "standard_exponential"):
            names = ("scale", "size") if call.method == "exponential" else ("size",)
            scale, size = [1.0, *_arguments_in_order(names, (1.0, None)[-len(names) :], args, kwargs)][-2:]
            # The old generator makes -log(1 - u), the new one tables.
            number_kind = "double" if isinstance(call.generator, np.random.RandomState) else "exponential of tables"
            noise = self._values(call, size, number_kind, EXPONENTIAL)
            return self._map_values(noise, lambda value: scale * value, scale == 1)
        if call.method == "gumbel":
            loc, scale, size = _arguments_in_order(("loc", "scale", "size"), (0.0, 1.0, None), args, kwargs)
            noise = self._values(call, size, "double", LOGARITHM)
            return self._map_values(noise, lambda value: loc - scale * value, False)
        if call.method == "choice":
            return self._choice(call)
        if call.method in ("integers", "randint"):
            return self._integers(call)
        return refuse(call.name)

    def _coins(self, call: Call, size: Any) -> Any:
        return self._values(call, size, "double", PLAIN)

    def _values(self, call: Call, size: Any, number_kind: str, kind: str) -> Any:
        _, draw = self.ledger.draw(call.name, call.generator, call.make)
        shape = () if size is None else tuple(np.atleast_1d(size).tolist())
        count = math.prod(shape)
        elements = np.empty(count, dtype=object)
        for number in range(count):
            elements[number] = self._value(draw, number, count, number_kind, kind)
        return elements[0] if shape == () else elements.reshape(shape).view(ValueArray)

    def _value(self, draw: Draw | None, element: int, count: int, number_kind: str, kind: str) -> Value:
        numbers = self.ledger.numbers
        number = numbers.number(number_kind, None if draw is None else draw.place.part(element, count))
        # Both libraries take the logarithm of 1 - u, which is never 0.
        return Value(numbers, number, draw, kind=kind, is_flipped=kind != PLAIN)

    def _map_values(self, values: Any, function: Callable[[Any], Any], is_identity: bool) -> Any:
        return values if is_identity else function(values)

    def _choice(self, call: Call) -> Any:
        names = ("a", "size", "replace", "p")
        defaults = (None, None, True, None)
        options, size, replace, p = _arguments_in_order(names, defaults, call.args, call.kwargs)
        shape = () if size is None else tuple(np.atleast_1d(size).tolist())
        count = math.prod(shape)
        if not replace and count > 1:
            refuse(f"{call.name} of several without replacement")
        _, draw = self.ledger.draw(call.name, call.generator, call.make)
        outcomes = int(options) if np.ndim(options) == 0 else len(options)
        picks = []
        for number in range(count):
            if p is None:
                picks.append(self.ledger.pick(draw, number, count, outcomes, call.method))
            else:
                coin = self._value(draw, number, count, "double", PLAIN)
                weights = [Fraction(float(weight)) for weight in p]
                picks.append(self.ledger.numbers.choose(coin.number, draw, weights, "numpy's choice"))
        values = picks if np.ndim(options) == 0 else [options[pick] for pick in picks]
        return values[0] if shape == () else np.array(values).reshape(shape)

    def _integers(self, call: Call) -> Any:
        low, high, size = _arguments_in_order(("low", "high", "size"), (0, None, None), call.args, call.kwargs)
        low, high = (0, low) if high is None else (low, high)
        span = int(high) - int(low) + bool(call.kwargs.get("endpoint", False))
        shape = () if size is None else tuple(np.atleast_1d(size).tolist())
        _, draw = self.ledger.draw(call.name, call.generator, call.make)
        count = math.prod(shape)
        picks = [int(low) + self.ledger.pick(draw, number, count, span, call.method) for number in range(count)]
        return picks[0] if shape == () else np.array(picks).reshape(shape)


def _arguments_in_order(names: tuple[str, ...], defaults: tuple[Any, ...], args: Any, kwargs: Any) -> list[Any]:
    """The arguments in the order of their names."""
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    return [arguments.get(name, default) for name, default in zip(names, defaults, strict=True)]
