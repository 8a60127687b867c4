"""The journals of a gate's shards as one run."""

from dataclasses import replace

from specverify.campaign.messages import Ended
from specverify.fleet.journal import Head, Journal, RunMessages
from specverify.reports.format import cut
from specverify.setup.errors import UnusableInput


def one_head(journals: list[Journal]) -> Head:
    """The head that all journals share, as that of a whole run.

    Raises:
        UnusableInput: Two journals belong to different gates, or hold the same shard.
    """
    first = journals[0]
    journal_of_shard = dict[int, Journal]()
    for journal in journals:
        number, count = journal.head.shard
        if number in journal_of_shard:
            raise UnusableInput(f"{journal_of_shard[number].path} and {journal.path} are both shard {number}/{count}")
        journal_of_shard[number] = journal
        strange = next((name for name in DECIDING if _fact_of(journal.head, name) != _fact_of(first.head, name)), None)
        if strange is not None:
            raise UnusableInput(
                f"{first.path} and {journal.path} are parts of different gates: their {DECIDING[strange]} differ"
            )
    return replace(first.head, shard=(1, 1), slices=())


DECIDING = {
    "version": "versions of specverify",
    "seeds": "seeds",
    "fresh": "seeds",
    "shards": "numbers of shards",
    "settings": "profiles or options",
}
"""The facts that the shards of one gate have in common, in words."""


def _fact_of(head: Head, name: str) -> object:
    return head.shard[1] if name == "shards" else getattr(head, name)


def missing(journals: list[Journal]) -> list[str]:
    """One line for each shard of which there is no journal."""
    count, there = journals[0].head.shard[1], {journal.head.shard[0] for journal in journals}
    return [f"shard {number}/{count} is missing" for number in range(1, count + 1) if number not in there]


def one_run(journals: list[Journal], name: str) -> tuple[RunMessages, int]:
    """The messages on the run `name` of all journals, each worker at a place of its own, and the number of places."""
    united = RunMessages()
    places = 0
    ends: list[Ended] = []
    for journal in journals:
        shard = "/".join(map(str, journal.head.shard))
        run = journal.runs.get(name)
        if run is None or run.ended is None:
            why = f"shard {shard} was cut off" if run is not None else f"shard {shard} did not run"
            ends.append(Ended(0.0, 0, (f"{why}: {cut(str(journal.path), 120)}",)))
        else:
            ends.append(run.ended)
        if run is not None:
            united.messages += [(places + place, message) for place, message in run.messages]
            places += 1 + max((place for place, _ in run.messages), default=0)
    united.ended = Ended(
        seconds=max(end.seconds for end in ends),
        wanted=sum(end.wanted for end in ends),
        errors=tuple(dict.fromkeys(error for end in ends for error in end.errors)),
        code=next((end.code for end in ends if end.code is not None), None),
        replaced=sum(end.replaced for end in ends),
        interrupted=next((end.interrupted for end in ends if end.interrupted is not None), None),
        late=any(end.late for end in ends),
        exhausted=any(end.exhausted for end in ends),
    )
    return united, max(1, places)
