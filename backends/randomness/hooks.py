"""Hooks on the draws of torch, NumPy and `random`: each draw becomes a `Call` that a handler answers.

`random.Random` has hooks on its class, so that every object of it is watched, whenever it was made. NumPy's classes
take none: the names `default_rng`, `Generator` and `RandomState` give subclasses with hooks while a hook is set, and
their objects stay so. A name that a module imported before, and a generator of NumPy that it made, are replaced in the
module while a hook is set. An older generator of NumPy that stands elsewhere, such as in an object, is not watched.
torch's calls pass through a `TorchFunctionMode`, which sees the calls of its own thread.
"""

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from specverify.backends.randomness.positions import default_generator

# fmt: off
TORCH_DRAWS = frozenset((
    "rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "normal", "normal_", "bernoulli",
    "bernoulli_", "uniform_", "exponential_", "random_", "log_normal_", "cauchy_", "geometric_", "poisson", "binomial",
    "multinomial", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "rrelu",
    "gumbel_softmax",
))
"""The functions and methods of torch that draw."""
# fmt: on

TRAINING = frozenset(name for name in TORCH_DRAWS if "dropout" in name or name == "rrelu")
"""The functions among them that draw in training alone."""

NUMPY_QUESTIONS = ("get_state", "set_state", "seed", "bit_generator", "spawn")
"""Public methods of NumPy's generators that draw nothing."""


@dataclass(frozen=True)
class Call:
    """Draw that is about to be made.

    Attributes:
        library: torch, numpy or random.
        method: The name of the function: rand, choice, random.
        generator: The generator from which it draws.
        args: Its arguments, without `self` for a method of a generator.
        kwargs: Its named arguments.
        make: Draws, and returns the result.
    """

    library: str
    method: str
    generator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    make: Callable[[], Any]

    @property
    def name(self) -> str:
        """The function as people write it: `torch.rand`, `numpy.random.choice`."""
        module = "numpy.random" if self.library == "numpy" else self.library
        return f"{module}.{'randrange' if self.method == '_randbelow' else self.method}"


UNSEARCHED_PACKAGES = ("numpy", "scipy", "torch", "random", "hypothesis")
"""Packages whose own names stay as they are."""

Handler = Callable[[Call], Any]
"""Answers a draw with its result, or with something in its place."""


class _Active(threading.local):
    """The handlers of this thread, the innermost last."""

    def __init__(self) -> None:
        self.handlers: list[Handler] = []
        self.busy = False


_active = _Active()


def _answer(library: str, method: str, generator: Any, args: Any, kwargs: Any, make: Callable[[], Any]) -> Any:
    """Let the innermost handler answer; draws inside a draw, and draws without a handler, are made."""
    if _active.busy or not _active.handlers:
        return make()

    def make_alone() -> Any:
        _active.busy = True
        try:
            return make()
        finally:
            _active.busy = False

    return _active.handlers[-1](Call(library, method, generator, tuple(args), dict(kwargs), make_alone))


