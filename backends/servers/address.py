"""The address of a server, as `openai:URL` names it, and its key."""

import os
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from specverify.backends.base import Unavailable

PREFIX = "openai:"
"""The beginning of the names of servers."""

KEY = "SPECVERIFY_API_KEY"
"""The environment variable that holds the server's key; the key is sent to the server and written nowhere."""

FORM = "openai:http://HOST:PORT, with options behind a #, such as #dialect=vllm,model=NAME"
"""The form of a server's name, for messages."""

DIALECTS = ("openai", "vllm", "llama.cpp", "sglang")
"""The ways in which servers are asked; `specverify.backends.servers.dialects` holds them."""


class WrongAddress(ValueError):
    """The name of a server cannot be used; the message says what is wrong, without the name, which may hold a key."""


@dataclass(frozen=True)
class Address:
    """A server and how to ask it.

    Attributes:
        name: The whole name as users type it.
        root: The URL without `/v1` and without a slash at its end.
        dialect: One of DIALECTS, or None to ask the server.
        model: The model's name on the server, or None to ask the server.
        timeout: Most seconds of one answer, from the connection to the last byte.
        tries: Most requests for one answer.
        logprobs: Whether log-probabilities are asked for.
        own_seed: Whether a seed is to give a request the same tokens whatever requests run beside it.
    """

    name: str
    root: str
    dialect: str | None = None
    model: str | None = None
    timeout: float = 60.0
    tries: int = 4
    logprobs: bool = True
    own_seed: bool = False


def address_of(name: str) -> Address:
    """The address that a name beginning with PREFIX holds.

    Raises:
        WrongAddress: The URL or an option cannot be used.
    """
    url, _, options = name.removeprefix(PREFIX).partition("#")
    try:
        parts = urlsplit(url)
        host = parts.hostname
        _ = parts.port  # a port that is no number is refused here
    except ValueError as why:
        raise WrongAddress(f"no URL of a server ({why}): give {FORM}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise WrongAddress(f"no URL of a server: give {FORM}")
    if "@" in parts.netloc:
        raise WrongAddress(f"a name or password stands in the URL, which reports would show: put the key into {KEY}")
    if parts.query:
        raise WrongAddress(f"a query stands in the URL, which reports would show: put a key into {KEY}")
    address = Address(name, url.rstrip("/").removesuffix("/v1").rstrip("/"))
    for option in filter(None, options.split(",")):
        address = _with(address, *option.partition("=")[::2])
    return address


def _with(address: Address, word: str, value: str) -> Address:
    """The address with one option."""
    if word == "dialect" and value in DIALECTS:
        return replace(address, dialect=value)
    if word == "model" and value:
        return replace(address, model=value)
    if word == "timeout" and value.replace(".", "", 1).isdigit() and float(value) > 0:
        return replace(address, timeout=float(value))
    if word == "tries" and value.isdigit() and 0 < int(value) <= 100:
        return replace(address, tries=int(value))
    if word == "logprobs" and value in ("yes", "no"):
        return replace(address, logprobs=value == "yes")
    if word == "own-seed" and value in ("yes", "no"):
        return replace(address, own_seed=value == "yes")
    raise WrongAddress(
        f"the option {word}={value} is none of dialect={'|'.join(DIALECTS)}, model=NAME, timeout=SECONDS, "
        "tries=1 to 100, logprobs=yes|no, own-seed=yes|no"
    )


def key() -> str | None:
    """The key in the environment, or None.

    Raises:
        Unavailable: The key holds a character that no header may hold; the message does not show the key.
    """
    value = os.environ.get(KEY, "").strip()
    if value and not (value.isascii() and value.isprintable() and " " not in value):
        raise Unavailable(f"{KEY} holds a blank or a character that no HTTP header may hold")
    return value or None
