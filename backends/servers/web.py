"""One question to a server, and another try where the answer is none.

A refusal is final. Whatever may pass is asked again, with a bound: no connection, no whole answer in time, too many
requests (Retry-After is respected), an error of the server, and an answer that is not what the dialect expects.
"""

import http.client
import json
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Lock
from time import monotonic, sleep
from typing import Any, TypeVar
from urllib.parse import urlsplit

from specverify.backends.base import Unavailable
from specverify.backends.servers.address import KEY, Address, key

Content = TypeVar("Content")

FIRST_WAIT_S = 0.5
"""Seconds before the second try; each later wait is twice as long."""

LONGEST_WAIT_S = 60.0
"""Most seconds between two tries; a server that asks for more (Retry-After) is given up."""

LARGEST_ANSWER = 64 * 2**20
"""Most bytes of an answer."""

LONGEST_MESSAGE = 160
"""Most characters of a server's own message that are passed on."""

ECHO = 12
"""Characters of a prompt that a message may not hold in a row."""

IDS = re.compile(r"\d+(?:[\s,\[\]]+\d+)+")
"""Numbers in a row, as prompts of token ids are echoed."""

NOT_HERE = ("localhost", "127.0.0.1", "::1")
"""Hosts that are asked without the environment's proxy."""


class WrongAnswer(Exception):
    """An answer is not what was asked for; `wait` is the server's own Retry-After in seconds, or None."""

    def __init__(self, why: str, wait: float | None = None) -> None:
        super().__init__(why)
        self.wait = wait


class RefusedRequest(Exception):
    """The server refused the request as it is (a status of 400 to 499); asking again would not help."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass
class AnswerReader:
    """The bytes of an answer and the clock that limits them."""

    until: float

    def read(self, stream: Any) -> bytes:
        """Read to the end; raises WrongAnswer where the bytes or the time are too many."""
        parts: list[bytes] = []
        size = 0
        while part := stream.read1(1 << 16):
            parts.append(part)
            size += len(part)
            if size > LARGEST_ANSWER:
                raise WrongAnswer(f"its answer has more than {LARGEST_ANSWER >> 20} MiB")
            if monotonic() > self.until:
                raise TimeoutError
        if getattr(stream, "length", None):  # what is left of the length that its head promised
            raise WrongAnswer("broke the connection off in its answer")
        return b"".join(parts)


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, which could take the key to another host."""

    def redirect_request(self, *_: Any) -> None:
        """No request."""


class CancelledCall(Exception):
    """The call was cancelled before its answer came."""


class Call:
    """A question under way, which another thread may cancel by closing its connection.

    Attributes:
        is_cancelled: Whether it was cancelled.
        has_begun: Set when its first connection is about to open.
    """

    def __init__(self) -> None:
        self.is_cancelled = False
        self.has_begun = Event()
        self._connection: http.client.HTTPConnection | None = None
        self._lock = Lock()

    def connect_by(self, connection: http.client.HTTPConnection) -> http.client.HTTPConnection:
        """Note the connection over which the question goes; raises CancelledCall where none is wanted any more."""
        with self._lock:
            if self.is_cancelled:
                raise CancelledCall
            self._connection = connection
        self.has_begun.set()
        return connection

    def cancel(self) -> None:
        """Close the connection, at which the server sees that nobody waits for the answer."""
        with self._lock:
            self.is_cancelled = True
            stream = None if self._connection is None else self._connection.sock
        if stream is not None:
            with suppress(OSError):  # the answer has come, and the connection is closed
                stream.shutdown(socket.SHUT_RDWR)


class CallRequest(urllib.request.Request):
    """A request of urllib with its call."""

    call: Call


class PlainCalls(urllib.request.HTTPHandler):
    """Opens connections that their call can close."""

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        """As urllib's own."""
        return self.do_open(_connecting(request, http.client.HTTPConnection), request)


class EncryptedCalls(urllib.request.HTTPSHandler):
    """The same over TLS."""

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        """As urllib's own."""
        return self.do_open(_connecting(request, http.client.HTTPSConnection), request)


def _connecting(request: urllib.request.Request, kind: type[http.client.HTTPConnection]) -> Any:
    """A maker of connections for urllib, which notes them with the call of `request`."""
    assert isinstance(request, CallRequest)
    call = request.call
    return lambda host, **settings: call.connect_by(kind(host, **settings))


