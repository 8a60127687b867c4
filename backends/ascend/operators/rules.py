"""Rules: what the sources of Ascend's operators demand, as data, and what breaking one means."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Rule:
    """One demand.

    Attributes:
        id: `operator.rule`, as errors and the probe name it.
        operators: Operators that it binds, without namespace.
        verdict: `rejects` where the operator refuses a call that breaks it, `undefined` where it computes something.
        code: The error code with which the operator refuses; None where it does not.
        text: The demand in one sentence.
        source: Where it stands.
    """

    id: str
    operators: tuple[str, ...]
    verdict: str
    code: int | None
    text: str
    source: str


def _read() -> dict[str, Rule]:
    rows = json.loads((Path(__file__).parent / "rules.json").read_text())
    rules = [Rule(**{**row, "operators": tuple(row["operators"])}) for row in rows]
    return {rule.id: rule for rule in rules}


RULES = _read()
"""By id. Tiling texts change between CANN releases: match an id, take a text as a hint."""


class BrokenRule(RuntimeError):
    """A call breaks a rule of the contract; the message is one line and says EMULATED."""

    def __init__(self, rule: str, said: str) -> None:
        self.rule = RULES[rule]
        code = "" if self.rule.code is None else f", error code {self.rule.code}"
        super().__init__(f"EMULATED Ascend {self.kind} ({rule}{code}): {said}")

    kind = "contract"


class AscendContractError(BrokenRule):
    """The operator refuses the call; the text is what the device's host code would say."""


class AscendUndefinedBehaviour(BrokenRule):
    """The operator takes the call, and what it returns is not defined."""

    kind = "undefined behaviour"


class NotEmulated(NotImplementedError):
    """The operator has this on the device; the emulation does not, and says so instead of guessing."""

    def __init__(self, what: str) -> None:
        super().__init__(f"EMULATED Ascend: {what} is outside the emulation")


def demand(holds: bool, rule: str, said: str) -> None:
    """Raise the rule's error where `holds` is false.

    Raises:
        AscendContractError: with what the device would say.
    """
    if not holds:
        assert RULES[rule].verdict == "rejects", rule
        raise AscendContractError(rule, said)


_KERNEL: ContextVar[bool] = ContextVar("kernel", default=False)


@contextmanager
def as_the_kernel_does() -> Iterator[None]:
    """Inside, a call whose result is undefined runs as the published kernel source does, poison where none is known."""
    token = _KERNEL.set(True)
    try:
        yield
    finally:
        _KERNEL.reset(token)


def defined(holds: bool, rule: str, said: str) -> None:
    """Raise the rule's error where `holds` is false, unless a probe asks for what the kernel does then.

    Raises:
        AscendUndefinedBehaviour: with what is known of it.
    """
    if not holds:
        assert RULES[rule].verdict == "undefined", rule
        if not _KERNEL.get():
            raise AscendUndefinedBehaviour(rule, said)
