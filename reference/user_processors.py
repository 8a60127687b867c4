"""Custom logits processors: the user's own functions, admitted by name.

A case file must replay a processor, so a processor is known by its name and must be a pure function of a module. Names
in a file import nothing: only a name that the user gave is imported.
"""

import importlib
import sys
import types
from collections.abc import Callable

import numpy as np

from specverify.reference.malformed import Malformed
from specverify.reference.trace import Array

Processor = Callable[[tuple[int, ...], Array], Array]
"""Function from the tokens so far and their logits float64 [V] to new logits [V]."""

FIELD = "sampling.processors"
"""The path of a processor's name in a case."""

_ADMITTED: dict[str, Processor] = {}


class Inadmissible(Malformed):
    """A processor that cannot be imported or cannot be replayed from a case file: the user's error, not the engine's.

    Attributes:
        name: The processor.
        flaw: What is wrong with the processor, without its name.
    """

    def __init__(self, name: str, flaw: str) -> None:
        super().__init__(FIELD, f"{name}: {flaw}")
        self.name = name
        self.flaw = flaw


def admit(name: str, vocab: int = 64) -> None:
    """Import the processor `pkg.module:function`; called only because the user named it.

    Args:
        name: The module's dotted name, a colon, the function's name.
        vocab: Size of the vocabulary on which the processor is tried.

    Raises:
        Inadmissible: The processor cannot be found, cannot be replayed from its name, or fails when tried.
    """
    processor = _import_processor(name)
    _try_out(name, processor, vocab)
    _ADMITTED[name] = processor


def admitted_processor(name: str) -> Processor:
    """The processor of that name if the user has named it; raises Inadmissible otherwise."""
    if name not in _ADMITTED:
        raise Inadmissible(name, f"not admitted; name it with --processor {name}")
    return _ADMITTED[name]


def apply(name: str, tokens: tuple[int, ...], logits: Array) -> Array:
    """The processor's answer to `logits`, which it may not change; raises Inadmissible for an unusable answer."""
    return _answer(name, admitted_processor(name), tokens, logits)


def _error_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _import_processor(name: str) -> Processor:
    """The function of that name, if importing the name elsewhere yields the same function."""
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute.isidentifier()):
        raise Inadmissible(name, "is not of the form pkg.module:function")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a stranger's code: whatever it raises becomes one line
        raise Inadmissible(name, f"cannot import {module_name} ({_error_line(error)})") from error
    if not hasattr(module, attribute):
        raise Inadmissible(name, f"module {module_name} has no {attribute}")
    function = getattr(module, attribute)
    if not isinstance(function, types.FunctionType):
        kind = "a bound method" if isinstance(function, types.MethodType) else f"of type {type(function).__name__}"
        raise Inadmissible(name, f"is {kind}, not a plain function; its state cannot be replayed from a case file")
    if function.__name__ == "<lambda>" or "<locals>" in function.__qualname__ or function.__closure__:
        raise Inadmissible(name, "is a lambda or closure, not a plain function; it cannot be replayed from a case file")
    # A function of a class, or one that its module does not hold under its name: its name would not bring it back.
    if function.__qualname__ != function.__name__ or not hasattr(
        sys.modules.get(function.__module__), function.__name__
    ):
        raise Inadmissible(name, "is no function of a module's own; it cannot be replayed from a case file")
    return function


def _try_out(name: str, processor: Processor, vocab: int) -> None:
    """Raise Inadmissible unless the processor is a pure function on two small inputs."""
    rows = [np.linspace(-3.0, 3.0, vocab), np.cos(np.arange(vocab, dtype=np.float64))]
    contexts = [tuple(token % vocab for token in (0, 1, 2, 1)), (0,)]
    # Two rounds over different inputs: state that the first round leaves behind shows in the second.
    first_answers = [_answer(name, processor, tokens, row) for tokens, row in zip(contexts, rows, strict=True)]
    second_answers = [_answer(name, processor, tokens, row) for tokens, row in zip(contexts, rows, strict=True)]
    if not all(np.array_equal(a, b) for a, b in zip(first_answers, second_answers, strict=True)):
        raise Inadmissible(name, "answers differently when called twice with the same arguments; it cannot be replayed")


def _answer(name: str, processor: Processor, tokens: tuple[int, ...], logits: Array) -> Array:
    """The processor's return value as a fresh float64 [V]; raises Inadmissible where it changes its input."""
    # A copy: the processor may write to its argument, and this is how it shows.
    argument = np.array(logits, dtype=np.float64)
    try:
        result = np.array(processor(tokens, argument), dtype=np.float64)
    except (Exception, SystemExit) as error:
        raise Inadmissible(name, f"raised {_error_line(error)}, on {len(logits)} logits") from error
    if not np.array_equal(argument, logits):
        raise Inadmissible(name, "changes the logits it is given; it must return new ones")
    if result.shape != argument.shape:
        raise Inadmissible(name, f"returns shape {result.shape} for logits of shape {argument.shape}")
    if np.isnan(result).any() or np.isposinf(result).any():
        raise Inadmissible(name, "returns NaN or infinity")
    # A row that arrives without any token is not the processor's doing.
    if np.isneginf(result).all() and not np.isneginf(argument).all():
        raise Inadmissible(name, "leaves no token: every logit that it returns is -inf")
    return result