class _SameKind(type):
    """The class of a class with hooks, of which the unhooked class's objects are instances too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.__mro__[1])


def _with_hook(parent: Any, method: str) -> Callable[..., Any]:
    plain = getattr(parent, method)

    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _answer("numpy", method, self, args, kwargs, lambda: plain(self, *args, **kwargs))

    hooked.__name__ = method
    return hooked


def _drawing_methods(kind: Any) -> list[str]:
    public = [name for name in dir(kind) if not name.startswith("_") and name not in NUMPY_QUESTIONS]
    return [name for name in public if callable(getattr(kind, name))]


class HookedGenerator(np.random.Generator, metaclass=_SameKind):
    """`numpy.random.Generator` with a hook on every draw."""

    def __reduce__(self) -> Any:
        """Copies have hooks too."""
        return HookedGenerator, (self.bit_generator,)


class HookedRandomState(np.random.RandomState, metaclass=_SameKind):
    """`numpy.random.RandomState` with a hook on every draw."""

    def __reduce__(self) -> Any:
        """Copies have hooks too."""
        return HookedRandomState, (self._bit_generator,)


for _kind in (HookedGenerator, HookedRandomState):
    for _name in _drawing_methods(_kind.__mro__[1]):
        setattr(_kind, _name, _with_hook(_kind.__mro__[1], _name))

_default_rng = np.random.default_rng


def _hooked_default_rng(seed: Any = None) -> np.random.Generator:
    """`numpy.random.default_rng`, whose generators have hooks."""
    if isinstance(seed, HookedGenerator):
        return seed
    plain = _default_rng(seed)
    return HookedGenerator(plain.bit_generator)


def _hooked_random(method: str) -> Callable[..., Any]:
    plain = getattr(random.Random, method)

    def hooked(self: random.Random, *args: Any, **kwargs: Any) -> Any:
        return _answer("random", method, self, args, kwargs, lambda: plain(self, *args, **kwargs))

    hooked.__name__ = method
    return hooked


@contextmanager
def names_replaced(names: dict[tuple[Any, str], Any]) -> Iterator[None]:
    """Each (object, attribute) has the value that `names` gives it, inside the `with`."""
    absent = object()
    # An inherited attribute is taken away afterwards, so that it is inherited again.
    before = {name: vars(name[0]).get(name[1], absent) for name in names}
    try:
        for (holder, attribute), value in names.items():
            setattr(holder, attribute, value)
        yield
    finally:
        for (holder, attribute), value in before.items():
            if value is absent:
                delattr(holder, attribute)
            else:
                setattr(holder, attribute, value)


def hooked_names() -> dict[tuple[Any, str], Any]:
    """The names of NumPy and `random` that give draws with hooks, with their values.

    The whole of `random` draws by two methods of `Random`, and by their bound copies in the module.
    """
    names: dict[tuple[Any, str], Any] = {
        (np.random, "default_rng"): _hooked_default_rng,
        (np.random, "Generator"): HookedGenerator,
        (np.random, "RandomState"): HookedRandomState,
    }
    for method in ("random", "getrandbits", "_randbelow"):
        names[random.Random, method] = _hooked_random(method)
    hidden = default_generator("random")
    for method in ("random", "getrandbits"):
        hook = names[random.Random, method]
        names[random, method] = lambda *args, hook=hook: hook(hidden, *args)
    legacy = default_generator("numpy")
    for name in dir(np.random):
        plain = getattr(np.random, name)
        # The module's functions are bound methods of one hidden generator.
        if getattr(plain, "__self__", None) is legacy and name not in NUMPY_QUESTIONS:
            names[np.random, name] = _hooked_function(legacy, name, plain)
    return names


def names_in_modules(replacements: dict[tuple[Any, str], Any]) -> dict[tuple[Any, str], Any]:
    """The names under which other modules hold what is watched, with their values."""
    watchers = {id(vars(holder)[name]): value for (holder, name), value in replacements.items() if name in vars(holder)}
    names: dict[tuple[Any, str], Any] = {}
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.split(".")[0] in UNSEARCHED_PACKAGES:
            continue
        if module.__name__ == __name__:
            continue
        for name, value in list(vars(module).items()):
            if id(value) in watchers:
                names[module, name] = watchers[id(value)]
            elif type(value) is np.random.Generator:
                names[module, name] = HookedGenerator(value.bit_generator)
            elif type(value) is np.random.RandomState:
                names[module, name] = HookedRandomState(value._bit_generator)
    return names


def _hooked_function(generator: Any, method: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return _answer("numpy", method, generator, args, kwargs, lambda: plain(*args, **kwargs))

    hooked.__name__ = method
    return hooked


@contextmanager
def hooks(handler: Handler) -> Iterator[None]:
    """Every draw of NumPy and `random` is answered by `handler` inside the `with`; torch's by `TorchHooks`."""
    replacements = hooked_names()
    with names_replaced({**names_in_modules(replacements), **replacements}):
        _active.handlers.append(handler)
        try:
            yield
        finally:
            _active.handlers.pop()


class TorchHooks(TorchFunctionMode):
    """Every draw of torch is answered by a handler."""

    def __init__(self, handler: Handler) -> None:
        super().__init__()
        self._handler = handler

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer one torch call; `types` is not used."""
        kwargs = kwargs or {}
        method = str(getattr(func, "__name__", func))
        if method not in TORCH_DRAWS or (method in TRAINING and not draws_in_training(args, kwargs)):
            return func(*args, **kwargs)
        generator = generator_of_call(args, kwargs)
        return self._handler(Call("torch", method, generator, args, kwargs, lambda: func(*args, **kwargs)))


def draws_in_training(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a dropout is in training: its third argument, true by default."""
    return bool(kwargs.get("training", args[2] if len(args) > 2 else True))


def generator_of_call(args: Any, kwargs: Any) -> torch.Generator:
    """The generator from which a call of torch draws: the one named, or the default one of its device."""
    leaves = tree_leaves((args, kwargs))
    generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
    if generators:
        return generators[0]
    devices = [torch.device(kwargs["device"])] if kwargs.get("device") is not None else []
    devices += [leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)]
    device = devices[0] if devices else torch.get_default_device()
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator
