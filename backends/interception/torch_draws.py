"""Interception of torch: the random draws of a run become forks.

Every torch call of the run passes through `Draws`, which follows the result of a draw wherever the run hands it.
"""

from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from backends.interception.forking import GRIDS, Coin, Fork, refuse

COMPARISONS = {
    **{name: name for name in ("lt", "le", "gt", "ge")},
    **{"less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge"},
}
"""The names of torch's comparisons, each with its sign."""

MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
"""The sign that gives the same answer when the operands change sides."""

# fmt: off
MOVES = frozenset((
    "view", "reshape", "squeeze", "unsqueeze", "flatten", "expand", "expand_as", "transpose", "t", "permute", "clone",
    "contiguous", "detach", "select", "getitem", "unbind", "split", "chunk", "narrow", "index_select", "gather", "cpu",
    "cuda", "repeat", "view_as", "reshape_as", "stack", "cat"
))
"""The torch functions that a tensor of coins may go through: they move its elements and compute with none."""

FACTS = frozenset((
    "shape", "dtype", "device", "ndim", "is_cuda", "layout", "requires_grad", "size", "dim", "numel", "len",
    "is_floating_point"
))
"""Questions about a tensor that read none of its elements."""

RANDOM = frozenset((
    "randn", "randn_like", "randint", "randint_like", "randperm", "normal", "normal_", "bernoulli", "bernoulli_",
    "random_", "log_normal_", "cauchy_", "geometric_", "poisson", "binomial", "dropout", "rrelu", "gumbel_softmax"
))
"""Random functions whose law this file does not know; a call to one of them is refused."""
# fmt: on


