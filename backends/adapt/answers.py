"""Engines that answer from outside: what one request brought back, as a trace.

A server and a program are asked with the parameters of a black box, and may tell more than tokens: the log-probability
of each, and why the text ended.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from specverify.backends.adapt.blackbox import blackbox
from specverify.backends.base import Declaration
from specverify.reference.case import Case
from specverify.reference.trace import Emitted, Speculated, Step, Trace


@dataclass(frozen=True)
class Answer:
    """The answer to one request.

    Attributes:
        tokens: The generated token ids, the ending token included.
        logprobs: The log-probability of each token under the target's unprocessed logits, or None if not told.
        finish: Why the text ended: `stop` for an ending token, `length`, or None if not told.
        speculated: Counts of drafted tokens, or None if not told.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    finish: str | None = None
    speculated: Speculated | None = None


class AnsweringBackend:
    """A backend that asks somebody else for each case.

    Attributes:
        declaration: What `parameters` say, as of a black box.

    Args:
        ask: Called with `parameters` by name; returns the answer.
        parameters: Names of `specverify.backends.adapt.blackbox.PARAMETERS`.
        seeded: Whether the engine's draws follow the seed of the request.
        same_bits: Whether the same request again gives the same bits of every log-probability.
        facts: Further arguments of `specverify.backends.adapt.blackbox.blackbox`, such as the name.
    """

    def __init__(
        self,
        ask: Callable[..., Answer],
        parameters: Iterable[str],
        *,
        seeded: bool = True,
        same_bits: bool = True,
        **facts: Any,
    ) -> None:
        def generate(**arguments: Any) -> tuple[int, ...]:
            self._answer = ask(**arguments)
            return self._answer.tokens

        # The parameters of a black box are read from its signature.
        signature_parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in parameters]
        generate.__signature__ = inspect.Signature(signature_parameters)  # type: ignore[attr-defined]
        self._box = blackbox(generate, **facts)()
        self._answer = Answer(())
        self.declaration: Declaration = replace(self._box.declaration, seeded=seeded, same_bits=same_bits)

    def run(self, case: Case) -> Trace:
        """Ask for `case`; the answer is one step of the trace.

        Raises:
            Unsupported: The engine cannot be asked for this case.
            Unavailable: The engine is not there any more, or does not answer as it should.
            ProgramFailure: The engine's own process broke.
        """
        self._box.run(case)
        return trace_of_answer(case, self._answer)


def trace_of_answer(case: Case, answer: Answer) -> Trace:
    """The trace of one answer: one step that holds all tokens, stage `emitted` alone."""
    finish = _finish(case, answer)
    step = Step(case.prefix, emitted=Emitted(answer.tokens, finish, answer.logprobs))
    return Trace((step,), answer.tokens, finish, speculated=answer.speculated)


def _finish(case: Case, answer: Answer) -> str:
    """Why the output ended, in the words of a trace.

    An answer whose last token ends no text ended by length, or by a stop that the case does not name. Either way too
    few tokens are a difference, since the case's own limits give no such end.
    """
    last = answer.tokens[-1] if answer.tokens else None
    if last in case.stops.eos:
        return "eos"
    if last in case.stops.stop_tokens or answer.finish == "stop":
        return "stop"
    return "length"
