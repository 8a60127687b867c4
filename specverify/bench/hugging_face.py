"""Transformers' own generation on the target of a case, greedy or sampled as the case says.

It runs the target alone, with prompt lookup, or with an assistant model.

Token times are those at which `generate` hands tokens to a streamer.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from specverify.backends.adapt.models import transformers_model
from specverify.bench.memory import MB, num_parameters, storage_bytes, weight_bytes
from specverify.bench.turn import Turn
from specverify.reference.case import Case

PLAIN, LOOKUP, ASSISTED = "transformers", "transformers-lookup", "transformers-assisted"
"""The ways: target alone, prompt lookup, and the same draft model as ours."""

LOOKUP_TOKENS = 10
"""Tokens that prompt lookup proposes; transformers' own documentation takes this number."""


class Times:
    """A streamer that notes when tokens come; the first call brings the prompt."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.counts: list[int] = []
        self._prompted = False

    def put(self, tokens: torch.Tensor) -> None:
        """Take the tokens of one step, or the prompt."""
        if self._prompted:
            self.times_s.append(time.perf_counter())
            self.counts.append(tokens.numel())
        self._prompted = True

    def end(self) -> None:
        """The text has ended."""


def generate_turn(way: str, case: Case, prompt: int, repeat: int, eager: bool = False) -> Turn:
    """One generation of transformers for the prompt of `case`; the model stays open for the next."""
    return continue_turn(way, case, prompt, repeat, eager=eager)[0]


def continue_turn(
    way: str, case: Case, prompt: int, repeat: int, cache: Any = None, eager: bool = False
) -> tuple[Turn, Any]:
    """A generation behind the cache `cache`, whose columns hold a beginning of the prompt; None for no cache.

    Target and assistant run torch's fused attention where they support it; with `eager`, transformers' eager one, as
    our engine does in mode eager-aligned.

    Returns:
        The turn, and the cache at its end.
    """
    network = transformers_model(case.model, case.dtype)
    options: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
    options["do_sample"] = not case.sampling.greedy
    if not case.sampling.greedy:
        sampling = case.sampling
        options |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        torch.manual_seed(sampling.seed)
    columns = 0 if cache is None else int(cache.get_seq_length())
    if way == LOOKUP:
        options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
    elif way == ASSISTED:
        assert case.draft.model is not None
        options["assistant_model"] = transformers_model(case.draft.model, case.dtype, role="draft")
    times = Times()
    ids = torch.tensor([case.prompt])
    networks = [network, *([options["assistant_model"]] if way == ASSISTED else [])]
    with torch.no_grad(), attention_of(networks, eager):
        began = time.perf_counter()
        output = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=case.stops.room(len(case.prompt)),
            eos_token_id=list(case.stops.eos) or None,
            pad_token_id=0,
            streamer=times,
            return_dict_in_generate=True,
            **options,
        )
        seconds = time.perf_counter() - began
    parameters = _draft_parameters(way, case)
    tokens = tuple(output.sequences[0, len(case.prompt) :].tolist())
    steps = tuple(at_s - began for at_s in times.times_s)
    turn = Turn(
        prompt,
        repeat,
        way,
        tokens,
        seconds,
        steps,
        emitted=tuple(times.counts),
        target_mb=weight_bytes(network) / MB,
        draft_mb=storage_bytes(parameters) / MB,
        draft_parameters=num_parameters(parameters),
        context=len(case.prompt),
        kept=columns,
    )
    return turn, output.past_key_values


@contextmanager
def attention_of(networks: Sequence[Any], eager: bool) -> Iterator[None]:
    """Inside the `with`, these models run transformers' eager attention, or torch's fused one where they support it.

    A checkpoint is opened with eager attention, which is no baseline for an engine with a fused one.
    """
    attentions_before = [network.config._attn_implementation for network in networks]
    for network in networks:
        fused = not eager and getattr(network, "_supports_sdpa", False)
        network.set_attn_implementation("sdpa" if fused else "eager")
    try:
        yield
    finally:
        for network, attention in zip(networks, attentions_before, strict=True):
            network.set_attn_implementation(attention)


def _draft_parameters(way: str, case: Case) -> list[torch.Tensor]:
    """The weights of the assistant; none for a way without one."""
    if way != ASSISTED or case.draft.model is None:
        return []
    return list(transformers_model(case.draft.model, case.dtype, role="draft").parameters())
