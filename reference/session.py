"""Session: requests that share one engine, and what is done to them, action by action."""

from dataclasses import dataclass, field

from reference.draft import Draft, Scripted
from reference.malformed import Malformed
from reference.rules import OMIT_DEFAULT
from reference.sampling import Sampling, Stops

ACTIONS = {
    "add": "the request enters and is prefilled",
    "step": "the requests named, in this order of the batch, take one speculative step in one forward",
    "preempt": "the requests named are drafted, then thrown back before the verify forward",
    "cancel": "the request ends here, whatever it has emitted",
    "evict": "the request loses its keys and values, and waits",
    "restore": "an evicted request is prefilled again with all its tokens",
    "fork": "request[1] enters: its prompt is all tokens of request[0] so far, then its own; they share that prefix",
    "switch": "the request drafts by `draft` from now on",
}
"""Every action, with what it does. A request that met a stop is over: its pages go back, it can take no step."""


@dataclass(frozen=True)
class Mate:
    """Another request of the session; its fields mean what they mean in a Case."""

    prompt: tuple[int, ...]
    draft: Draft = Scripted()
    sampling: Sampling = Sampling()
    stops: Stops = Stops()


@dataclass(frozen=True)
class Action:
    """One thing that happens.

    Attributes:
        kind: One of ACTIONS.
        requests: Numbers of the requests it happens to; 0 is the case's own, n the n-th mate.
        draft: For `switch`.
    """

    kind: str
    requests: tuple[int, ...]
    draft: Draft | None = field(default=None, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        if self.kind not in ACTIONS:
            raise Malformed("kind", f"{self.kind!r} is none of {', '.join(ACTIONS)}")
        if len(set(self.requests)) < len(self.requests):
            raise Malformed("requests", "a request is named twice")
        wanted = {"fork": 2, "step": None, "preempt": None}.get(self.kind, 1)
        if not self.requests or (wanted is not None and len(self.requests) != wanted):
            raise Malformed("requests", f"{self.kind} takes {wanted or 'at least one'}, not {len(self.requests)}")
        if (self.kind == "switch") != (self.draft is not None):
            raise Malformed("draft", "belongs to switch, and switch needs it")


@dataclass(frozen=True)
class Session:
    """The other requests, and the actions in order; nothing happens but what they say."""

    mates: tuple[Mate, ...] = ()
    actions: tuple[Action, ...] = ()

    def __post_init__(self) -> None:
        for at, action in enumerate(self.actions):
            for request in action.requests:
                if not 0 <= request <= len(self.mates):
                    raise Malformed(f"actions[{at}].requests", f"request {request} is none of {len(self.mates) + 1}")


@dataclass(frozen=True)
class Account:
    """Pages after an action.

    Attributes:
        free: Free pages.
        total: All pages.
        tables: The block table of each living request, by number.
        kept: Pages that the prefix cache holds.
        committed: Committed columns of each living request.
        allocated: Columns that each block table has room for.
    """

    free: tuple[int, ...]
    total: int
    tables: dict[int, tuple[int, ...]]
    kept: tuple[int, ...]
    committed: dict[int, int]
    allocated: dict[int, int]
