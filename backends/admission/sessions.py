"""Sessions at the door: the prompts with which requests entered, and the accounts of pages after each action."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from backends.admission.misshapen import refusal
from backends.admission.numbers import TOKEN, WHOLE, whole, wholes
from reference.case import Case
from reference.malformed import Malformed
from reference.session import Account
from reference.trace import Trace

Entry = TypeVar("Entry")

MOST_PAGES = 2**24
"""Pages of a pool at most: an account lists them one by one."""


def admitted_prompts(value: object, case: Case, traces: tuple[Trace | None, ...]) -> tuple[tuple[int, ...], ...]:
    """The prompt of each request: its own, for a fork after the tokens of its source; empty for one never entered.

    Raises:
        Misshapen: for tokens outside the vocabulary, and for a prompt with which the request would be no case.
    """
    if not isinstance(value, (tuple, list)) or len(value) != len(traces):
        found = f"{len(value)} prompts" if isinstance(value, (tuple, list)) else ""
        raise refusal("shared.prompts", value, f"a prompt for each of {len(traces)} requests", found)
    return tuple(_prompt(f"shared.prompts[{at}]", one, case, at, traces[at]) for at, one in enumerate(value))


def _prompt(field: str, value: object, case: Case, number: int, trace: Trace | None) -> tuple[int, ...]:
    """The prompt of a request; it ends with the prompt that the case gives the request."""
    tokens = wholes(field, value, 0, case.model.vocab_size - 1, TOKEN)
    own = case.prompt if number == 0 or case.session is None else case.session.mates[number - 1].prompt
    if tokens == own or (trace is None and not tokens):
        return tokens
    if tokens[-len(own) :] != own:
        expected = f"a prompt that ends with the request's own {len(own)} tokens"
        raise refusal(field, value, expected, f"{len(tokens)} tokens")
    try:
        case.alone(number, tokens[: -len(own)])
    except Malformed as why:
        raise refusal(field, value, f"a prompt that the case admits ({why})", f"{len(tokens)} tokens") from None
    return tokens


def admitted_accounts(value: object, requests: int) -> tuple[Account, ...]:
    """The accounts after each action; none where the backend counts no pages.

    Raises:
        Misshapen: naming the action whose account cannot be read.
    """
    if not isinstance(value, (tuple, list)):
        raise refusal("shared.accounts", value, "a tuple of reference.session.Account")
    return tuple(_account(f"shared.accounts[{at}]", one, requests) for at, one in enumerate(value))


def _account(field: str, value: object, requests: int) -> Account:
    """An account of pages; every request with a block table also has its committed and its allocated columns."""
    if not isinstance(value, Account):
        raise refusal(field, value, "reference.session.Account")
    made = Account(
        free=wholes(f"{field}.free", value.free),
        total=whole(f"{field}.total", value.total, 0, MOST_PAGES),
        tables=_by_request(f"{field}.tables", value.tables, requests, wholes, _is_tuple),
        kept=wholes(f"{field}.kept", value.kept),
        committed=_by_request(f"{field}.committed", value.committed, requests, whole, _is_int),
        allocated=_by_request(f"{field}.allocated", value.allocated, requests, whole, _is_int),
    )
    for name, columns in (("committed", made.committed), ("allocated", made.allocated)):
        missing = made.tables.keys() - columns.keys()
        if missing:
            found = f"no entry for request {min(missing)}"
            raise refusal(f"{field}.{name}", None, "one for each request with a block table", found)
    return made


def _is_tuple(value: object) -> bool:
    """Whether `value` is a tuple of Python ints, which needs no conversion."""
    return type(value) is tuple and WHOLE.issuperset(map(type, value))


def _is_int(value: object) -> bool:
    """Whether `value` is a Python int."""
    return type(value) is int


def _by_request(
    field: str, value: object, requests: int, admit: Callable[[str, object], Entry], ready: Callable[[object], bool]
) -> dict[int, Entry]:
    """A dict by request number, its entries admitted one by one unless all are `ready` as they are."""
    if not isinstance(value, Mapping):
        raise refusal(field, value, "a dict by request number")
    exact = type(value) is dict and WHOLE.issuperset(map(type, value)) and all(map(ready, value.values()))
    if exact and (not value or 0 <= min(value) <= max(value) < requests):
        return dict(value)
    made = {}
    for key, entry in value.items():
        number = whole(f"{field}'s key", key, 0, requests - 1)
        made[number] = admit(f"{field}[{number}]", entry)
    return made
