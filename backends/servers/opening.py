"""Opening of a server: which model it has, and which dialect it speaks.

The server is asked for its models, then for a few tokens in each way that it may take, the most telling first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from time import monotonic
from typing import Any

from specverify.backends.adapt.answers import Answer, AnsweringBackend
from specverify.backends.base import Unavailable, Unsupported
from specverify.backends.servers.address import Address, address_of
from specverify.backends.servers.dialects import BY_NAME, Dialect, OpenAI, Question, counts_of
from specverify.backends.servers.together import ask_together
from specverify.backends.servers.web import Call, RefusedRequest, Web, WrongAnswer
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.files.generation_settings import end_tokens

BY_OWNER = {dialect.OWNER: dialect for dialect in BY_NAME.values() if dialect.OWNER is not None}
"""The dialect of a server by the `owned_by` of its models."""

PROBES = ((0,), (1,), (2,))
"""Prompts of the requests that show whether draws follow the seed."""

PROBE_TOKENS, PROBE_TEMPERATURE = 16, 2.0
"""Tokens and temperature of these requests: two texts of independent draws are then hardly ever the same.

OpenAI and vLLM refuse temperatures above 2.
"""

REQUEST_FIELDS = ("prompt_ids", "max_new_tokens", "temperature", "seed", "stops", "checkpoint")
"""Parameters of a black box that every dialect is given."""

DTYPES = ("float32", "float64", "bfloat16", "float16")
"""The dtypes in which a server may compute; `--dtype` says in which this one does."""

ELSEWHERE = "elsewhere"
"""The device of every server: its own, which it does not tell."""


@dataclass(frozen=True)
class Server:
    """A server, and the dialect in which it is asked.

    Attributes:
        step_s: Seconds in which it makes a token.
    """

    web: Web
    dialect: Dialect
    step_s: float = 0.0
    # A tokenizer is no thing for two threads at once.
    _words: Lock = field(default_factory=Lock, compare=False)

    def ask_together(
        self, requests: Sequence[Mapping[str, Any]], actions: Sequence[tuple[str, int]]
    ) -> list[Answer | None]:
        """The answers to several requests; see `specverify.backends.servers.together`."""
        return ask_together(lambda fields, call: self.ask(call, **fields), requests, actions, self.step_s)

    def __call__(self, **fields: Any) -> Answer:
        """The answer to one request, as `ask`."""
        return self.ask(Call(), **fields)

    def ask(self, call: Call, **fields: Any) -> Answer:
        """The answer to one request, which `call` may cancel.

        Raises:
            CancelledCall: The call was cancelled.
            Unsupported: The text ends at other tokens than the case's, the checkpoint's files name none that can be
                read, or no text stands for the prompt.
            Unavailable: The server does not answer as it should, or refuses the request.
        """
        question = Question(**fields)
        try:
            end_ids = () if self.dialect.NAMED_STOPS else end_tokens(question.checkpoint)
        except UnreadableCheckpoint as why:
            raise Unsupported(str(why)) from None
        if not self.dialect.NAMED_STOPS and set(question.stops) != set(end_ids):
            raise Unsupported(
                f"a server of dialect {self.dialect.NAME} ends a text at the model's own end tokens alone"
            )
        try:
            return self.answer_to(question, call)
        except RefusedRequest as why:
            raise Unavailable(str(why)) from None

    def answer_to(self, question: Question, call: Call | None = None) -> Answer:
        """The answer to a question; raises RefusedRequest beside what `ask` raises."""
        with self._words:
            body = self.dialect.body(question)
        prompt = body["prompt"] if self.dialect.as_text else ""

        def read_answer(content: Any) -> Answer:
            with self._words:
                return replace(self.dialect.read(content, question), speculated=counts_of(content))

        return self.web.ask(self.dialect.PATH, body, read_answer, prompt, call)


def open_server(name: str) -> AnsweringBackend:
    """The backend that `name`, `openai:URL` with options, stands for.

    Raises:
        WrongAddress: The name cannot be used.
        Unavailable: The server does not answer, or answers what no dialect gives.
    """
    address = address_of(name)
    web = Web(address)
    dialect = _dialect(web, address)
    is_seeded, step_s = _probe(Server(web, dialect))
    server = Server(web, dialect, step_s)
    parameters = (*REQUEST_FIELDS, *dialect.PROCESSES)
    # A server brings its own weights, so that it runs no built-in model.
    backend = AnsweringBackend(
        server, parameters, seeded=is_seeded, same_bits=False, ask_together=server.ask_together,
        own_seed=address.own_seed, name=name, device=ELSEWHERE, dtypes=DTYPES, families=(),
    )  # fmt: skip
    if not dialect.NAMED_STOPS:
        stops = tuple(name for name in backend.declaration.stops if name != "stop_tokens")
        backend.declaration = replace(backend.declaration, stops=stops)
    return backend


def _dialect(web: Web, address: Address) -> Dialect:
    """The dialect, by the user's choice or by the server's models, in the first form that the server takes."""
    model = address.model
    owner = None
    if address.model is None or address.dialect is None:
        model, owner = _model(web, address)
    kind = BY_NAME[address.dialect] if address.dialect else BY_OWNER.get(owner or "", OpenAI)
    forms = [kind(model or "", logprobs, as_text) for as_text in (False, True) for logprobs in (True, False)]
    refusal = ""
    for form in forms:
        if (form.logprobs and not address.logprobs) or (form.as_text and not isinstance(form, OpenAI)):
            continue
        try:
            _answer_content(Server(web, form), Question(PROBES[0], 1))
        except RefusedRequest as why:
            if why.status in (401, 403):
                raise Unavailable(str(why)) from None
            refusal = refusal or str(why)
            continue
        return form
    raise Unavailable(f"{refusal} (asked for one token in dialect {kind.NAME})")


def _object(content: Any) -> dict[str, Any]:
    """The content, which must be an object with choices."""
    choices = content.get("choices") if isinstance(content, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise WrongAnswer("answers JSON without choices")
    return {"choices": choices}


def _model(web: Web, address: Address) -> tuple[str, str | None]:
    """The name and the owner of the server's model."""
    try:
        rows = web.ask("/v1/models", None, _rows)
    except RefusedRequest as why:
        if address.model is None:
            raise Unavailable(f"{why}; name its model with #model=NAME") from None
        return address.model, None
    matching_rows = [row for row in rows if address.model in (None, row.get("id"))]
    if len(matching_rows) != 1 or not isinstance(matching_rows[0].get("id"), str):
        names = ", ".join(str(row.get("id")) for row in rows[:6])
        raise Unavailable(f"the server {address.root} has {len(rows)} models ({names}): name one with #model=NAME")
    owner = matching_rows[0].get("owned_by")
    return matching_rows[0]["id"], owner if isinstance(owner, str) else None


