"""The dialects of servers: how each is asked, and how its answer is read.

Every dialect is asked with token ids where the server takes them, and with each setting that the request has, so that
no default of the server takes part.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from specverify.backends.adapt.answers import Answer
from specverify.backends.servers.web import WrongAnswer
from specverify.backends.servers.words import ids_of_pieces, ids_of_text, text_of
from specverify.reference.trace import Speculated

LARGEST_SEED = 2**31 - 1
"""Seeds are sent modulo this number: servers hold them in 32 bits, or as floating-point numbers."""


@dataclass(frozen=True)
class Question:
    """A request in the words of a black box (`specverify.backends.adapt.blackbox.PARAMETERS`)."""

    prompt_ids: Sequence[int]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stops: tuple[int, ...] = ()
    checkpoint: str = ""


@dataclass(frozen=True)
class Dialect(ABC):
    """One way to ask a server.

    Attributes:
        model: The model's name on the server.
        logprobs: Whether log-probabilities are asked for.
        as_text: Whether the prompt is sent as text.
    """

    NAME: ClassVar[str]
    PATH: ClassVar[str]
    OWNER: ClassVar[str | None] = None
    """The `owned_by` of the models of such a server."""
    PROCESSES: ClassVar[tuple[str, ...]] = ("top_k", "top_p", "min_p")
    """The processing of logits that a request can ask for."""
    NAMED_STOPS: ClassVar[bool] = True
    """Whether a request names the tokens that end the text; else the text ends at the model's own end tokens."""

    model: str
    logprobs: bool = True
    as_text: bool = False

    @abstractmethod
    def body(self, question: Question) -> dict[str, Any]:
        """The JSON of a request."""

    @abstractmethod
    def read(self, content: Any, question: Question) -> Answer:
        """The answer in the JSON of a response.

        Raises:
            WrongAnswer: The JSON is not what the dialect gives.
        """


class OpenAI(Dialect):
    """The completions of OpenAI, and of servers that know nothing more."""

    NAME = "openai"
    PATH = "/v1/completions"
    PROCESSES: ClassVar[tuple[str, ...]] = ("top_p",)
    NAMED_STOPS = False

    def body(self, question: Question) -> dict[str, Any]:
        """See `Dialect`."""
        prompt = text_of(question.prompt_ids, question.checkpoint) if self.as_text else list(question.prompt_ids)
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": question.max_new_tokens,
            "temperature": question.temperature,
            "top_p": question.top_p,
            "seed": question.seed % LARGEST_SEED,
            "n": 1,
            "stream": False,
        }
        return {**body, "logprobs": 1} if self.logprobs else body

    def read(self, content: Any, question: Question) -> Answer:
        """See `Dialect`."""
        choice = _first(_in(content, "choices", list), "choices")
        finish = choice.get("finish_reason")
        value = choice.get("logprobs")
        logprobs: dict[str, Any] = value if isinstance(value, dict) else {}
        count = _count(content)
        tokens, values = self._tokens(choice, logprobs, question, count)
        if finish == "stop":
            ending = choice.get("stop_reason")
            tokens = _with_end_token(tokens, ending if isinstance(ending, int) else None, question.stops)
        # A server may leave the ending token out of the text and count it, or not.
        if count is not None and count not in (len(tokens), len(tokens) - (finish == "stop")):
            raise WrongAnswer(f"answers {len(tokens)} tokens and counts {count}")
        return Answer(tokens, _token_logprobs(values, tokens), "stop" if finish == "stop" else "length")

    def _tokens(
        self, choice: dict[str, Any], logprobs: dict[str, Any], question: Question, count: int | None
    ) -> tuple[tuple[int, ...], Any]:
        """The token ids of a choice and their log-probabilities, by the surest of the ways that the answer allows."""
        rows = logprobs.get("content")
        if isinstance(rows, list):  # the form of chats, which llama.cpp gives for completions as well, with ids
            sure = [_in(row, "logprob", (int, float)) for row in rows]
            if all(isinstance(row.get("id"), int) for row in rows):
                return _ids([row["id"] for row in rows], "logprobs.content"), sure
        values = logprobs.get("token_logprobs")
        if isinstance(choice.get("token_ids"), list):
            return _ids(choice["token_ids"], "token_ids"), values
        pieces = logprobs.get("tokens")
        if isinstance(pieces, list) and all(isinstance(piece, str) for piece in pieces):
            piece_ids = ids_of_pieces(pieces, question.checkpoint)
            if piece_ids is not None:
                return piece_ids, values
        text = _in(choice, "text", str)
        counts: tuple[int, ...] = () if count is None else (count,)
        if counts and choice.get("finish_reason") == "stop" and question.stops:
            counts = (counts[0] - 1, counts[0])  # the ending token has no text; some servers count it
        return ids_of_text(text, question.prompt_ids, question.checkpoint, counts), None


