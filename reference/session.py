"""Session: several requests that share one engine, and the actions on them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from specverify.reference.adapters import Adapter
from specverify.reference.draft import Draft, Scripted
from specverify.reference.images import Images
from specverify.reference.malformed import Malformed
from specverify.reference.rules import OMIT_DEFAULT
from specverify.reference.sampling import Sampling, Stops

ACTIONS = {
    "add": "the request enters and is prefilled",
    "step": "the requests named, in this order of the batch, take one speculative step in one forward",
    "preempt": "the requests named are drafted, then thrown back before the verify forward",
    "cancel": "the request ends here, whatever it has emitted",
    "evict": "the request loses its keys and values, and waits",
    "restore": "an evicted request is prefilled again with all its tokens",
    "fork": "request[1] enters: its prompt is all tokens of request[0] so far, then its own; they share that prefix",
    "switch": "the request drafts by `draft` from now on, unless it might then outgrow the pool of pages",
    "hand-over": "the request leaves as a packet of bytes for another server, and goes on there",
    "first": "the requests named take a step without a draft: a first token does not wait for the draft's prefill",
    "launch": "the requests named take a step in one forward, whose results stay on the device",
    "resolve": "the host takes the results of launched steps in their order, up to the oldest of the request named",
}
"""Every action and its effect. A request that met a stop is over: its pages are freed, and it takes no more steps.

