"""Sampling on tables by all ranks together, each with its part of a row."""

from collections.abc import Callable

from specverify.backends.engine.collectives.group import Group
from specverify.backends.engine.ranks.in_step import sampling_in_step
from specverify.backends.engine.ranks.threads import Meeting
from specverify.backends.engine.sampling.rounds import Tables
from specverify.backends.engine.sampling.seams import SamplingSeams
from specverify.reference.probability_world import Blocks


def on_ranks(device: str, seams: SamplingSeams, ranks: int, ask: Callable[[Tables], Blocks]) -> Blocks:
    """The blocks that rank 0 of `ranks` makes when all of them answer `ask`."""

    def answer(group: Group) -> Blocks:
        return ask(Tables(device, lambda: sampling_in_step(seams, group)))

    outcomes = Meeting(ranks).run(answer)
    error = next((outcome.error for outcome in outcomes if outcome.error is not None), None)
    if error is not None:
        raise error
    return outcomes[0].value
