"""A program as a backend: `command:PROGRAM`, asked in lines of JSON.

The program answers the first line with its declaration, and each later line with tokens. The protocol is that of
`backends/programs/protocol.schema.json`. A program that breaks in the middle is a finding on the case, as with
any engine; a program that answers what is no protocol line ends the run, since nothing it says can be judged.
"""

import json
import shlex
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from specverify.backends.adapt.answers import Answer, AnsweringBackend
from specverify.backends.base import ProgramFailure, Unavailable, Unsupported
from specverify.backends.programs.lines import Child, Endless, Over, Silent, telling_lines
from specverify.reference.trace import Speculated

PREFIX = "command:"
"""The beginning of the names of programs."""

SCHEMA = Path(__file__).parent / "protocol.schema.json"
"""The schema of the protocol; its `$defs` name every kind of line."""

PROTOCOL = 1
"""Version of the protocol."""

HANDSHAKE_S = 120.0
"""Seconds in which a program must tell its declaration; it need not have loaded a model by then."""

SHOWN_CHARACTERS = 80
"""Most characters that are shown of a line which is no answer."""

LARGEST_SEED = 2**31
"""Seeds are sent modulo this number, which every language's integers hold."""


class WrongProgram(ValueError):
    """The words behind `command:` name no program that can be started; the message is one line."""


class Program:
    """A program that answers requests; a broken one is started again for the next request.

    Attributes:
        declaration: What the program declares, as `declaration` in the schema.

    Args:
        name: The whole name, `command:PROGRAM ARGUMENTS`.

    Raises:
        WrongProgram: The program cannot be started, or its declaration is none.
        Unavailable: It does not tell its declaration.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        try:
            self._words = shlex.split(name.removeprefix(PREFIX))
        except ValueError as why:
            raise WrongProgram(f"{name}: {why}") from None
        if not self._words:
            raise WrongProgram(f"{PREFIX} names no program: give {PREFIX}'PROGRAM ARGUMENTS'")
        self._num_requests = 0
        self._child: Child | None = self._start_child()

    def _start_child(self) -> Child:
        """A child that has told its declaration."""
        try:
            child = Child(self._words)
        except OSError as why:
            raise WrongProgram(f"{self.name}: {self._words[0]} cannot be started ({why.strerror})") from None
        try:
            message = self._exchange(child, {"id": 0, "ask": "declare", "protocol": PROTOCOL}, "declared", HANDSHAKE_S)
        except ProgramFailure as why:
            said = telling_lines(why.last_lines)
            last = f": {'; '.join(said)}" if said else ""
            raise Unavailable(f"{self.name}: {why.why} before its declaration{last}") from None
        except Silent:
            child.end()
            raise Unavailable(f"{self.name} told no declaration within {HANDSHAKE_S:g} s") from None
        self.declaration: dict[str, Any] = message["declaration"]
        return child

    def __call__(self, **request_fields: Any) -> Answer:
        """The answer to one request.

        Raises:
            Unsupported: The program declines the case.
            ProgramFailure: The program tells an error, or has ended.
            Unavailable: The program wrote what is no answer.
        """
        if self._child is None:
            try:
                self._child = self._start_child()
            except WrongProgram as why:
                raise Unavailable(str(why)) from None
        self._num_requests += 1
        if "seed" in request_fields:
            request_fields["seed"] %= LARGEST_SEED
        request = {"id": self._num_requests, "ask": "generate", **request_fields}
        try:
            message = self._exchange(self._child, request, "answer")
        except (ProgramFailure, Unavailable):
            self._child = None
            raise
        if "unsupported" in message:
            raise Unsupported(f"{self.declaration['name']}: {message['unsupported']}")
        if "error" in message:
            raise ProgramFailure(f"the program tells an error: {message['error'][:200]}", tuple(self._child.last_lines))
        logprobs = message.get("logprobs")
        counts = Speculated(message["proposed"], message["accepted"]) if "proposed" in message else None
        return Answer(
            tuple(message["tokens"]), None if logprobs is None else tuple(map(float, logprobs)), speculated=counts
        )

    def _exchange(
        self, child: Child, request: Mapping[str, Any], kind: str, seconds: float | None = None
    ) -> dict[str, Any]:
        """The child's answer to a request; the child is ended where it gives none.

        Raises:
            ProgramFailure, Unavailable, Silent: There is no answer.
        """
        child.last_lines.clear()
        try:
            child.write(json.dumps(request).encode())
            line = child.read(seconds)
        except Over:
            ending = child.describe_end()
            last_lines = tuple(child.last_lines)
            child.end()
            raise ProgramFailure(f"the program {ending}", last_lines) from None
        except Endless:
            child.end()
            raise Unavailable(f"{self.name} writes a line without an end") from None
        try:
            return self._answer(line, request["id"], kind)
        except ValueError as why:
            child.end()
            raise Unavailable(f"{self.name} {why}") from None

    def _answer(self, line: bytes, number: int, kind: str) -> dict[str, Any]:
        """The answer that a line holds; raises ValueError, with the rest of a sentence about the program."""
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            excerpt = line.decode(errors="backslashreplace")[:SHOWN_CHARACTERS]
            raise ValueError(
                f"wrote on its standard output what is no line of the protocol: {excerpt!r} (only answers belong "
                "there; write anything else to standard error)"
            )
        if message.get("id") != number:
            raise ValueError(f"answered request {number} with the id {message.get('id')!r}")
        wrong = best_match(_validator(kind).iter_errors(message))
        if wrong is not None:
            path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in wrong.absolute_path)
            raise ValueError(f"answered against the protocol: {path.lstrip('.') or 'the line'}: {wrong.message[:160]}")
        return message

    def close(self) -> None:
        """End the program."""
        if self._child is not None:
            self._child.end()
            self._child = None


@cache
def _validator(kind: str) -> Draft202012Validator:
    """The validator of one kind of line, by its name in the schema's `$defs`."""
    schema = json.loads(SCHEMA.read_text())
    return Draft202012Validator({"$ref": f"#/$defs/{kind}", "$defs": schema["$defs"]})


def open_program(name: str) -> AnsweringBackend:
    """The backend that `name`, `command:PROGRAM ARGUMENTS`, stands for.

    Raises:
        WrongProgram: The program cannot be started.
        Unavailable: It does not tell a declaration.
    """
    program = Program(name)
    facts = dict(program.declaration)
    parameters = ("prompt_ids", "max_new_tokens", *dict.fromkeys(facts.pop("takes")))
    facts |= {field: tuple(facts[field]) for field in ("dtypes", "families") if field in facts}
    # Without a seed in its requests the program draws as it likes.
    return AnsweringBackend(program, parameters, seeded="seed" in parameters, **facts)