Between `launch` and `resolve` the host knows neither the tokens nor how many they are. At most two launched steps of a
request are in flight: the oldest are resolved before a third. A step that is not launched, a fork and a switch read
texts, so that everything in flight is resolved before them. Results that are in flight when their request is evicted
never count: the steps are taken again after it is restored.
"""

OVERLAPPED = ("launch", "resolve")
"""Actions of a server that runs a step ahead of its host; an engine without them is asked for none."""

BATCHES = ("step", "preempt", "first", "launch")
"""Actions that name a batch: one request or more, in this order."""

CONTINUOUS = ("add", "step", "cancel")
"""Actions of a session that its engine batches by itself (`Session.continuous`)."""

EARLY = ("first", "hand-over", *OVERLAPPED)
"""Actions that an engine does not know unless it says so."""


@dataclass(frozen=True)
class Mate:
    """Another request of the session; its fields mean the same as in a Case.

    `adapter` and `images` take the place of those of the case's model; a fork's twin has the images of its source in
    front of them.
    """

    prompt: tuple[int, ...]
    draft: Draft = Scripted()
    sampling: Sampling = Sampling()
    stops: Stops = Stops()
    adapter: Adapter | None = field(default=None, metadata=OMIT_DEFAULT)
    images: Images = field(default=(), metadata=OMIT_DEFAULT)


@dataclass(frozen=True)
class Action:
    """One action on requests of the session.

    Attributes:
        kind: One of ACTIONS.
        requests: Numbers of the requests that the action is about; 0 is the case's own request, n the n-th mate.
        draft: The new draft, for `switch`.
        bare: For `step` and `launch`, those of the requests whose drafts are not asked: they take the step with the
            root alone, beside drafted trees of the others. An engine does so where its batch grows too large, a budget
            is spent, or a proposer gives nothing (vLLM, SGLang, TensorRT-LLM: a draft length of 0).
    """

    kind: str
    requests: tuple[int, ...]
    draft: Draft | None = field(default=None, metadata=OMIT_DEFAULT)
    bare: tuple[int, ...] = field(default=(), metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        if self.kind not in ACTIONS:
            raise Malformed("kind", f"{self.kind!r} is none of {', '.join(ACTIONS)}")
        # One action takes one batch, in which a request has one lane.
        if len(set(self.requests)) < len(self.requests):
            raise Malformed("requests", "a request is named twice")
        # None stands for any number from one upwards.
        count = {"fork": 2, **dict.fromkeys(BATCHES)}.get(self.kind, 1)
        if not self.requests or (count is not None and len(self.requests) != count):
            raise Malformed("requests", f"{self.kind} takes {count or 'at least one'}, not {len(self.requests)}")
        # Both ways at once: a switch without a draft, and a draft without a switch.
        if (self.kind == "switch") != (self.draft is not None):
            raise Malformed("draft", "belongs to switch, and switch needs it")
        if self.bare and self.kind not in ("step", "launch"):
            raise Malformed("bare", f"belongs to step and launch, not to {self.kind}")
        if len(set(self.bare)) < len(self.bare) or not {*self.bare} <= {*self.requests}:
            raise Malformed("bare", "names each request at most once, and none that the action does not name")

    @property
    def undrafted(self) -> frozenset[int]:
        """The requests of a batch whose drafts are not asked."""
        return frozenset(self.requests if self.kind == "first" else self.bare)

    def among(self, new_number: Mapping[int, int]) -> "Action | None":
        """The action on those of its requests that have a new number, by that number; None where none has."""
        requests = tuple(new_number[number] for number in self.requests if number in new_number)
        bare = tuple(new_number[number] for number in self.bare if number in new_number)
        return replace(self, requests=requests, bare=bare) if requests else None


@dataclass(frozen=True)
class Session:
    """The other requests, and the actions in order; nothing happens beyond these actions.

    Attributes:
        mates: The other requests.
        actions: The actions, each one of CONTINUOUS where the engine batches by itself.
        continuous: Whether the engine batches by itself, as servers do (continuous batching). A step is then one of all
            requests inside, whatever requests it names, and behind the last action every request that was not
            cancelled runs to its end.
        setting: The setting in which such an engine is opened, one that it declares; empty for the one in which single
            requests run.
    """

    mates: tuple[Mate, ...] = ()
    actions: tuple[Action, ...] = ()
    continuous: bool = field(default=False, metadata=OMIT_DEFAULT)
    setting: str = field(default="", metadata=OMIT_DEFAULT)

    @property
    def early(self) -> bool:
        """Whether a step is taken before its draft or its predecessor is ready."""
        return any(action.kind == "launch" or action.undrafted for action in self.actions)

    @property
    def overlapped(self) -> bool:
        """Whether steps are launched before the results of earlier ones are known."""
        return any(action.kind == "launch" for action in self.actions)

    def __post_init__(self) -> None:
        if self.setting and not self.continuous:
            raise Malformed("setting", f"{self.setting!r} belongs to an engine that batches by itself")
        for i, action in enumerate(self.actions):
            if self.continuous and action.kind not in CONTINUOUS:
                raise Malformed(f"actions[{i}].kind", f"{action.kind} is no action of an engine that batches by itself")
            for request in action.requests:
                if not 0 <= request <= len(self.mates):
                    raise Malformed(f"actions[{i}].requests", f"request {request} is none of {len(self.mates) + 1}")


@dataclass
class Roster:
    """The requests of a session on the way through its actions: ACTIONS replayed on numbers alone.

    A player moves those of the admitted requests that find room. That a request met a stop, only its trace says.

    Attributes:
        size: The number of requests, the case's own included.
        entered: Requests that have entered, whatever became of them.
        evicted: Requests that wait to be restored.
        ended: Requests that were cancelled, or that their player knows to be over.
    """

    size: int
    entered: set[int] = field(default_factory=set)
    evicted: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)

    @property
    def living(self) -> set[int]:
        """Requests that can take a step."""
        return self.entered - self.ended - self.evicted

    def admitted(self, action: Action) -> tuple[int, ...]:
        """The requests of `action` on which it acts, in its order; of a fork both or none."""
        living = self.living
        entering = set(range(self.size)) - self.entered
        if action.kind == "fork":
            source, twin = action.requests
            return action.requests if source in living and twin in entering else ()
        numbers_by_kind = {
            "add": entering,
            "restore": self.evicted,
            "cancel": living | self.evicted,
            "resolve": self.entered,
        }
        admits = numbers_by_kind.get(action.kind, living)
        return tuple(number for number in action.requests if number in admits)

    def play(self, action: Action) -> tuple[int, ...]:
        """Note what `action`, of any kind but a fork, makes of the requests that it admits; these requests."""
        admitted_requests = self.admitted(action)
        for number in admitted_requests:
            self.move(action.kind, number)
        return admitted_requests

    def move(self, kind: str, number: int) -> None:
        """Note what an action of this kind made of a request that it admitted; a fork moves its twin."""
        if kind in ("add", "fork"):
            self.entered.add(number)
        elif kind == "evict":
            self.evicted.add(number)
        elif kind in ("restore", "cancel"):
            self.evicted.discard(number)
        if kind == "cancel":
            self.ended.add(number)


@dataclass(frozen=True)
class Account:
    """The state of the page pool, and of the slots of recurrent states, after an action.

    Attributes:
        free: Free pages.
        total: Number of all pages.
        tables: The block table of each living request, by number.
        kept: Pages that the prefix cache holds.
        committed: Number of committed columns of each living request.
        allocated: Number of columns that each block table has room for.
        stored: Number of pages of which the second tier of the prefix cache holds a copy.
        brought: Pages to which the second tier brought copies back in this action.
        draft: The same of the pages of drafts, where these have a pool of their own (`KvLayout.draft_page_size`), with
            the columns of drafts that have a cache; None where they lie in the target's pages.
        slots: The slot of recurrent states of each living request, by number; empty where the layout has none.
        free_slots: Free slots.
    """

    free: tuple[int, ...]
    total: int
    tables: dict[int, tuple[int, ...]]
    kept: tuple[int, ...]
    committed: dict[int, int]
    allocated: dict[int, int]
    stored: int = 0
    brought: tuple[int, ...] = ()
    draft: "Account | None" = None
    slots: dict[int, int] = field(default_factory=dict)
    free_slots: tuple[int, ...] = ()


@dataclass(frozen=True)
class Event:
    """The launch of one request's step, or the moment at which the host takes or skips its results.

    Attributes:
        kind: `launched`, `counted` (the host took the results) or `skipped` (it threw them away).
        action: The number of the action in which this happened.
        request: The request that the step was launched for, or that the results counted for.
        frame: The number of the launch, counted from 0; the requests of one forward share it.
        inputs: For `launched`, the output tokens that the draft read, then the tokens of the verified rows.
        owned: For `launched`, the pages of the request's block table when the host launched the step.
        written: For `launched`, the pages that hold the columns of the verified rows and of the draft's.
        tokens: For `counted`, the emitted tokens.
        step: For `counted`, the number of the request's step that they are.
    """

    kind: str
    action: int
    request: int
    frame: int
    inputs: tuple[int, ...] = ()
    owned: tuple[int, ...] = ()
    written: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    step: int = 0