class Web:
    """The connection to one server.

    Args:
        address: The server, and the bounds of time and tries.

    Raises:
        Unavailable: The key in the environment cannot be sent.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self._key = key()
        here = urlsplit(address.root).hostname in NOT_HERE
        proxies = [urllib.request.ProxyHandler({})] if here else []
        self._open = urllib.request.build_opener(NoRedirect, PlainCalls, EncryptedCalls, *proxies).open

    def ask(
        self, path: str, body: Any, parse: Callable[[Any], Content], prompt: str = "", call: Call | None = None
    ) -> Content:
        """The value that `parse` makes of the JSON that the server answers to `body` (None for a GET request).

        Args:
            path: The path below the server's root.
            body: The request's JSON.
            parse: Raises WrongAnswer where the content is not as expected.
            prompt: A text of the request that no message may repeat.
            call: What another thread may cancel.

        Raises:
            CancelledCall: The call was cancelled.
            Refused: The server refuses the request.
            Unavailable: No try brought an answer that can be used; one line says what the last one was.
        """
        last = ""
        call = call or Call()
        for number in range(self.address.tries):
            try:
                return parse(self._once(path, body, prompt, call))
            except WrongAnswer as why:
                if call.is_cancelled:
                    raise CancelledCall from None
                last = str(why)
                wait = FIRST_WAIT_S * 2**number if why.wait is None else why.wait
            if wait > LONGEST_WAIT_S and number + 1 < self.address.tries:
                raise Unavailable(f"{self._place(path)} {last} and asks to wait {wait:g} s, which is too long")
            if number + 1 < self.address.tries:
                sleep(wait)
        tries = self.address.tries
        raise Unavailable(f"{self._place(path)} {last} ({tries} {'tries' if tries > 1 else 'try'})")

    def _place(self, path: str) -> str:
        return f"the server {self.address.root} at {path}:"

    def _once(self, path: str, body: Any, prompt: str, call: Call) -> Any:
        """The JSON of one answer; raises WrongAnswer, RefusedRequest or CancelledCall."""
        headers = {"Content-Type": "application/json", "Accept": "application/json", "Connection": "close"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        limit = self.address.timeout
        reader = AnswerReader(monotonic() + limit)
        try:
            request = CallRequest(self.address.root + path, data, headers)
            request.call = call
            with self._open(request, timeout=limit) as stream:
                raw = reader.read(stream)
        except urllib.error.HTTPError as why:
            with why:
                raise self._refusal(why, reader, prompt) from None
        except TimeoutError:
            raise WrongAnswer(f"gave no whole answer within {limit:g} s") from None
        except urllib.error.URLError as why:
            reason = why.reason
            if isinstance(reason, TimeoutError):
                raise WrongAnswer(f"gave no whole answer within {limit:g} s") from None
            description = reason.strerror if isinstance(reason, OSError) and reason.strerror else type(reason).__name__
            raise WrongAnswer(f"cannot be reached ({description})") from None
        except (OSError, http.client.HTTPException) as why:
            raise WrongAnswer(f"broke the connection off ({type(why).__name__})") from None
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            raise WrongAnswer("answers what is no JSON") from None

    def _refusal(self, why: urllib.error.HTTPError, reader: AnswerReader, prompt: str) -> Exception:
        """The exception for an answer with another status than 200."""
        try:
            message = self._message(reader.read(why), prompt)
        except (OSError, http.client.HTTPException, WrongAnswer):
            message = ""  # the status says enough, with or without a message
        line = f"answers {why.code}{message}"
        if why.code in (408, 425, 429) or why.code >= 500:
            return WrongAnswer(line, _seconds(why.headers.get("Retry-After")) if why.code in (429, 503) else None)
        if why.code in (401, 403):
            hint = f"the key in {KEY} is refused" if self._key else f"it wants a key: put it into {KEY}"
            return RefusedRequest(why.code, f"{self._place(urlsplit(why.url).path)} {line}; {hint}")
        if 300 <= why.code < 400:
            return RefusedRequest(
                why.code, f"{self._place(urlsplit(why.url).path)} {line}, a redirect: give the new address"
            )
        return RefusedRequest(why.code, f"{self._place(urlsplit(why.url).path)} {line}")

    def _message(self, raw: bytes, prompt: str) -> str:
        """The server's own message, as `: message`, without key and prompt; empty if there is none."""
        try:
            content = json.loads(raw)
        except (ValueError, RecursionError):
            return ""
        for name in ("error", "message", "detail"):
            if isinstance(content, dict) and name in content:
                content = content[name]
        if not isinstance(content, str):
            return ""
        if self._key is not None and self._key in content:
            return ""
        is_echoed = (
            any(prompt[start : start + ECHO] in content for start in range(max(1, len(prompt) - ECHO + 1)))
            if prompt
            else False
        )
        line = IDS.sub("[numbers]", " ".join(content.split()))[:LONGEST_MESSAGE]
        return "" if is_echoed else f": {line}"


def _seconds(value: str | None) -> float | None:
    """The seconds of a Retry-After header; None without one, and for a date, which our own waits replace."""
    return float(value) if value is not None and value.strip().isdigit() else None
