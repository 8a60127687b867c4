"""The journals of a gate's shards as one run."""

from dataclasses import replace

from reports.format import cut
from specverify.campaign.messages import Ended
from specverify.fleet.journal import Head, Journal, Told
from specverify.setup.errors import UnusableInput


def one_head(journals: list[Journal]) -> Head:
    """The head that all journals share, as that of a whole run.

    Raises:
        UnusableInput: Two journals belong to different gates, or hold the same shard.
    """
    first, seen = journals[0], dict[int, Journal]()
    for one in journals:
        number, count = one.head.shard
        if number in seen:
            raise UnusableInput(f"{seen[number].path} and {one.path} are both shard {number}/{count}")
        seen[number] = one
        strange = next((name for name in DECIDING if _of(one.head, name) != _of(first.head, name)), None)
        if strange is not None:
            raise UnusableInput(
                f"{first.path} and {one.path} are parts of different gates: their {DECIDING[strange]} differ"
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


def _of(head: Head, name: str) -> object:
    return head.shard[1] if name == "shards" else getattr(head, name)


def missing(journals: list[Journal]) -> list[str]:
    """One line for each shard of which there is no journal."""
    count, there = journals[0].head.shard[1], {one.head.shard[0] for one in journals}
    return [f"shard {at}/{count} is missing" for at in range(1, count + 1) if at not in there]


def one_run(journals: list[Journal], name: str) -> tuple[Told, int]:
    """The messages on the run `name` of all journals, each worker at a place of its own, and the number of places."""
    united, places = Told(), 0
    ends: list[Ended] = []
    for one in journals:
        shard = "/".join(map(str, one.head.shard))
        told = one.runs.get(name)
        if told is None or told.ended is None:
            why = f"shard {shard} was cut off" if told is not None else f"shard {shard} did not run"
            ends.append(Ended(0.0, 0, (f"{why}: {cut(str(one.path), 120)}",)))
        else:
            ends.append(told.ended)
        if told is not None:
            united.messages += [(places + place, message) for place, message in told.messages]
            places += 1 + max((place for place, _ in told.messages), default=0)
    united.ended = Ended(
        seconds=max(one.seconds for one in ends),
        wanted=sum(one.wanted for one in ends),
        errors=tuple(dict.fromkeys(error for one in ends for error in one.errors)),
        code=next((one.code for one in ends if one.code is not None), None),
        replaced=sum(one.replaced for one in ends),
        interrupted=next((one.interrupted for one in ends if one.interrupted is not None), None),
        late=any(one.late for one in ends),
        exhausted=any(one.exhausted for one in ends),
    )
    return united, max(1, places)
