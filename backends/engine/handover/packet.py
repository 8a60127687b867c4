"""Packets: a request as bytes, and the checks of the side that receives them.

A packet is one safetensors file. Its metadata holds the facts as JSON; its tensors are keys and values by layer, and
hidden states. The receiver knows which request is to come (`ExpectedRequest`). Everything that a decode needs is either
in the packet and fits, or `BadHandOver` says in one line what does not: nothing is padded, cropped or guessed.

The facts are those that serving engines send, or lose, between prefill and decode: pages, the first token and its
log-probability, hidden rows of the draft's width, positions (SGLang); a digest of both sides' settings (vLLM's
connectors); the state of coins and grammar, which neither sends.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from specverify.backends.engine.handover.state import Columns, RequestState
from specverify.backends.engine.kv.base import CacheSpec
from specverify.backends.engine.kv.state_slots import LayerStates
from specverify.reference.case import Case
from specverify.reference.case_json import case_to_json

FORMAT = "specverify hand-over 1"

SHARED_PARTS = ("model", "dtype", "prompt", "draft", "sampling", "stops")
"""Parts of a case on which both sides must agree; each travels as a digest."""

NUMBERS = ("position", "proposed", "draft_calls", "draft_steps", "prefill_calls", "decode_calls", "verify_calls")
"""Facts that are whole numbers from 0 upwards."""


class BadHandOver(ValueError):
    """A packet that cannot be taken; the message says in one line what is wrong, and where."""


@dataclass(frozen=True)
class ExpectedRequest:
    """The request that the receiver waits for.

    Attributes:
        case: The request as a case without mates.
        room: Its number in the session, by which both sides name it.
        hop: How many times it was handed over before.
        target: The sizes of its target cache.
        draft: The sizes of its draft's cache; None for a draft without a model of its own.
        hidden: The width of the hidden states that its draft reads; 0 if it reads none.
    """

    case: Case
    room: int
    hop: int
    target: CacheSpec
    draft: CacheSpec | None
    hidden: int


def digests(case: Case) -> dict[str, str]:
    """A short digest of each part of `case` that both sides must have in common."""
    content = case_to_json(case)
    parts = {name: json.dumps(content.get(name), sort_keys=True) for name in SHARED_PARTS}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:12] for name, text in parts.items()}


def pack(state: RequestState, case: Case, room: int, hop: int) -> bytes:
    """The packet of the request of `case` in `state`; `room` and `hop` as in `ExpectedRequest`."""
    facts: dict[str, Any] = {"format": FORMAT, "room": room, "hop": hop, "case": digests(case)}
    facts |= {name: getattr(state, name) for name in (*NUMBERS, "tokens", "lengths", "matched", "logprob")}
    tensors: dict[str, Tensor] = {} if state.hidden is None else {"hidden": state.hidden}
    for role, columns in (("target", state.target), ("draft", state.draft)):
        if columns is None:
            facts[role] = None
            continue
        facts[role] = {"length": columns.length, "first": columns.first}
        for kind in ("keys", "values"):
            tensors |= {
                f"{role}.{kind}.{layer}": layer_tensor for layer, layer_tensor in enumerate(getattr(columns, kind))
            }
        for layer, (window, memory) in (columns.recurrent or {}).items():
            tensors |= {f"{role}.window.{layer}": window, f"{role}.memory.{layer}": memory}
    contiguous_tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return bytes(save(contiguous_tensors, {"facts": json.dumps(facts)}))


def unpack(data: bytes, expected: ExpectedRequest) -> RequestState:
    """The state in the packet `data`, if the packet is whole and of the request that is expected.

    Raises:
        BadHandOver: It is not.
    """
    facts, tensors = read_packet(data)
    _check_request(facts, expected)
    text = _check_text(facts, expected.case)
    columns = {}
    for role, spec in (("target", expected.target), ("draft", expected.draft)):
        columns[role] = _columns(facts, tensors, role, spec, len(text) - 1)
    hidden = _hidden(tensors, expected.hidden, len(text) - 1)
    if tensors:
        raise BadHandOver(f"tensor {min(tensors)} belongs to nothing that this request has")
    assert columns["target"] is not None
    return RequestState(
        tokens=text,
        lengths=tuple(facts["lengths"]),
        matched=facts["matched"],
        logprob=facts["logprob"],
        target=columns["target"],
        draft=columns["draft"],
        hidden=hidden,
        **{name: facts[name] for name in NUMBERS},
    )


def read_packet(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The facts and the tensors of a packet.

    Raises:
        BadHandOver: It is no packet.
    """
    try:
        tensors = load(data)
        # The eight bytes before the header hold its length; `load` has checked both.
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        facts = json.loads(header.get("__metadata__", {}).get("facts", "null"))
    except (SafetensorError, ValueError) as error:
        raise BadHandOver(f"the packet is no whole safetensors file ({' '.join(str(error).split())[:80]})") from None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        format_name = facts.get("format") if isinstance(facts, dict) else None
        raise BadHandOver(f"the packet's format is {format_name!r}; this side reads {FORMAT!r}")
    return facts, tensors


