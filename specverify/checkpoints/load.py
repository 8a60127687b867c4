"""Requests under load: sessions for an engine that batches by itself, such as a server.

Requests arrive one after the other, share prefixes, are long or short, and are cancelled while others run, all drawn by
the run's seed.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from specverify.reference.case import Case
from specverify.reference.malformed import Malformed
from specverify.reference.session import Action, Mate, Session
from specverify.setup.errors import UnusableInput

PAUSES = (0, 0, 1, 2, 4, 8)
"""Steps between two arrivals; at 0 they come together."""

LENGTHS = (1.0, 1.0, 0.5, 0.125)
"""The room of a request, as shares of the case's own."""

CANCELLED, SHARED, ENDED, GREEDY = 6, 3, 3, 3
"""One request in so many is cancelled, begins as another, ends at a token of its own, or is greedy among others."""

SEEDS = 2**31 - 1
"""Seeds are below this number, which every server takes."""


def cases_under_load(cases: Sequence[Case], concurrency: Sequence[int], seed: int, own_stops: bool) -> list[Case]:
    """Each case alone where `concurrency` names 1, and sessions of so many requests for each other number.

    Args:
        cases: A case for each prompt.
        concurrency: Numbers of requests that run beside each other.
        seed: The seed of the run.
        own_stops: Whether a request may name tokens that end it.

    Raises:
        UnusableInput: Requests side by side are no case on this model.
    """
    loaded: list[Case] = []
    for size in concurrency:
        if size == 1:
            loaded += cases
            continue
        rng = np.random.default_rng([seed, size])
        for first in range(0, len(cases), size):
            # The last session is as large as the others.
            group = [cases[(first + number) % len(cases)] for number in range(size)]
            try:
                loaded.append(_session(group, rng, own_stops))
            except Malformed as why:
                raise UnusableInput(f"--concurrency {size}: prompts from {first + 1} on: {why}") from None
    return loaded


def _session(group: Sequence[Case], rng: np.random.Generator, own_stops: bool) -> Case:
    """The cases of `group` as the requests of one session."""
    requests: list[Case] = []
    for case in group:
        requests.append(_request(case, requests, rng, own_stops))
    first, *others = requests
    mates = tuple(Mate(case.prompt, case.draft, case.sampling, case.stops) for case in others)
    return replace(first, steps=0, session=Session(mates, _arrivals(len(requests), rng), continuous=True))


def _request(case: Case, earlier: Sequence[Case], rng: np.random.Generator, own_stops: bool) -> Case:
    """The case with a length, a seed, perhaps a prefix of an earlier request, and perhaps an end of its own."""
    prompt = case.prompt
    if earlier and not rng.integers(SHARED):
        other = earlier[int(rng.integers(len(earlier)))].prompt
        length = int(rng.integers(1, max(2, min(len(other), len(prompt)))))
        prompt = (*other[:length], *prompt[length:])
    room = max(1, int(case.stops.max_new_tokens * LENGTHS[int(rng.integers(len(LENGTHS)))]))
    ends = (prompt[int(rng.integers(len(prompt)))],) if own_stops and not rng.integers(ENDED) else ()
    sampling = replace(case.sampling, seed=0 if case.sampling.greedy else int(rng.integers(SEEDS)))
    if earlier and not sampling.greedy and not rng.integers(GREEDY):
        sampling = replace(sampling, temperature=0.0, seed=0)
    stops = replace(case.stops, max_new_tokens=room, stop_tokens=ends)
    return replace(case, prompt=prompt, sampling=sampling, stops=stops)


def _arrivals(count: int, rng: np.random.Generator) -> tuple[Action, ...]:
    """Actions by which `count` requests arrive in their order, and some are cancelled while others run."""
    actions: list[Action] = []
    inside: list[int] = []
    for number in range(count):
        if inside:
            actions += [Action("step", tuple(inside))] * int(rng.choice(PAUSES))
        actions.append(Action("add", (number,)))
        inside.append(number)
        if len(inside) > 1 and not rng.integers(CANCELLED):
            actions += [Action("step", tuple(inside))] * int(rng.choice(PAUSES))
            actions.append(Action("cancel", (inside.pop(int(rng.integers(len(inside)))),)))
    return tuple(actions)
