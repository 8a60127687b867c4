"""Which functions of an engine a run enters, and which of them a fault replaces.

An engine computes the same twice. A fault none of whose replaced functions is entered by the clean run of a case leaves
that run as it is: its own run needs no computing. This is how mutation testers choose tests by coverage (PIT, mutmut).
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, TypeVar

Result = TypeVar("Result")

OF_THE_CLASS_STATEMENT = frozenset(
    {
        "__abstractmethods__",
        "__annotations__",
        "__dataclass_fields__",
        "__dataclass_params__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__match_args__",
        "__module__",
        "__orig_bases__",
        "__parameters__",
        "__qualname__",
        "__slots__",
        "__static_attributes__",
        "__weakref__",
        "_abc_impl",
    }
)
"""Names that every class statement or decorator writes anew; no engine's step reads them."""


class NotAFunction(Exception):
    """The replaced part is no Python function: whether a run reads it cannot be seen."""


def entered_in(run: Callable[[], Result]) -> tuple[Result, frozenset[CodeType]]:
    """The result of `run`, and the code of every Python function entered meanwhile by this thread or a thread of `run`.

    Functions that another process enters are not seen.
    """
    entered: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            entered.add(frame.f_code)

    before, before_in_threads = sys.getprofile(), threading.getprofile()
    sys.setprofile(note)
    threading.setprofile(note)  # ranks may be threads
    try:
        result = run()
    finally:
        sys.setprofile(before)
        threading.setprofile(before_in_threads)
    return result, frozenset(entered)


def replaced_functions(clean: object, planted: object) -> frozenset[CodeType] | None:
    """The code of the clean functions in whose place `planted` has others, from field to field of their seams.

    It is None where something else than a function is replaced, such as an attribute of a class.
    """
    try:
        return frozenset(_replaced(clean, planted))
    except NotAFunction:
        return None


def _replaced(clean: Any, planted: Any) -> Iterator[CodeType]:
    if clean is planted:
        return
    if isinstance(clean, type):
        yield from _replaced_of_class(clean, planted)
    elif is_dataclass(clean) and type(clean) is type(planted):
        for field in fields(clean):
            yield from _replaced(getattr(clean, field.name), getattr(planted, field.name))
    elif type(clean) is type(planted) and clean == planted:
        return
    elif inspect.isroutine(clean) or isinstance(clean, partial):
        yield _code_of(clean)
    elif vars_of(clean) == vars_of(planted):
        yield from _replaced_of_class(type(clean), type(planted))
    else:
        raise NotAFunction


def vars_of(instance: object) -> dict[str, Any]:
    """The attributes of an instance; none for one without a dictionary."""
    return dict(getattr(instance, "__dict__", {}))


def _replaced_of_class(clean: type, planted: Any) -> Iterator[CodeType]:
    """The functions of `clean` that an instance of `planted` does not have; its making if `planted` is no class."""
    if not isinstance(planted, type):
        yield _code_of(inspect.getattr_static(clean, "__init__"))
        return
    names = {name for kind in (*clean.__mro__, *planted.__mro__) if kind is not object for name in vars(kind)}
    absent = object()
    for name in sorted(names - OF_THE_CLASS_STATEMENT):
        right, wrong = (inspect.getattr_static(kind, name, absent) for kind in (clean, planted))
        if right is wrong:
            continue
        if right is absent and not name.startswith("__") and _is_function(wrong):
            continue  # a new function is entered from a replaced one alone
        if not _is_function(right):
            raise NotAFunction
        yield _code_of(right)


def _is_function(attribute: Any) -> bool:
    if isinstance(attribute, property):
        return attribute.fset is None and attribute.fget is not None
    return isinstance(attribute, (FunctionType, staticmethod, classmethod))


def _code_of(routine: Any) -> CodeType:
    """The code that is entered whenever `routine` runs.

    Raises:
        NotAFunction: None is, or not each time: a function in C, or one whose results are remembered.
    """
    while not isinstance(routine, FunctionType):
        if isinstance(routine, partial):
            routine = routine.func
        elif isinstance(routine, property):
            routine = routine.fget
        elif isinstance(routine, (staticmethod, classmethod, MethodType)):
            routine = routine.__func__
        else:
            raise NotAFunction
    return routine.__code__