def _check_request(facts: dict[str, Any], expected: ExpectedRequest) -> None:
    known_facts = {
        *NUMBERS,
        "format",
        "room",
        "hop",
        "case",
        "tokens",
        "lengths",
        "matched",
        "logprob",
        "target",
        "draft",
    }
    missing_facts, unknown_facts = sorted(known_facts - set(facts)), sorted(set(facts) - known_facts)
    if missing_facts or unknown_facts:
        raise BadHandOver(
            f"the packet lacks {missing_facts[0]}" if missing_facts else f"the packet has a fact {unknown_facts[0]!r}"
        )
    if facts["room"] != expected.room:
        raise BadHandOver(f"the packet is of request {facts['room']}; request {expected.room} is expected")
    if facts["hop"] != expected.hop:
        raise BadHandOver(f"the packet is of hand-over {facts['hop']} of its request; {expected.hop} is expected")
    sent_digests = facts["case"]
    digests_here = digests(expected.case)
    for name in SHARED_PARTS:
        sent_digest = sent_digests.get(name) if isinstance(sent_digests, dict) else None
        if sent_digest != digests_here[name]:
            raise BadHandOver(
                f"the {name} of the sender has the digest {sent_digest}, the receiver's {digests_here[name]}"
            )
    for name in NUMBERS:
        if not _is_whole_number(facts[name]):
            raise BadHandOver(f"{name} is {facts[name]!r}, no whole number from 0 upwards")


def _check_text(facts: dict[str, Any], case: Case) -> tuple[int, ...]:
    """The tokens of the packet, if they continue the prompt, and the numbers that follow from them are theirs."""
    tokens, lengths = facts["tokens"], facts["lengths"]
    if not isinstance(tokens, list) or not all(
        _is_whole_number(token) and token < case.model.vocab_size for token in tokens
    ):
        raise BadHandOver(f"tokens are no list of ids below {case.model.vocab_size}")
    if tuple(tokens[: len(case.prompt)]) != case.prompt:
        raise BadHandOver("the text does not begin with the prompt")
    output = len(tokens) - len(case.prompt)
    if (
        not isinstance(lengths, list)
        or not all(_is_whole_number(length) for length in lengths)
        or len(lengths) > output
    ):
        raise BadHandOver(f"lengths tell of more steps than the {output} output tokens, or are no numbers")
    if facts["draft_steps"] > len(lengths):
        raise BadHandOver(f"the draft has taken {facts['draft_steps']} steps, and the request {len(lengths)}")
    if facts["position"] != len(tokens) - 1:
        raise BadHandOver(f"the root's position is {facts['position']}; the text has {len(tokens)} tokens")
    matched = facts["matched"]
    guided = case.sampling.grammar is not None
    if (matched is not None) != guided or (guided and not (_is_whole_number(matched) and matched <= output)):
        raise BadHandOver(f"the grammar has read {matched!r} tokens of an output of {output}")
    logprob = facts["logprob"]
    if (logprob is not None) != (output > 0) or (output and not (isinstance(logprob, float) and logprob <= 0)):
        raise BadHandOver(f"the log-probability of the last of {output} output tokens is {logprob!r}")
    return tuple(tokens)


