"""Several requests to a server at once, each in a thread of its own.

A request that is cancelled closes its connection, as a client does that goes away.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import sleep
from typing import Any

from specverify.backends.adapt.answers import Answer
from specverify.backends.servers.web import Call, CancelledCall

LONGEST_BEGIN_S = 1.0
"""Most seconds for which the next action waits until a request is on its way."""

Ask = Callable[[Mapping[str, Any], Call], Answer]
"""Asks for one request by its fields; raises CancelledCall where the call was cancelled."""


def ask_together(
    ask: Ask, requests: Sequence[Mapping[str, Any]], actions: Sequence[tuple[str, int]], step_s: float
) -> list[Answer | None]:
    """The answers to requests that are sent and cancelled as `actions` say; None for those that were cancelled.

    Args:
        ask: Asks for one request.
        requests: The fields of each request.
        actions: As `specverify.backends.adapt.batches.BATCH_PARAMETERS` has them; a step is `step_s` of waiting.
        step_s: Seconds in which the server is taken to make a token.

    Raises:
        Unsupported, Unavailable: As `ask`, for the first request that has no answer.
    """
    calls = [Call() for _ in requests]
    answers: list[Future[Answer]] = []
    with ThreadPoolExecutor(len(requests), "request") as threads:
        for kind, number in actions:
            if kind == "add":
                answers.append(threads.submit(ask, requests[number], calls[number]))
                # Requests that are sent at one moment would arrive in any order.
                calls[number].has_begun.wait(LONGEST_BEGIN_S)
                sleep(step_s / 2)
            elif kind == "cancel":
                calls[number].cancel()
                # A server sees a closed connection some time later: the next request finds it gone.
                sleep(step_s)
            else:
                sleep(number * step_s)
    return [_answer_of(answer) for answer in answers]


def _answer_of(answer: Future[Answer]) -> Answer | None:
    try:
        return answer.result()
    except CancelledCall:
        return None
