"""The requests on which each action acts, by hand: the engine plays by this list, and the judge counts steps by it."""

import pytest

from specverify.reference.draft import Scripted
from specverify.reference.session import ACTIONS, BATCHES, Action, Roster


def roster() -> Roster:
    """0 and 1 live, 2 waits evicted, 3 was cancelled, 4 was evicted and cancelled then, and 5 has not entered."""
    filled = Roster(6)
    for number in range(5):
        filled.move("add", number)
    for kind, number in (("evict", 2), ("cancel", 3), ("evict", 4), ("cancel", 4)):
        filled.move(kind, number)
    return filled


ALONE = {
    "add": (5,),
    "cancel": (0, 1, 2),
    "evict": (0, 1),
    "restore": (2,),
    "switch": (0, 1),
    "hand-over": (0, 1),
    "resolve": (0, 1, 2, 3, 4),
}


@pytest.mark.parametrize("kind", sorted(set(ACTIONS) - {"fork", *BATCHES}))
def test_an_action_on_one_request(kind: str) -> None:
    draft = Scripted() if kind == "switch" else None
    admitted = [number for number in range(6) if roster().admitted(Action(kind, (number,), draft))]
    assert tuple(admitted) == ALONE[kind]


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_keeps_its_order_and_loses_who_is_not_there(kind: str) -> None:
    assert roster().admitted(Action(kind, (5, 1, 2, 0, 4))) == (1, 0)
    assert roster().admitted(Action(kind, (3, 4))) == ()


def test_a_fork_has_a_living_source_and_a_twin_that_never_entered() -> None:
    admitted = {
        (source, twin)
        for source in range(6)
        for twin in range(6)
        if source != twin and roster().admitted(Action("fork", (source, twin)))
    }
    assert admitted == {(0, 5), (1, 5)}


def test_who_lives_after_each_move() -> None:
    moved = Roster(3)
    assert moved.living == set()
    lives = []
    for kind, number in (
        ("add", 0), ("fork", 2), ("evict", 0), ("preempt", 2), ("restore", 0), ("hand-over", 0), ("evict", 2),
        ("cancel", 2), ("add", 1), ("cancel", 0),
    ):  # fmt: skip
        moved.move(kind, number)
        lives.append(sorted(moved.living))
    assert lives == [[0], [0, 2], [2], [2], [0, 2], [0, 2], [0], [0], [0, 1], [1]]
    assert moved.entered == {0, 1, 2}
    assert moved.evicted == set(), "a cancelled request does not wait"