def _rows(content: Any) -> list[dict[str, Any]]:
    """The models in the answer of `/v1/models`."""
    rows = content.get("data") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise WrongAnswer("answers JSON whose field data is no list of models")
    return rows


def _probe(server: Server) -> tuple[bool, float]:
    """Whether the same request with the same seed gives the same tokens twice, and the seconds of a token."""
    fastest_s = float("inf")
    for prompt in PROBES:
        question = Question(prompt, PROBE_TOKENS, PROBE_TEMPERATURE, seed=7)
        began = monotonic()
        first = _answer_content(server, question)
        fastest_s = min(fastest_s, monotonic() - began)
        if first != _answer_content(server, question):
            return False, fastest_s / PROBE_TOKENS
    return True, fastest_s / PROBE_TOKENS


def _answer_content(server: Server, question: Question) -> object:
    """The server's answer, in ids or in texts: no checkpoint, whose tokenizer would read texts, is known yet."""
    if not isinstance(server.dialect, OpenAI):
        return server.answer_to(question).tokens
    # Every tokenizer knows digits.
    prompt = " ".join(map(str, question.prompt_ids)) if server.dialect.as_text else list(question.prompt_ids)
    body = {**replace(server.dialect, as_text=False).body(question), "prompt": prompt}
    content = server.web.ask(server.dialect.PATH, body, _object)
    return [(choice.get("token_ids"), choice.get("text")) for choice in content["choices"]]
