"""Engines that answer from outside: what one request brought back, as a trace.

A server and a program are asked with the parameters of a black box, and may tell more than tokens: the log-probability
of each, and why the text ended.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specverify.backends.adapt.batches import batch_of, request_of, shared_trace
from specverify.backends.adapt.blackbox import blackbox
from specverify.backends.adapt.models import checkpoint_of
from specverify.backends.base import Declaration
from specverify.reference.case import Case
from specverify.reference.session import CONTINUOUS
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


AskTogether = Callable[[Sequence[Mapping[str, Any]], Sequence[tuple[str, int]]], "list[Answer | None]"]
"""Asks for several requests, each by its parameters, as actions say (`specverify.backends.adapt.batches`); None stands
for the answer of a request that was cancelled."""


class AnsweringBackend:
    """A backend that asks somebody else for each case.

    Attributes:
        declaration: What `parameters` say, as of a black box.

    Args:
        ask: Called with `parameters` by name; returns the answer.
        parameters: Names of `specverify.backends.adapt.blackbox.PARAMETERS`.
        seeded: Whether the engine's draws follow the seed of the request.
        same_bits: Whether the same request again gives the same bits of every log-probability.
        ask_together: Asks for several requests at once; None for an engine that takes one at a time.
        own_seed: Whether a seed gives a request the same tokens whatever requests run beside it.
        facts: Further arguments of `specverify.backends.adapt.blackbox.blackbox`, such as the name.
    """

    def __init__(
        self,
        ask: Callable[..., Answer],
        parameters: Iterable[str],
        *,
        seeded: bool = True,
        same_bits: bool = True,
        ask_together: AskTogether | None = None,
        own_seed: bool = False,
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
        self._parameters = frozenset(parameters)
        self._ask_together = ask_together
        several = ask_together is not None
        self.declaration: Declaration = replace(
            self._box.declaration, seeded=seeded, same_bits=same_bits, sessions=several, continuous=several,
            actions=CONTINUOUS, most_requests=0, own_seed=own_seed,
        )  # fmt: skip

    def run(self, case: Case) -> Trace:
        """Ask for `case`; the answer is one step of the trace.

        Raises:
            Unsupported: The engine cannot be asked for this case.
            Unavailable: The engine is not there any more, or does not answer as it should.
            ProgramFailure: The engine's own process broke.
        """
        if case.session is not None:
            return self._run_batch(case)
        self._box.run(case)
        return trace_of_answer(case, self._answer)

    def _run_batch(self, case: Case) -> Trace:
        """Ask for the requests of a session at once."""
        assert self._ask_together is not None
        batch = batch_of(case)
        requests = []
        for alone in batch.cases:
            fields = vars(request_of(alone)) | {"checkpoint": str(checkpoint_of(alone.model, alone.dtype))}
            requests.append({name: fields[name] for name in self._parameters})
        answers = self._ask_together(requests, batch.actions)
        runs = [
            None if answer is None else trace_of_answer(alone, answer)
            for alone, answer in zip(batch.cases, answers, strict=True)
        ]
        return shared_trace(case, batch, runs)


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
