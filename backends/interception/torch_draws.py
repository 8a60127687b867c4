"""Interception of torch: the random draws of a run become values, which later calls follow."""

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from specverify.backends.interception.errors import refuse
from specverify.backends.interception.forking import GRIDS
from specverify.backends.interception.ledger import Ledger
from specverify.backends.interception.numbers import DOUBLE, SINGLE
from specverify.backends.interception.values import EXPONENTIAL, Value, ranking
from specverify.backends.randomness.hooks import TORCH_DRAWS, TRAINING, draws_in_training, generator_of_call
from specverify.backends.randomness.places import Draw, Place

COMPARISONS = {
    **{name: name for name in ("lt", "le", "gt", "ge")},
    **{"less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge"},
}
"""The names of torch's comparisons, each with its sign."""

MIRRORED_SIGNS = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
"""The sign that gives the same answer when the operands change sides."""

# fmt: off
MOVES = frozenset((
    "view", "reshape", "squeeze", "unsqueeze", "flatten", "expand", "expand_as", "transpose", "t", "permute", "clone",
    "contiguous", "detach", "select", "getitem", "unbind", "split", "chunk", "narrow", "index_select", "gather", "cpu",
    "cuda", "repeat", "view_as", "reshape_as", "stack", "cat", "flip", "roll", "take_along_dim", "squeeze_",
    "unsqueeze_", "broadcast_to", "ravel", "movedim", "swapaxes", "T", "mT", "data",
))
"""The torch functions that values may go through unchanged: they move elements and compute with none."""

FACTS = frozenset((
    "shape", "dtype", "device", "ndim", "is_cuda", "layout", "requires_grad", "size", "dim", "numel", "len",
    "is_floating_point", "stride", "is_contiguous", "empty_like", "zeros_like", "ones_like", "full_like", "new_empty",
    "new_zeros", "new_ones", "new_full", "nelement", "element_size", "is_sparse", "is_quantized", "names", "data_ptr",
))
"""Questions about a tensor, and new tensors of its shape, that read none of its elements."""

CASTS = frozenset(("to", "float", "double", "half", "bfloat16", "type"))
"""The torch functions that change the dtype; a plain uniform number keeps the values of the dtype it was drawn in."""

ONE_OPERAND: dict[str, Callable[[Value], Any]] = {
    "neg": lambda value: value.times(-1.0),
    "negative": lambda value: value.times(-1.0),
    "log": lambda value: value.log(),
    "exp": lambda value: value.exp(),
    "reciprocal": lambda value: value.power(-1.0),
    "sqrt": lambda value: value.power(0.5),
    "rsqrt": lambda value: value.power(-0.5),
    "square": lambda value: value.power(2.0),
    "log1p": lambda value: _log(value.plus(1.0)),
}
"""Functions of each element by itself, for values."""

TWO_OPERANDS = {"add": "add", "sub": "sub", "subtract": "sub", "mul": "mul", "multiply": "mul", "div": "div",
                "divide": "div", "true_divide": "div", "truediv": "div", "rsub": "rsub", "radd": "add", "rmul": "mul",
                "rtruediv": "rdiv", "rdiv": "rdiv", "pow": "pow", "iadd": "add", "isub": "sub", "imul": "mul",
                "itruediv": "div", "add_": "add", "sub_": "sub", "mul_": "mul", "div_": "div", "pow_": "pow"}
"""Arithmetic of a value and a float, by torch's names."""
# fmt: on

IN_PLACE = ("iadd", "isub", "imul", "itruediv")
"""Python's operators that write into their first operand; torch's own end in `_`."""

RANKINGS = {"argmax": True, "max": True, "argmin": False, "min": False, "topk": True, "argsort": False}
"""The functions that order a row, and whether the largest is first."""

Elements = NDArray[Any]


def _log(value: Any) -> Any:
    return value.log() if isinstance(value, Value) else math.log(value)


