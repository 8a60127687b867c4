"""Admission of sessions: the prompts of requests, and the page accounts.

A prompt is the one with which a request entered the session; an account of pages follows each action.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

from specverify.backends.admission.misshapen import refusal
from specverify.backends.admission.numbers import INT_TYPES, TOKEN, admit_int, admit_ints
from specverify.reference.case import Case
from specverify.reference.malformed import Malformed
from specverify.reference.session import Account, Event
from specverify.reference.trace import Trace

Entry = TypeVar("Entry")

MOST_PAGES = 2**24
"""The largest pool that is admitted, in pages; an account lists them one by one."""


def admit_prompts(value: object, case: Case, traces: tuple[Trace | None, ...]) -> tuple[tuple[int, ...], ...]:
    """The prompt with which each request entered: its own prompt, behind its source's tokens if it is a fork.

    A request that never entered has an empty prompt.

    Raises:
        Misshapen: for tokens outside the vocabulary, and for a prompt with which the request would not be a valid case.
    """
    if not isinstance(value, (tuple, list)) or len(value) != len(traces):
        description = f"{len(value)} prompts" if isinstance(value, (tuple, list)) else ""
        raise refusal("shared.prompts", value, f"a prompt for each of {len(traces)} requests", description)
    return tuple(
        _admit_prompt(f"shared.prompts[{number}]", prompt, case, number, traces[number])
        for number, prompt in enumerate(value)
    )


def _admit_prompt(field: str, value: object, case: Case, number: int, trace: Trace | None) -> tuple[int, ...]:
    """The prompt of one request; it must end with the prompt that the case gives to this request."""
    tokens = admit_ints(field, value, 0, case.model.vocab_size - 1, TOKEN)
    own_prompt = case.prompt if number == 0 or case.session is None else case.session.mates[number - 1].prompt
    if tokens == own_prompt or (trace is None and not tokens):
        return tokens
    if tokens[-len(own_prompt) :] != own_prompt:
        expected = f"a prompt that ends with the request's own {len(own_prompt)} tokens"
        raise refusal(field, value, expected, f"{len(tokens)} tokens")
    # A fork's prompt is its source's tokens and then its own prompt; the case itself knows whether that is valid.
    try:
        case.alone(number, tokens[: -len(own_prompt)])
    except Malformed as why:
        raise refusal(field, value, f"a prompt that the case admits ({why})", f"{len(tokens)} tokens") from None
    return tokens


def admit_accounts(value: object, requests: int) -> tuple[Account, ...]:
    """The account of pages after each action; an empty tuple where the backend counts no pages.

    Raises:
        Misshapen: naming the action whose account cannot be read.
    """
    if not isinstance(value, (tuple, list)):
        raise refusal("shared.accounts", value, "a tuple of specverify.reference.session.Account")
    return tuple(_admit_account(f"shared.accounts[{index}]", account, requests) for index, account in enumerate(value))


def _admit_account(field: str, value: object, requests: int) -> Account:
    """An account of pages.

    Every request with a block table must also have its numbers of committed and of allocated columns.
    """
    if not isinstance(value, Account):
        raise refusal(field, value, "specverify.reference.session.Account")
    account = Account(
        free=admit_ints(f"{field}.free", value.free),
        total=admit_int(f"{field}.total", value.total, 0, MOST_PAGES),
        tables=_admit_by_request(f"{field}.tables", value.tables, requests, admit_ints, _is_tuple),
        kept=admit_ints(f"{field}.kept", value.kept),
        committed=_admit_by_request(f"{field}.committed", value.committed, requests, admit_int, _is_int),
        allocated=_admit_by_request(f"{field}.allocated", value.allocated, requests, admit_int, _is_int),
        stored=admit_int(f"{field}.stored", value.stored, 0, MOST_PAGES),
        brought=admit_ints(f"{field}.brought", value.brought),
        draft=None if value.draft is None else _admit_account(f"{field}.draft", value.draft, requests),
        slots=_admit_by_request(f"{field}.slots", value.slots, requests, admit_int, _is_int),
        free_slots=admit_ints(f"{field}.free_slots", value.free_slots),
    )
    for name, columns in (("committed", account.committed), ("allocated", account.allocated)):
        missing_requests = account.tables.keys() - columns.keys()
        if missing_requests:
            description = f"no entry for request {min(missing_requests)}"
            raise refusal(f"{field}.{name}", None, "one for each request with a block table", description)
    return account


EVENTS = ("launched", "counted", "skipped")
"""The kinds of event."""


def admit_events(value: object, case: Case) -> tuple[Event, ...]:
    """The events of launched steps; an empty tuple where the backend shows none.

    Tokens may be any integers: `serving.no-placeholder` judges what a step has read.

    Raises:
        Misshapen: naming the event that cannot be read.
    """
    assert case.session is not None
    if not isinstance(value, (tuple, list)):
        raise refusal("shared.events", value, "a tuple of specverify.reference.session.Event")
    mates = len(case.session.mates)
    return tuple(_admit_event(f"shared.events[{index}]", event, mates) for index, event in enumerate(value))


def _admit_event(field: str, value: object, mates: int) -> Event:
    """An event; its action may lie behind the actions of the case, since a live session goes on."""
    if not isinstance(value, Event):
        raise refusal(field, value, "specverify.reference.session.Event")
    if value.kind not in EVENTS:
        raise refusal(f"{field}.kind", value.kind, f"one of {', '.join(EVENTS)}")
    return Event(
        value.kind,
        admit_int(f"{field}.action", value.action, 0),
        admit_int(f"{field}.request", value.request, 0, mates),
        admit_int(f"{field}.frame", value.frame, 0, MOST_PAGES),
        admit_ints(f"{field}.inputs", value.inputs),
        admit_ints(f"{field}.owned", value.owned),
        admit_ints(f"{field}.written", value.written),
        admit_ints(f"{field}.tokens", value.tokens),
        admit_int(f"{field}.step", value.step, 0),
    )


def _is_tuple(value: object) -> bool:
    """Whether `value` is a tuple of Python ints, which needs no conversion."""
    return type(value) is tuple and INT_TYPES.issuperset(map(type, value))


def _is_int(value: object) -> bool:
    """Whether `value` is a Python int."""
    return type(value) is int


def _admit_by_request(
    field: str, value: object, requests: int, admit: Callable[[str, object], Entry], ready: Callable[[object], bool]
) -> dict[int, Entry]:
    """A dict by request number, with each entry admitted by `admit` unless all entries are `ready` as they are."""
    if not isinstance(value, Mapping):
        raise refusal(field, value, "a dict by request number")
    # The fast path: an exact dict of entries that need no conversion.
    exact = type(value) is dict and INT_TYPES.issuperset(map(type, value)) and all(map(ready, value.values()))
    if exact and (not value or 0 <= min(value) <= max(value) < requests):
        return dict(value)
    entries = {}
    for key, entry in value.items():
        number = admit_int(f"{field}'s key", key, 0, requests - 1)
        entries[number] = admit(f"{field}[{number}]", entry)
    return entries