class Vllm(OpenAI):
    """vLLM's completions: further settings, and token ids in the answer (`return_token_ids`)."""

    NAME = "vllm"
    OWNER = "vllm"
    PROCESSES = ("top_k", "top_p", "min_p")
    NAMED_STOPS = True

    def body(self, question: Question) -> dict[str, Any]:
        """See `Dialect`."""
        return {
            **super().body(question),
            "top_k": question.top_k or -1,
            "min_p": question.min_p,
            "repetition_penalty": 1.0,
            # The request's own end tokens, and none of the model's beside them.
            "stop_token_ids": list(question.stops),
            "ignore_eos": True,
            "skip_special_tokens": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }


class LlamaCpp(Dialect):
    """llama.cpp's own route, with ids in the answer (`return_tokens`)."""

    NAME = "llama.cpp"
    OWNER = "llamacpp"
    PATH = "/completion"
    NAMED_STOPS = False

    def body(self, question: Question) -> dict[str, Any]:
        """See `Dialect`."""
        return {
            "prompt": list(question.prompt_ids),
            "n_predict": question.max_new_tokens,
            "temperature": question.temperature,
            "top_k": question.top_k,
            "top_p": question.top_p,
            "min_p": question.min_p,
            # Its default order tempers last; the law of a case is tempered first.
            "samplers": ["temperature", "top_k", "top_p", "min_p"],
            "repeat_penalty": 1.0,
            "seed": question.seed % LARGEST_SEED,
            "return_tokens": True,
            "n_probs": int(self.logprobs),
            "stream": False,
        }

    def read(self, content: Any, question: Question) -> Answer:
        """See `Dialect`."""
        tokens = _ids(_in(content, "tokens", list), "tokens")
        count = content.get("tokens_predicted")
        if isinstance(count, int) and count != len(tokens):
            raise WrongAnswer(f"answers {len(tokens)} tokens and counts {count}")
        rows = content.get("completion_probabilities")
        values = [_in(row, "logprob", (int, float)) for row in rows] if isinstance(rows, list) and rows else None
        finish = "stop" if content.get("stop_type") in ("eos", "word") else "length"
        return Answer(tokens, _token_logprobs(values, tokens), finish)