class Draws(TorchFunctionMode):
    """Every torch call of a run: a draw makes values, and the tensor that it fills is followed through later calls.

    The memory of a tensor of values is NaN. Its values stand in this object by the address of that memory, so that
    every view of it has them too.
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger
        # The storage is kept beside its elements, so that no later tensor can have the same address.
        self.memory: dict[int, tuple[torch.UntypedStorage, Elements, int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer one torch call; `types` is not used."""
        kwargs = kwargs or {}
        name = str(getattr(func, "__name__", func))
        # An attribute such as `tensor.shape` arrives as the getter of a property, which names it.
        if name == "__get__":
            name = str(getattr(getattr(func, "__self__", None), "__name__", name))
        bare = name[2:-2] if name.startswith("__") and name.endswith("__") else name
        if bare in TORCH_DRAWS and not (bare in TRAINING and not draws_in_training(args, kwargs)):
            return self._draw(func, bare, args, kwargs)
        if any(
            isinstance(leaf, Value) or (isinstance(leaf, torch.Tensor) and self._has_draws(leaf))
            for leaf in _leaves((args, kwargs))
        ):
            return self._follow_call(func, bare, args, kwargs)
        return func(*args, **kwargs)

    # Memory.

    def _index(self, tensor: torch.Tensor) -> NDArray[Any]:
        """The places of a tensor's elements in its memory."""
        index = np.full(tuple(tensor.shape), tensor.storage_offset())
        for axis, (length, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            shape = [1] * tensor.ndim
            shape[axis] = length
            index = index + (np.arange(length) * stride).reshape(shape)
        return index

    def _elements(self, tensor: torch.Tensor) -> Elements | None:
        """The values and floats of a tensor, or None where its memory holds no value."""
        if tensor.layout != torch.strided or not self.memory or not tensor.numel():
            return None
        entry = self.memory.get(tensor.untyped_storage().data_ptr())
        if entry is None:
            return None
        _, elements, element_size = entry
        if element_size != tensor.element_size():
            refuse("a view of random numbers as another dtype")
        return np.array(elements[self._index(tensor)], dtype=object)

    def _holds_values(self, operand: Any) -> bool:
        return isinstance(operand, Value) or (isinstance(operand, torch.Tensor) and self._has_draws(operand))

    def _has_draws(self, tensor: torch.Tensor) -> bool:
        elements = self._elements(tensor)
        return elements is not None and any(isinstance(element, Value) for element in elements.flat)

    def _write(self, tensor: torch.Tensor, elements: Elements) -> torch.Tensor:
        """Let a tensor hold these values and floats."""
        elements = np.broadcast_to(elements, tuple(tensor.shape))
        floats = [math.nan if isinstance(element, Value) else float(element) for element in elements.flat]
        storage = tensor.untyped_storage()
        if tensor.numel() and storage.data_ptr() not in self.memory:
            count = storage.nbytes() // tensor.element_size()
            memory_view = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (count,), (1,))
            before = np.empty(count, dtype=object)
            before[:] = memory_view.to("cpu", torch.float64).tolist()
            self.memory[storage.data_ptr()] = (storage, before, tensor.element_size())
        if tensor.numel():
            self.memory[storage.data_ptr()][1][self._index(tensor)] = elements
            with torch.no_grad():
                tensor.copy_(torch.tensor(floats, dtype=torch.float64).reshape(tuple(tensor.shape)))
        return tensor

    def _new(self, elements: Elements, like: torch.Tensor) -> torch.Tensor:
        return self._write(torch.empty(elements.shape, dtype=like.dtype, device=like.device), elements)

    def _read_elements(self, operand: Any) -> Elements:
        """The elements of any operand."""
        if isinstance(operand, torch.Tensor):
            elements = self._elements(operand)
            if elements is not None:
                return elements
            operand = operand.detach().to("cpu", torch.float64).tolist()
        elements = np.empty((), dtype=object) if isinstance(operand, Value) else np.array(operand, dtype=object)
        if isinstance(operand, Value):
            elements[()] = operand
        return elements

    # Draws.

    def _draw(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A draw: it is made, so that its generator goes on, and values take the place of what it gave."""
        operands = [*args, *(kwargs[key] for key in ("input", "self") if key in kwargs)]
        # The others read the shape of an operand, or write into it.
        if name not in ("rand_like", "randint_like", "uniform_", "exponential_", "bernoulli_") and any(
            isinstance(leaf, torch.Tensor) and self._has_draws(leaf) for leaf in operands
        ):
            refuse(f"torch's {name} of random numbers")
        if name not in ("rand", "rand_like", "uniform_", "exponential_", "multinomial", "bernoulli", "bernoulli_",
                        "randint", "randint_like", "randperm", "gumbel_softmax"):  # fmt: skip
            refuse(f"torch's {name}")
        generator = generator_of_call(args, kwargs)
        if name == "multinomial":
            return self._multinomial(func, args, kwargs, generator)
        if name == "gumbel_softmax":
            refuse("torch's gumbel_softmax")
        result, draw = self.ledger.draw(f"torch.{name}", generator, lambda: func(*args, **kwargs))
        if name in ("randint", "randint_like", "randperm"):
            return self._integers(name, args, kwargs, result, draw)
        if name in ("bernoulli", "bernoulli_"):
            return self._bernoulli(name, args, kwargs, result, draw)
        ends = [arg for arg in (*args[1:], *kwargs.values()) if isinstance(arg, (int, float)) and name.endswith("_")]
        if result.dtype not in GRIDS:
            refuse(f"{name} in {result.dtype}")
        values = self.values(draw, tuple(result.shape), result.dtype, generator.device.type, name == "exponential_")
        if name == "exponential_":
            rate = float(kwargs.get("lambd", ends[0] if ends else 1.0))
            values = _each(lambda value: value.times(1 / rate), values)
        elif ends:
            low, high = float(kwargs.get("from", ends[0])), float(kwargs.get("to", ends[-1]))
            if (low, high) != (0.0, 1.0):
                values = _each(lambda value: (high - low) * value + low, values)
        return self._write(result, values)

    def values(
        self, draw: Draw | None, shape: tuple[int, ...], dtype: torch.dtype, device: str, exponential: bool
    ) -> Elements:
        """New values at the place of a draw, in order."""
        count = math.prod(shape)
        numbers = self.ledger.numbers
        elements = np.empty(count, dtype=object)
        for place in range(count):
            number = numbers.number(*_kind(draw, place, count, dtype, device, exponential))
            grid = 1 << 53 if exponential else GRIDS[dtype]
            if exponential:
                # torch makes -log1p(-u) on a CPU, and -log(u) on a device.
                elements[place] = Value(numbers, number, draw, grid, EXPONENTIAL, 0.0, 1.0, device == "cpu")
            else:
                elements[place] = Value(numbers, number, draw, grid)
        return elements.reshape(shape)

    def _multinomial(self, func: Any, args: Any, kwargs: Any, generator: torch.Generator) -> torch.Tensor:
        """Torch draws one, or several without replacement, by a race; with replacement by inverse CDFs."""
        names = ("input", "num_samples", "replacement")
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        weights = arguments["input"]
        count = arguments["num_samples"]
        replacement = arguments.get("replacement", False)
        # float64 holds every float32 and 16-bit weight exactly.
        rows = weights.detach().to("cpu", torch.float64).reshape(-1, weights.shape[-1]).tolist()
        result, draw = self.ledger.draw("torch.multinomial", generator, lambda: func(*args, **kwargs))
        for row in rows:
            # torch.multinomial refuses such weights in nearly these words.
            if not all(0 <= weight < float("inf") for weight in row) or not sum(row):
                raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0, or is all zero")
            if not replacement and sum(weight > 0 for weight in row) < count:
                refuse(f"multinomial of {count} without replacement where fewer have a weight")
        race = not replacement or count == 1
        wide = weights.shape[-1] if race else count
        values = self.values(draw, (len(rows), wide), torch.float64, generator.device.type, race)
        outcomes: list[int] = []
        numbers = self.ledger.numbers
        for row, noise in zip(rows, values, strict=True):
            row_weights = [Fraction(weight) for weight in row]
            if race:
                runners = [(value.number, weight) for value, weight in zip(noise, row_weights, strict=True)]
                outcomes += numbers.ranking(runners, count, noise[0].is_flipped, draw, "multinomial")
            else:
                outcomes += [numbers.choose(value.number, draw, row_weights, "multinomial") for value in noise]
        return torch.tensor(outcomes, device=weights.device).reshape(tuple(result.shape))

    def _integers(self, name: str, args: Any, kwargs: Any, result: torch.Tensor, draw: Draw | None) -> torch.Tensor:
        flat = result.reshape(-1)
        if name == "randperm":
            remaining = list(range(len(flat)))
            picks = []
            for place in range(len(flat)):
                pick = self.ledger.pick(draw, place, len(flat), len(remaining), "randperm")
                picks.append(remaining.pop(pick))
        else:
            ends = [arg for arg in args if isinstance(arg, int) and not isinstance(arg, bool)]
            ends = [kwargs[key] for key in ("low", "high") if key in kwargs] or ends
            low, high = (0, ends[0]) if len(ends) == 1 else (ends[0], ends[1])
            picks = [low + self.ledger.pick(draw, place, len(flat), high - low, name) for place in range(len(flat))]
        return torch.tensor(picks, dtype=result.dtype, device=result.device).reshape(result.shape)

    def _bernoulli(self, name: str, args: Any, kwargs: Any, result: torch.Tensor, draw: Draw | None) -> torch.Tensor:
        default_odds = args[0] if name == "bernoulli" else 0.5
        given_odds = kwargs.get("p", args[1] if len(args) > 1 else default_odds)
        odds = np.broadcast_to(self._read_elements(given_odds), tuple(result.shape))
        device = result.device.type
        values = self.values(draw, tuple(result.shape), torch.float32, device, False)
        hits = [
            self.ledger.numbers.below(value.number, draw, Fraction(float(p)), "bernoulli")
            for value, p in zip(values.flat, odds.flat, strict=True)
        ]
        answer = torch.tensor(hits, device=result.device).reshape(tuple(result.shape)).to(result.dtype)
        return result.copy_(answer) if name.endswith("_") else answer

    # What becomes of drawn values.

    def _follow_call(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A call that has a value, or a tensor of values, among its arguments."""
        operands = [*args, *(kwargs[key] for key in ("input", "self", "other", "exponent") if key in kwargs)]
        if name in FACTS:
            return func(*args, **kwargs)
        # Python's own conversions have the names of casts.
        if getattr(func, "__name__", "") in ("__float__", "__int__", "__bool__", "__index__", "__complex__"):
            refuse(f"Python's {name}() on a random number: read it with .item()")
        if name in COMPARISONS:
            return self._compare(COMPARISONS[name], operands[0], operands[1])
        bare = name.removesuffix("_")
        if name in TWO_OPERANDS and len(operands) > 1:
            if kwargs.get("alpha", 1) != 1 or kwargs.get("rounding_mode") is not None:
                refuse(f"torch's {name} with {sorted(kwargs)} on a random number")
            return self._compute(TWO_OPERANDS[name], name.endswith("_") or name in IN_PLACE, operands[0], operands[1])
        if bare in ONE_OPERAND:
            elements = _each(ONE_OPERAND[bare], self._read_elements(operands[0]))
            return self._answer(elements, operands[0], name.endswith("_"))
        if bare in ("clamp", "clip", "clamp_min", "clamp_max"):
            return self._clamp(bare, name.endswith("_"), operands[0], args[1:], kwargs)
        if name in RANKINGS and isinstance(operands[0], torch.Tensor):
            return self._rank(name, operands[0], args[1:], kwargs)
        if bare == "masked_fill" or name in ("where", "setitem", "copy_", "index_fill_"):
            return self._fill(name, args, kwargs)
        if name in ("searchsorted", "bucketize"):
            return self._search(name, args, kwargs)
        if name == "item" or name == "tolist":
            elements = self._read_elements(operands[0])
            return elements.reshape(-1)[0] if name == "item" else elements.tolist()
        if name in CASTS:
            return self._move(func, args, kwargs)
        if name in MOVES:
            return self._move(func, args, kwargs)
        refuse(f"torch's {name} on a random number")

    def _answer(self, elements: Elements, like: Any, in_place: bool) -> torch.Tensor:
        """The elements in a tensor: the operand itself for a function in place."""
        return self._write(like, elements) if in_place else self._new(elements, like)

    def _compute(self, operator: str, in_place: bool, left_operand: Any, right_operand: Any) -> torch.Tensor:
        """`left operator right`, element by element, where one operand is a float."""
        first, second = np.broadcast_arrays(self._read_elements(left_operand), self._read_elements(right_operand))
        elements = np.empty(first.shape, dtype=object)
        for place in np.ndindex(first.shape):
            elements[place] = _arithmetic(operator, first[place], second[place])
        tensor = next(operand for operand in (left_operand, right_operand) if isinstance(operand, torch.Tensor))
        return self._answer(elements, left_operand if in_place else tensor, in_place)

    def _clamp(self, name: str, in_place: bool, tensor: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
        ends = [*args, None, None]
        low = kwargs.get("min", ends[0] if name != "clamp_max" else None)
        high = kwargs.get("max", ends[0] if name == "clamp_max" else ends[1])
        low, high = (None if end is None else float(end) for end in (low, high))
        limits = (-math.inf if low is None else low, math.inf if high is None else high)
        elements = _each(
            lambda value: value.clamp(*limits), self._read_elements(tensor), lambda x: min(max(x, limits[0]), limits[1])
        )
        return self._answer(elements, tensor, in_place)

    def _compare(self, sign: str, left_operand: Any, right_operand: Any) -> torch.Tensor:
        """`left sign right`, element by element, where one operand holds values."""
        if not self._holds_values(left_operand):
            return self._compare(MIRRORED_SIGNS[sign], right_operand, left_operand)
        # torch compares in the dtype that both operands promote to, so a number is rounded to that dtype.
        dtype = torch.result_type(
            0.5 if isinstance(left_operand, Value) else left_operand,
            0.5 if isinstance(right_operand, Value) else right_operand,
        )
        device = right_operand.device if isinstance(right_operand, torch.Tensor) else left_operand.device
        if isinstance(right_operand, torch.Tensor) and self._elements(right_operand) is None:
            right_operand = right_operand.to(dtype)
        elif isinstance(right_operand, (int, float)):
            right_operand = torch.tensor(right_operand, dtype=dtype)
        values, limits = np.broadcast_arrays(self._read_elements(left_operand), self._read_elements(right_operand))
        answers = []
        for value, limit in zip(values.flat, limits.flat, strict=True):
            if isinstance(limit, Value):
                refuse("two random numbers compared with each other")
            answers.append(value.decide(sign, float(limit), dtype) if isinstance(value, Value)
                           else _compare_floats(sign, value, limit))  # fmt: skip
        return torch.tensor(answers, dtype=torch.bool, device=device).reshape(values.shape)

    def _rank(self, name: str, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
        """The order of each row: the number of its first, or of its first few."""
        count = kwargs.get("k", args[0] if args and name == "topk" else 1)
        other_args = list(args[1:] if name == "topk" else args)
        default_dim = -1 if name in ("topk", "argsort") else None
        dim = kwargs.get("dim", other_args[0] if other_args else default_dim)
        keepdim = kwargs.get("keepdim", other_args[1] if len(other_args) > 1 and name != "argsort" else False)
        if isinstance(dim, torch.Tensor):
            refuse(f"torch's {name} of two tensors of random numbers")
        largest = bool(kwargs.get("largest", kwargs.get("descending", RANKINGS[name])))
        elements = self._read_elements(tensor)
        is_flattened = dim is None
        rows = elements.reshape(1, -1) if is_flattened else np.moveaxis(elements, dim, -1)
        if name == "argsort":
            count = rows.shape[-1]
        flat = rows.reshape(-1, rows.shape[-1])
        orders = [ranking(list(row), count, largest, name) for row in flat]
        places = np.array(orders).reshape(*rows.shape[:-1], count)
        firsts = np.empty(places.shape, dtype=object)
        for place in np.ndindex(places.shape):
            firsts[place] = rows[place[:-1]][places[place]]
        if not is_flattened:
            places, firsts = np.moveaxis(places, -1, dim), np.moveaxis(firsts, -1, dim)
        if name not in ("topk", "argsort") and not keepdim:
            places = places.reshape(()) if is_flattened else places.squeeze(dim)
            firsts = firsts.reshape(()) if is_flattened else firsts.squeeze(dim)
        indices = torch.tensor(places.tolist(), dtype=torch.long, device=tensor.device)
        if name in ("argmax", "argmin", "argsort"):
            return indices
        first = self._new(firsts, tensor)
        if is_flattened:
            return first
        kind = {"max": torch.return_types.max, "min": torch.return_types.min, "topk": torch.return_types.topk}[name]
        return kind((first, indices))

    def _fill(self, name: str, args: Any, kwargs: Any) -> Any:
        """Elements chosen from two tensors, or written into one."""
        if kwargs:
            refuse(f"torch's {name} with {sorted(kwargs)} on a random number")
        if name == "where":
            mask, first, second = args
            mask_cells, first_elements, second_elements = np.broadcast_arrays(
                self._read_elements(mask), self._read_elements(first), self._read_elements(second)
            )
            elements = np.empty(mask_cells.shape, dtype=object)
            for place in np.ndindex(mask_cells.shape):
                elements[place] = first_elements[place] if mask_cells[place] else second_elements[place]
            return self._new(elements, next(t for t in (first, second) if isinstance(t, torch.Tensor)))
        if name in ("masked_fill", "masked_fill_"):
            tensor, mask, value = args
            elements, mask_cells = np.broadcast_arrays(self._read_elements(tensor), self._read_elements(mask))
            elements = np.array(elements, dtype=object)
            for place in np.ndindex(elements.shape):
                if mask_cells[place]:
                    elements[place] = self._read_elements(value).reshape(-1)[0]
            return self._answer(elements, tensor, name.endswith("_"))
        if name == "copy_":
            return self._write(args[0], self._read_elements(args[1]))
        if name == "setitem":
            tensor, key, value = args
            index = torch.arange(tensor.numel()).reshape(tuple(tensor.shape))[key]
            flat: Elements = self._read_elements(tensor).reshape(-1)
            flat[index.reshape(-1).numpy()] = np.broadcast_to(self._read_elements(value), tuple(index.shape)).reshape(
                -1
            )
            self._write(tensor, flat.reshape(tuple(tensor.shape)))
            return None
        return refuse(f"torch's {name} on a random number")

    def _search(self, name: str, args: Any, kwargs: Any) -> torch.Tensor:
        """The number of limits below each value, by comparisons."""
        edges, inputs = args[:2] if name == "searchsorted" else (args[1], args[0])
        right = kwargs.get("right", False) or kwargs.get("side") == "right"
        if isinstance(edges, torch.Tensor) and self._has_draws(edges):
            refuse(f"torch's {name} in random numbers")
        values = self._read_elements(inputs)
        limits = self._read_elements(edges)
        rows = np.broadcast_to(limits, (*values.shape[:-1], limits.shape[-1])) if values.ndim else limits
        counts = np.zeros(values.shape, dtype=int)
        dtype = edges.dtype if isinstance(edges, torch.Tensor) else None
        for place in np.ndindex(values.shape):
            for limit in rows[place[:-1]] if limits.ndim > 1 else limits:
                value = values[place]
                above = value.decide("ge" if right else "gt", float(limit), dtype) if isinstance(value, Value) else (
                    value >= limit if right else value > limit)  # fmt: skip
                if not above:
                    break
                counts[place] += 1
        return torch.tensor(counts.tolist(), dtype=torch.long, device=edges.device)

    def _move(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A move of elements: a view shows its memory's values, and a copy gets the values of its sources."""
        result = func(*args, **kwargs)
        tensors = [part for part in tree_leaves(result) if isinstance(part, torch.Tensor)]
        if all(part.untyped_storage().data_ptr() in self.memory for part in tensors if part.numel()):
            return result
        sources = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        sources = [leaf for leaf in sources if leaf.is_floating_point()]
        every = np.concatenate([self._read_elements(leaf).reshape(-1) for leaf in sources])
        starts = np.cumsum([0, *(leaf.numel() for leaf in sources)]).tolist()
        shadows = {
            id(leaf): torch.arange(start, start + leaf.numel()).reshape(tuple(leaf.shape))
            for leaf, start in zip(sources, starts, strict=False)
        }

        def shadow(leaf: Any) -> Any:
            # Numbers of elements keep their dtype through a cast.
            return torch.int64 if isinstance(leaf, torch.dtype) else shadows.get(id(leaf), leaf)

        name = str(getattr(func, "__name__", func))
        if name in CASTS - {"to"}:
            return self._new(self._read_elements(args[0]), result)
        places = tree_leaves(func(*tree_map(shadow, args), **tree_map(shadow, kwargs)))
        for part, index in zip(tensors, places, strict=True):
            self._write(part, every[index.cpu().numpy()] if index.ndim else np.array(every[int(index)], dtype=object))
        return result


def _leaves(operand: Any) -> Iterator[Any]:
    """The operands of a call, also in lists, tuples and dicts."""
    if isinstance(operand, (list, tuple)):
        for part in operand:
            yield from _leaves(part)
    elif isinstance(operand, dict):
        yield from _leaves(tuple(operand.values()))
    else:
        yield operand


def _each(
    function: Callable[[Value], Any], elements: Elements, plainly: Callable[[float], float] | None = None
) -> Elements:
    """A function of each value; floats go through `plainly`, or are refused."""
    result = np.empty(elements.shape, dtype=object)
    for place in np.ndindex(elements.shape):
        element = elements[place]
        if isinstance(element, Value):
            result[place] = function(element)
        elif plainly is None:
            refuse("a function of random numbers and others in one tensor")
        else:
            result[place] = plainly(element)
    return result


def _arithmetic(operator: str, left_operand: Any, right_operand: Any) -> Any:
    """`left operator right`, of which one may be a value."""
    if operator == "rsub" or operator == "rdiv":
        left_operand, right_operand = right_operand, left_operand
    if isinstance(left_operand, Value) and isinstance(right_operand, Value):
        refuse("arithmetic of two random numbers")
    if operator == "add":
        return left_operand + right_operand
    if operator in ("sub", "rsub"):
        return left_operand - right_operand
    if operator == "mul":
        return left_operand * right_operand
    if operator == "pow":
        return left_operand**right_operand
    if not isinstance(right_operand, Value) and right_operand == 0:
        return left_operand.over_zero()
    return left_operand / right_operand


def _compare_floats(sign: str, value: float, limit: float) -> bool:
    return {"lt": value < limit, "le": value <= limit, "gt": value > limit, "ge": value >= limit}[sign]


def _kind(
    draw: Draw | None, element: int, count: int, dtype: torch.dtype, device: str, exponential: bool
) -> tuple[str, Place | None]:
    """How one element of a draw is made, and of which words."""
    if draw is None:
        return "alone", None
    if device != "cpu":
        # A device's thread reads its own words: elements of one number and one place are one, whatever the function.
        return "device", Place(f"{draw.place.stream} element {element} of", draw.place.offset, 0)
    place = draw.place.part(element, count)
    if (exponential or dtype == torch.float64) and place.size == 2:
        return DOUBLE, place
    if not exponential and dtype == torch.float32 and place.size == 1:
        return SINGLE, place
    return f"{'exponential' if exponential else 'uniform'} {dtype}", place