def _columns(
    facts: dict[str, Any], tensors: dict[str, Tensor], role: str, spec: CacheSpec | None, most: int
) -> Columns | None:
    """The columns of a cache; takes its tensors out of `tensors`."""
    cache_facts = facts[role]
    if (cache_facts is None) != (spec is None):
        raise BadHandOver(
            f"the packet has {'no' if cache_facts is None else 'a'} {role} cache; the request has it otherwise"
        )
    if cache_facts is None or spec is None:
        return None
    length = cache_facts.get("length")
    first = cache_facts.get("first")
    fits = _is_whole_number(length) and (length == most if role == "target" else length <= most)
    if not fits:
        raise BadHandOver(f"the {role} cache has {length!r} columns; the text has {most} tokens before its root")
    if (
        not isinstance(first, list)
        or len(first) != spec.layers
        or not all(_is_whole_number(column) and column <= length for column in first)
    ):
        raise BadHandOver(f"the first columns of the {role} cache are {first!r}; it has {spec.layers} layers")
    tensors_by_kind: dict[str, list[Tensor]] = {"keys": [], "values": []}
    for layer, begin in enumerate(first):
        reach = spec.reaches[layer].first(length)
        if begin > reach:
            raise BadHandOver(
                f"layer {layer} of the {role} cache begins at column {begin}; its rows see column {reach}"
            )
        heads, widths, dtype = spec.cells(layer)
        for kind, width in zip(tensors_by_kind, widths, strict=True):
            shape = (heads, length - begin, width)
            tensors_by_kind[kind].append(_tensor(tensors, f"{role}.{kind}.{layer}", shape, dtype).to(spec.device))
    states = _states(tensors, role, spec, length)
    return Columns(length, tuple(first), tuple(tensors_by_kind["keys"]), tuple(tensors_by_kind["values"]), states)


def _states(tensors: dict[str, Tensor], role: str, spec: CacheSpec, length: int) -> LayerStates | None:
    """The recurrent states of a cache; takes their tensors out of `tensors`."""
    if not spec.recurrent:
        return None
    states: LayerStates = {}
    for layer in range(spec.layers):
        pair = [tensors.pop(f"{role}.{kind}.{layer}", None) for kind in ("window", "memory")]
        window, memory = pair
        if (window is None) != (memory is None):
            raise BadHandOver(f"layer {layer} of the {role} has half of its recurrent state")
        if window is not None and memory is not None:
            states[layer] = (window.to(spec.device), memory.to(spec.device))
    if length and len(states) != spec.recurrent:
        raise BadHandOver(f"the {role} has recurrent states of {len(states)} layers; {spec.recurrent} are expected")
    return states


def _tensor(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    tensor = tensors.pop(name, None)
    if tensor is None:
        raise BadHandOver(f"tensor {name} is missing")
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise BadHandOver(f"tensor {name} is {tensor.dtype} {list(tensor.shape)}; expected {dtype} {list(shape)}")
    if not bool(tensor.isfinite().all()):
        raise BadHandOver(f"tensor {name} holds numbers that are not finite")
    return tensor


def _hidden(tensors: dict[str, Tensor], width: int, rows: int) -> Tensor | None:
    states = tensors.pop("hidden", None)
    if states is None and not (width and rows):
        return None
    if states is None:
        raise BadHandOver(f"the draft reads hidden states of width {width}, and the packet has none")
    if not width:
        raise BadHandOver("the packet has hidden states, and the draft reads none")
    if tuple(states.shape) != (rows, width):
        raise BadHandOver(f"hidden states are {list(states.shape)}; expected {[rows, width]}")
    if not bool(states.isfinite().all()):
        raise BadHandOver("hidden states hold numbers that are not finite")
    return states


def _is_whole_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
