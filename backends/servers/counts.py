"""Counts of drafted tokens in a server's answer.

Servers tell them under names of their own, beside the text and whatever the dialect of the question. An answer without
them says nothing of speculation: llama.cpp leaves them out where it drafted nothing.
"""

from typing import Any

from specverify.backends.servers.web import WrongAnswer
from specverify.reference.trace import Speculated


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
