"""Engines as arguments: a name, or a Python object that is a backend, opens one, or generates tokens."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from specverify.backends.base import Backend
from specverify.isolation.here import offered
from specverify.reports.format import cut
from specverify.setup.errors import UnusableInput

Engine = str | Callable[..., Any] | Backend
"""A backend's name; or a factory, a function from a prompt to tokens (`specverify.adapt.blackbox`), or a backend."""


@contextmanager
def named(engine: Engine) -> Iterator[str]:
    """Inside the `with`, the name of `engine`.

    A factory that a module holds is named `module:attribute`, and opened in a process of its own, like every engine
    that has a name. Another object runs in this process.

    Raises:
        UnusableInput: It is none of the three.
    """
    if isinstance(engine, str):
        yield engine
        return
    if not callable(engine) and not isinstance(engine, Backend):
        forms = "give a name, a factory, a function from a prompt to tokens, or a backend"
        raise UnusableInput(f"{cut(repr(engine), 60)} is no engine: {forms}")
    place = None if _generates(engine) else importable_name(engine)
    if place is not None:
        yield place
        return
    with offered(_label(engine), _factory_of(engine)) as name:
        yield name


def _factory_of(engine: Callable[..., Any] | Backend) -> Callable[[], Backend]:
    """The factory of the backend that `engine` stands for."""
    if isinstance(engine, Backend):
        return lambda: engine
    if _generates(engine):
        from specverify.backends.adapt import blackbox

        return blackbox(engine)
    return engine


def _generates(engine: object) -> bool:
    """Whether `engine` is a function from a prompt to tokens: it has the parameter that all of them have."""
    if not callable(engine) or isinstance(engine, Backend):
        return False
    try:
        return "prompt_ids" in inspect.signature(engine).parameters
    except (TypeError, ValueError):  # a built-in without a signature
        return False


def _label(engine: object) -> str:
    declaration = getattr(engine, "declaration", None)
    name = getattr(declaration, "name", None) or getattr(engine, "__name__", None) or type(engine).__name__
    return "engine" if name == "<lambda>" else str(name)


def importable_name(engine: object) -> str | None:
    """`module:attribute` under which another process imports the same object; None where there is no such name."""
    for module_name, module in list(sys.modules.items()):
        if module_name == "__main__" or not isinstance(module, ModuleType):
            continue
        # A module that looks its attributes up when asked is not searched: looking would import what it offers.
        attribute = next((name for name, value in vars(module).items() if value is engine), None)
        if attribute is not None and _is_importable(module_name, module):
            return f"{module_name}:{attribute}"
    return None


def _is_importable(name: str, module: ModuleType) -> bool:
    """Whether importing `name` again would read the file of `module`; one that a test runner made may have none."""
    file = getattr(module, "__file__", None)
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return False
    return file is not None and spec is not None and spec.origin == file