class Draws(TorchFunctionMode):
    """Every torch call of a run: a draw forks, and the tensor that it fills is followed through later calls.

    A tensor of coins is a real tensor filled with NaN; its coins are kept in this object by the tensor's identity.
    """

    def __init__(self, fork: Fork) -> None:
        super().__init__()
        self.fork = fork
        # Keyed by id; the tensor is kept beside its entry, so that no later tensor can have the same id.
        self.coins: dict[int, tuple[torch.Tensor, Any]] = {}
        self.noise: dict[int, tuple[torch.Tensor, list[bool]]] = {}
        self.races: dict[int, tuple[torch.Tensor, torch.Tensor, list[bool]]] = {}
        self.storages: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer one torch call; `types` is not used."""
        kwargs = kwargs or {}
        name = str(getattr(func, "__name__", func))
        # An attribute such as `tensor.shape` arrives as the getter of a property, which names it.
        if name == "__get__":
            name = str(getattr(getattr(func, "__self__", None), "__name__", name))
        bare = name[2:-2] if name.startswith("__") and name.endswith("__") else name
        leaves = tree_leaves((args, kwargs))
        if bare in ("uniform_", "exponential_"):
            return self._fill(bare, args[0], args[1:], kwargs)
        # Before the plain draws: a draw that takes drawn numbers as its arguments must be followed, or refused.
        if any(isinstance(one, Coin) or (isinstance(one, torch.Tensor) and self._drawn(one)) for one in leaves):
            return self._followed(func, bare, args, kwargs)
        # Dropout outside training draws nothing.
        if bare in RANDOM and not (bare == "dropout" and not kwargs.get("training", True)):
            refuse(f"torch's {bare}")
        # A generator would only seed the draw, and every outcome is run anyway.
        if bare == "rand":
            kwargs = {key: value for key, value in kwargs.items() if key != "generator"}
            return self._fill("uniform_", torch.empty(*args, **kwargs), (), {})
        if bare == "rand_like":
            return self._fill("uniform_", torch.empty_like(*args, **kwargs), (), {})
        if bare == "multinomial":
            return self._multinomial(*args, **kwargs)
        return func(*args, **kwargs)

    def _drawn(self, one: torch.Tensor) -> bool:
        if any(id(one) in held for held in (self.coins, self.noise, self.races)):
            return True
        # A view made before its storage was filled would silently show the NaN in it.
        if one.layout == torch.strided and one.untyped_storage().data_ptr() in self.storages:
            refuse("a view of a tensor that was filled with random numbers afterwards")
        return False

    def _fill(self, name: str, where: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
        ends = (*args, *(value for key, value in kwargs.items() if key != "generator"))
        if (name == "uniform_" and ends not in ((), (0,), (0, 1))) or (
            name == "exponential_" and ends not in ((), (1,))
        ):
            refuse(f"{name} with arguments {ends}")
        # Coins belong to a tensor as a whole; the tensor behind the view would not know of them.
        if where._base is not None:
            refuse(f"{name} into a view of another tensor")
        if where.dtype not in GRIDS:
            refuse(f"{name} in {where.dtype}")
        if name == "exponential_":
            self._poisoned(where)
            # One flag for each row: a row of noise decides one race only.
            self.noise[id(where)] = (where, [False] * (where.numel() // max(where.shape[-1], 1)))
            return where
        made = [Coin(self.fork, GRIDS[where.dtype]) for _ in range(where.numel())]
        return self._tensor(np.array(made, dtype=object).reshape(tuple(where.shape)), where)

    def _poisoned(self, where: torch.Tensor) -> None:
        where.fill_(float("nan"))
        if where.numel():
            self.storages.add(where.untyped_storage().data_ptr())

    def _tensor(self, coins: Any, where: torch.Tensor) -> torch.Tensor:
        self._poisoned(where)
        self.coins[id(where)] = (where, coins)
        return where

    def _multinomial(
        self, weights: torch.Tensor, num_samples: int, replacement: bool = False, *, generator: Any = None
    ) -> torch.Tensor:
        # float64 holds every float32 and 16-bit weight exactly.
        rows = weights.detach().to("cpu", torch.float64).reshape(-1, weights.shape[-1]).tolist()
        drawn = []
        for row in rows:
            # torch.multinomial refuses such weights in nearly these words.
            if not all(0 <= weight < float("inf") for weight in row) or not sum(row):
                raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0, or is all zero")
            left = [Fraction(weight) for weight in row]
            if not replacement and sum(weight > 0 for weight in left) < num_samples:
                refuse(f"multinomial of {num_samples} without replacement where fewer have a weight")
            for _ in range(num_samples):
                drawn.append(self.fork.branch(left, "multinomial"))
                if not replacement:
                    left[drawn[-1]] = Fraction(0)
        return torch.tensor(drawn, device=weights.device).reshape(*weights.shape[:-1], num_samples)

    def _followed(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A call that has a coin, a tensor of coins, noise or a race among its arguments."""
        operands = [*args, *(kwargs[key] for key in ("input", "self", "other", "dim") if key in kwargs)]
        if name in FACTS:
            return func(*args, **kwargs)
        if name in COMPARISONS:
            return self._compared(COMPARISONS[name], operands[0], operands[1])
        if name in ("div", "div_", "truediv", "true_divide") and id(operands[1]) in self.noise:
            return self._raced(operands[0], operands[1], name == "div_")
        if id(operands[0]) in self.races and name == "argmax":
            return self._won(operands[0], operands[1] if len(operands) > 1 else None, kwargs.get("keepdim", False))
        if id(operands[0]) in self.coins or name in ("stack", "cat"):
            if name in ("item", "tolist"):
                return self.coins[id(operands[0])][1].tolist()
            if name in MOVES or (
                name == "to" and not any(isinstance(one, torch.dtype) for one in tree_leaves((args, kwargs)))
            ):
                return self._moved(func, args, kwargs)
        kind = (
            "exponential noise" if any(id(one) in self.noise or id(one) in self.races for one in operands) else "a coin"
        )
        refuse(f"torch's {name} on {kind}")

    def _compared(self, sign: str, left: Any, right: Any) -> torch.Tensor:
        """`left sign right`, element by element, where one operand holds coins."""
        if not (isinstance(left, Coin) or id(left) in self.coins):
            return self._compared(MIRRORED[sign], right, left)
        if isinstance(right, Coin) or id(right) in self.coins or id(right) in self.noise or id(right) in self.races:
            refuse("two draws compared with each other")
        # torch compares in the dtype that both operands promote to, so the coin is rounded to that dtype.
        dtype = torch.result_type(0.5 if isinstance(left, Coin) else left, right)
        device = right.device if isinstance(right, torch.Tensor) else left.device
        # Coins are Python objects, so NumPy broadcasts them in an object array.
        coins = np.array(left, dtype=object) if isinstance(left, Coin) else self.coins[id(left)][1]
        limits = np.array(torch.as_tensor(right).to("cpu", dtype).to(torch.float64).tolist())
        coins, limits = np.broadcast_arrays(coins, limits)
        answers = [
            coin.decide(sign, float(limit), dtype) for coin, limit in zip(coins.ravel(), limits.ravel(), strict=True)
        ]
        return torch.tensor(answers, dtype=torch.bool, device=device).reshape(coins.shape)

    def _moved(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A move of elements, made on tensors of element numbers first and then on the coins."""
        held = [one for one in tree_leaves((args, kwargs)) if id(one) in self.coins]
        every = np.concatenate([self.coins[id(one)][1].ravel() for one in held])
        starts = np.cumsum([0, *(one.numel() for one in held)])
        shadows = {
            id(one): torch.arange(start, start + one.numel()).reshape(one.shape)
            for one, start in zip(held, starts.tolist(), strict=False)
        }

        def shadow(one: Any) -> Any:
            if isinstance(one, (tuple, list)):
                return type(one)(shadow(part) for part in one)
            return shadows.get(id(one), one)

        def back(one: Any) -> Any:
            if isinstance(one, (tuple, list)):
                return tuple(back(part) for part in one)
            coins = every[one.cpu().numpy()] if one.ndim else np.array(every[int(one)], dtype=object)
            return self._tensor(coins, torch.empty(one.shape, dtype=held[0].dtype, device=one.device))

        return back(func(*shadow(tuple(args)), **{key: shadow(value) for key, value in kwargs.items()}))

    def _raced(self, weights: Any, noise: torch.Tensor, in_place: bool) -> torch.Tensor:
        where, used = self.noise[id(noise)]
        if not isinstance(weights, torch.Tensor) or self._drawn(weights):
            refuse("torch's division of this by exponential noise")
        # Cloned, because `div_` makes the weights' own tensor the race, which is filled with NaN.
        held = weights.detach().clone().expand(where.shape)
        race = weights if in_place else torch.empty_like(where)
        self._poisoned(race)
        self.races[id(race)] = (race, held, used)
        return race

    def _won(self, race: torch.Tensor, dim: Any, keepdim: bool) -> torch.Tensor:
        """The winner of each race: with E exponential, argmax(w / E) is i with probability w_i / sum(w)."""
        _, weights, used = self.races[id(race)]
        if dim not in (-1, weights.ndim - 1) and not (dim is None and weights.ndim == 1):
            refuse("argmax of a race along another axis than the last")
        # A second race on the same noise would depend on the first; drawing it anew would give another law.
        if any(used):
            refuse("exponential noise used twice")
        used[:] = [True] * len(used)
        won = self._multinomial(weights, 1)
        return won if keepdim else won.squeeze(-1)