class SGLang(Dialect):
    """SGLang's own route, which takes `input_ids` and gives `output_ids`."""

    NAME = "sglang"
    OWNER = "sglang"
    PATH = "/generate"

    def body(self, question: Question) -> dict[str, Any]:
        """See `Dialect`."""
        settings = {
            "max_new_tokens": question.max_new_tokens,
            "temperature": question.temperature,
            "top_k": question.top_k or -1,
            "top_p": question.top_p,
            "min_p": question.min_p,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(question.stops),
            "ignore_eos": True,
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        ids = list(question.prompt_ids)
        return {"input_ids": ids, "sampling_params": settings, "return_logprob": self.logprobs, "stream": False}

    def read(self, content: Any, question: Question) -> Answer:
        """See `Dialect`."""
        tokens = _ids(_in(content, "output_ids", list), "output_ids")
        about = _in(content, "meta_info", dict)
        reason = about.get("finish_reason")
        kind, matched_token = (reason.get("type"), reason.get("matched")) if isinstance(reason, dict) else (None, None)
        if kind == "abort":
            raise WrongAnswer("answers that it aborted the request")
        if kind == "stop":
            tokens = _with_end_token(tokens, matched_token if isinstance(matched_token, int) else None, question.stops)
        rows = about.get("output_token_logprobs")
        values = [row[0] for row in rows if isinstance(row, list) and row] if isinstance(rows, list) else None
        return Answer(tokens, _token_logprobs(values, tokens), "stop" if kind == "stop" else "length")


BY_NAME: dict[str, type[Dialect]] = {dialect.NAME: dialect for dialect in (OpenAI, Vllm, LlamaCpp, SGLang)}
"""Every dialect by its name, as `specverify.backends.servers.address.DIALECTS` lists them."""


def _in(content: Any, name: str, kind: type | tuple[type, ...]) -> Any:
    """The field of a JSON object, of the wanted type; raises WrongAnswer, which shows no content."""
    value = content.get(name) if isinstance(content, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise WrongAnswer(f"answers JSON whose field {name} is missing or of the wrong type")
    return value


def _first(rows: list[Any], name: str) -> dict[str, Any]:
    if len(rows) != 1 or not isinstance(rows[0], dict):
        raise WrongAnswer(f"answers JSON with {len(rows)} {name}, expected 1")
    return rows[0]


def _count(content: Any) -> int | None:
    """The server's own number of generated tokens, or None."""
    usage = content.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) and not isinstance(count, bool) else None


def _ids(values: list[Any], name: str) -> tuple[int, ...]:
    wrong = next(
        (index for index, value in enumerate(values) if not isinstance(value, int) or isinstance(value, bool)), None
    )
    if wrong is not None:
        raise WrongAnswer(f"answers JSON whose {name}[{wrong}] is no token id")
    return tuple(values)


def _with_end_token(tokens: tuple[int, ...], ending: int | None, stops: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens and the end token, which a server may leave out, and names unless there is only one.

    Raises:
        WrongAnswer: The text ended at one of several tokens, and the server does not say at which.
    """
    if tokens and tokens[-1] in stops:
        return tokens
    if ending in stops:
        return (*tokens, ending)
    if ending is None and len(stops) > 1:
        raise WrongAnswer(f"ends a text at one of {len(stops)} end tokens and does not say at which")
    return (*tokens, *stops) if ending is None else tokens


def _token_logprobs(values: Any, tokens: tuple[int, ...]) -> tuple[float, ...] | None:
    """The log-probabilities, one a token; None where there are none, or the ending token alone has none.

    Raises:
        WrongAnswer: There are more or fewer of them than tokens.
    """
    if not isinstance(values, list) or not values:
        return None
    if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        raise WrongAnswer("answers log-probabilities that are no numbers")
    if len(values) == len(tokens) - 1:
        return None
    if len(values) != len(tokens):
        raise WrongAnswer(f"answers {len(tokens)} tokens and {len(values)} log-probabilities")
    return tuple(float(value) for value in values)


def counts_of(content: Any) -> Speculated | None:
    """The drafted tokens that the server verified and accepted for one answer, or None where it tells none.

    llama.cpp has `draft_n` and `draft_n_accepted` in `timings`, SGLang `spec_draft_token_num` and
    `spec_accept_token_num` in `meta_info`, OpenAI `accepted_prediction_tokens` and `rejected_prediction_tokens` in
    `usage.completion_tokens_details`. vLLM tells counts of all requests together, on its page of metrics alone.

    Raises:
        WrongAnswer: The counts are no whole numbers, or more tokens are accepted than were drafted.
    """
    details = _within(_within(content, "usage"), "completion_tokens_details")
    accepted, rejected = (_number(details, f"{kind}_prediction_tokens") for kind in ("accepted", "rejected"))
    # OpenAI's own server tells two zeros where a request predicts nothing.
    if accepted is not None and rejected is not None and accepted + rejected:
        return Speculated(accepted + rejected, accepted)
    for place, drafted_field, accepted_field in (
        ("timings", "draft_n", "draft_n_accepted"),
        ("meta_info", "spec_draft_token_num", "spec_accept_token_num"),
    ):
        counters = _within(content, place)
        proposed, accepted = _number(counters, drafted_field), _number(counters, accepted_field)
        if proposed is None or accepted is None:
            continue
        if accepted > proposed:
            raise WrongAnswer(f"answers {accepted} accepted tokens of {proposed} drafted ones")
        return Speculated(proposed, accepted)
    return None


def _within(content: Any, name: str) -> dict[str, Any]:
    """The object in a field, empty where there is none."""
    inner = content.get(name) if isinstance(content, dict) else None
    return inner if isinstance(inner, dict) else {}


def _number(counters: dict[str, Any], name: str) -> int | None:
    value = counters.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise WrongAnswer(f"answers JSON whose count {name} is no whole number")
    return value
