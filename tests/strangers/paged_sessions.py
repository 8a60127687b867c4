"""A stranger's serving engine for tests: pages of tokens in plain Python, run anew by a NumPy model at every step."""

from collections import Counter, deque
from dataclasses import dataclass, field, replace

from specverify.backends.base import Declaration
from specverify.reference.case import Case
from specverify.reference.draft import Draft, Scripted, largest_tree_size
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.session import Account, Action, Session
from specverify.reference.trace import Array, Emitted, Shared, Stage, Step, Trace
from specverify.reference.tree import Tree


@dataclass
class Guest:
    """A request: its block table holds every token but the last."""

    case: Case
    last: int
    table: list[int] = field(default_factory=list)
    length: int = 0
    output: tuple[int, ...] = ()
    finish: str | None = None
    steps: list[Step] = field(default_factory=list)
    waits: bool = False
    is_over: bool = False

    @property
    def lives(self) -> bool:
        return not (self.waits or self.is_over)


class Sessions:
    """A live session; a page is a list of tokens, None where nobody wrote."""

    def __init__(self, case: Case, model: Oracle) -> None:
        assert case.session is not None
        self._case = case
        self._model = model.model(case.model, case.dtype)
        self._size = case.layout.page_size
        alone = [case.alone(number) for number in range(1 + len(case.session.mates))]
        drafts = [request.draft for request in alone] + [
            action.draft for action in case.session.actions if action.draft is not None
        ]
        self._rows = 1 + max(map(largest_tree_size, drafts))
        most = case.layout.pages_for(sum(request.longest for request in alone) + self._rows) * len(alone)
        self._free = deque(case.layout.pages or range(most))
        self._cells: list[list[int | None]] = [[None] * self._size for _ in self._free]
        self._holders: Counter[int] = Counter()
        self._guests: dict[int, Guest] = {}
        self._accounts: list[Account] = []

    def do(self, action: Action) -> None:
        guests = [self._guests[number] for number in action.requests if number in self._guests]
        if action.kind == "add":
            self._enter(action.requests[0], (), [])
        elif action.kind == "fork":
            source = self._guests.get(action.requests[0])
            if source is not None and source.lives:
                shared = source.table[: -(-source.length // self._size)]
                self._enter(action.requests[1], (*self._read(source), source.last), shared)
        for guest in guests if action.kind in ("evict", "cancel", "restore", "step", "switch") else ():
            self._act(action, guest)
        self._accounts.append(self._account())

    def _act(self, action: Action, guest: Guest) -> None:
        if action.kind == "restore":
            known_tokens = (*guest.case.prompt, *guest.output)[:-1]
            if guest.waits and self._fits(guest, len(known_tokens)):
                guest.waits = False
                self._write(guest, known_tokens)
        elif action.kind == "cancel" and not guest.is_over:
            self._release(guest)
            guest.is_over, guest.waits = True, False
        elif guest.lives and action.kind == "evict":
            self._release(guest)
            guest.waits = True
        elif guest.lives and action.kind == "switch":
            assert action.draft is not None
            guest.case = replace(guest.case, draft=self._scripted_draft(guest, action.draft))
        elif guest.lives and action.kind == "step" and self._fits(guest, self._rows):
            self._step(guest)

    def _scripted_draft(self, guest: Guest, draft: Draft) -> Scripted:
        """The script that proposes nothing: what this engine is switched to has no trees."""
        return Scripted()

    def _enter(self, number: int, before: tuple[int, ...], shared: list[int]) -> None:
        if number in self._guests:
            return
        try:
            case = self._case.alone(number, before)
        except Malformed:
            return
        guest = Guest(case, case.prompt[-1], list(shared), max(len(before) - 1, 0))
        self._holders.update(shared)
        if not self._fits(guest, len(case.prefix) - guest.length):
            self._release(guest)
            return
        self._guests[number] = guest
        self._write(guest, case.prefix[guest.length :])

    def _step(self, guest: Guest) -> None:
        context = self._read(guest)
        assert isinstance(guest.case.draft, Scripted)
        trees = guest.case.draft.trees
        number = len(guest.steps)
        tree = trees[number].with_root(guest.last) if number < len(trees) else Tree((0,), (guest.last,))
        block = accepted(tree, self._model.nodes(context, tree).logits)
        emitted_tokens: list[int] = []
        stops = guest.case.stops
        while guest.finish is None and block:
            token = block.pop(0)
            emitted_tokens.append(token)
            if token in stops.eos:
                guest.finish = "eos"
            elif token in stops.stop_tokens:
                guest.finish = "stop"
            elif len(guest.output) + len(emitted_tokens) == stops.max_new_tokens:
                guest.finish = "length"
        self._write(guest, (guest.last, *emitted_tokens[:-1]))
        guest.last, guest.output = emitted_tokens[-1], (*guest.output, *emitted_tokens)
        guest.steps.append(Step(context, emitted=Emitted(tuple(emitted_tokens), guest.finish)))
        if guest.finish is not None:
            self._release(guest)
            guest.is_over = True

    # Pages.

    def _fits(self, guest: Guest, columns: int) -> bool:
        """Whether there are pages for `columns` more, copies of shared ones included."""
        return -(-(guest.length + columns) // self._size) - len(guest.table) + 1 <= len(self._free)

    def _read(self, guest: Guest) -> tuple[int, ...]:
        tokens = [
            self._cells[guest.table[position // self._size]][position % self._size] for position in range(guest.length)
        ]
        return tuple(token for token in tokens if token is not None)

    def _write(self, guest: Guest, tokens: tuple[int, ...]) -> None:
        for token in tokens:
            place, offset = divmod(guest.length, self._size)
            if place == len(guest.table):
                guest.table.append(self._take())
            self.copy_page(guest, place)
            self._cells[guest.table[place]][offset] = token
            guest.length += 1

    def copy_page(self, guest: Guest, place: int) -> None:
        """Copy on write."""
        page = guest.table[place]
        if self._holders[page] > 1:
            copy = self._take()
            self._cells[copy] = list(self._cells[page])
            self._holders[page] -= 1
            guest.table[place] = copy

    def _take(self) -> int:
        page = self._free.popleft()
        self._cells[page] = [None] * self._size
        self._holders[page] = 1
        return page

    def _release(self, guest: Guest) -> None:
        for page in guest.table:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)
        guest.table, guest.length = [], 0

    # What is seen.

    @property
    def trace(self) -> Trace:
        everyone = range(1 + len(self._case.session.mates if self._case.session else ()))
        guests = [self._guests.get(number) for number in everyone]
        traces = tuple(
            None if guest is None else Trace(tuple(guest.steps), guest.output, guest.finish) for guest in guests
        )
        prompts = tuple(() if guest is None else guest.case.prompt for guest in guests)
        first_trace = traces[0] or Trace((), (), None)
        return replace(first_trace, shared=Shared(traces, prompts, tuple(self._accounts)))

    def _account(self) -> Account:
        living = {number: guest for number, guest in self._guests.items() if guest.lives}
        return Account(
            free=tuple(self._free),
            total=len(self._cells),
            tables={number: tuple(guest.table) for number, guest in living.items()},
            kept=(),
            committed={number: guest.length for number, guest in living.items()},
            allocated={number: len(guest.table) * self._size for number, guest in living.items()},
        )


class CarelessSessions(Sessions):
    """The same, but a request writes into a page that another still reads."""

    def copy_page(self, guest: Guest, place: int) -> None:
        """Nothing is copied."""


def accepted(tree: Tree, logits: Array) -> list[int]:
    """Tokens of the greedy walk, the bonus last."""
    node, block = 0, []
    while True:
        block.append(int(logits[node].argmax()))
        below = [child for child in tree.children[node] if tree.token[child] == block[-1]]
        if not below:
            return block
        node = below[0]


class PagedEngine:
    """Serves sessions, and reveals nothing but tokens and pages."""

    def __init__(self, sessions: type[Sessions]) -> None:
        self.declaration = Declaration(
            name="paged-sessions",
            device="cpu",
            reveals=frozenset({Stage.EMITTED}),
            dtypes=("float32", "float64"),
            drafts=("scripted",),
            commits=("path",),
            layouts=("paged",),
            sessions=True,
        )
        self._sessions = sessions
        self._model = Oracle(keep=1)

    def serve(self, case: Case) -> Sessions:
        """Play the session's actions, and wait for more."""
        live = self._sessions(case, self._model)
        for action in case.session.actions if case.session is not None else ():
            live.do(action)
        return live

    def run(self, case: Case) -> Trace:
        """The case's session, or its request alone."""
        if case.session is not None:
            return self.serve(case).trace
        if not case.layout.page_size:  # alone it has all the pages it needs, of any size
            case = replace(case, layout=replace(case.layout, kind="paged", page_size=4, commit="path"))
        live = self.serve(replace(case, session=Session()))
        live.do(Action("add", (0,)))
        for num_steps in range(1, 1 + (case.steps or case.stops.max_new_tokens)):
            live.do(Action("step", (0,)))
            if len(live.trace.steps) < num_steps:  # it is over, or there is no page
                break
        return replace(live.trace, shared=None)


def clean() -> PagedEngine:
    """Open the engine."""
    return PagedEngine(Sessions)


def careless() -> PagedEngine:
    """Open the engine that forgets copy on write."""
    return PagedEngine(CarelessSessions)
