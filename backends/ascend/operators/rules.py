"""Rules: the demands of Ascend's operators as data, and the errors of a breach.

Each rule in `rules.json` names its source: a documentation page, a source file or a public report.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Rule:
    """A demand of the contract.

    Attributes:
        id: `operator.rule`, as errors and the probe name the rule.
        operators: The operators that the rule binds, without namespace.
        verdict: `rejects` where the operator refuses a call that breaks the rule, `undefined` where it computes
            something.
        code: The error code of the refusal; None where there is no refusal.
        text: The demand in one sentence.
        source: The document or file that states the demand.
    """

    id: str
    operators: tuple[str, ...]
    verdict: str
    code: int | None
    text: str
    source: str


def _read_rules() -> dict[str, Rule]:
    rows = json.loads((Path(__file__).parent / "rules.json").read_text())
    rules = [Rule(**{**row, "operators": tuple(row["operators"])}) for row in rows]
    return {rule.id: rule for rule in rules}


RULES = _read_rules()
"""The rules by id. Tiling texts change between CANN releases, so code matches an id and takes a text only as a hint."""


class BrokenRule(RuntimeError):
    """A call breaks a rule of the contract; the message is one line and says EMULATED."""

    def __init__(self, rule: str, message: str) -> None:
        self.rule = RULES[rule]
        code = "" if self.rule.code is None else f", error code {self.rule.code}"
        super().__init__(f"EMULATED Ascend {self.kind} ({rule}{code}): {message}")

    kind = "contract"


class AscendContractError(BrokenRule):
    """The operator refuses the call; the text follows the device's host code."""


class AscendUndefinedBehaviour(BrokenRule):
    """The operator takes the call, and the result is undefined."""

    kind = "undefined behaviour"


class NotEmulated(NotImplementedError):
    """The operator has a feature on the device that the emulation does not compute and refuses to guess."""

    def __init__(self, feature: str) -> None:
        super().__init__(f"EMULATED Ascend: {feature} is outside the emulation")


def demand(is_met: bool, rule: str, message: str) -> None:
    """Raise the error of `rule` where `is_met` is false.

    Raises:
        AscendContractError: with the text of the device's refusal.
    """
    if not is_met:
        # A rule whose breach is undefined belongs to `demand_defined`.
        assert RULES[rule].verdict == "rejects", rule
        raise AscendContractError(rule, message)


_KERNEL: ContextVar[bool] = ContextVar("kernel", default=False)
"""Whether undefined calls run as the kernel does instead of raising."""


@contextmanager
def as_the_kernel_does() -> Iterator[None]:
    """Run undefined calls as the published kernel source does, with poison where its behaviour is not known."""
    token = _KERNEL.set(True)
    try:
        yield
    finally:
        _KERNEL.reset(token)


def demand_defined(is_met: bool, rule: str, message: str) -> None:
    """Raise the error of `rule` where `is_met` is false, unless a probe asks for the kernel's behaviour.

    Raises:
        AscendUndefinedBehaviour: with what is known of the result.
    """
    if not is_met:
        assert RULES[rule].verdict == "undefined", rule
        if not _KERNEL.get():
            raise AscendUndefinedBehaviour(rule, message)
