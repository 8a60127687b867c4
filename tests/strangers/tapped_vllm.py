"""vLLM under the tap: requests of a right sampler, of planted faults, and seconds with the tap and without it in turn.

`python -m tests.strangers.tapped_vllm FOLDER` writes `right.jsonl` and a file for each fault, all of one engine that
drafts from n-grams, and prints the figures as JSON. The environment has to hold the variables of the adapter.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import specverify
from specverify.adapt import checkpoint_of
from specverify.backends.adapt.engines import vllm as adapter
from specverify.backends.adapt.installed import module_of
from specverify.properties.strategies.models import BROAD
from specverify.reference.architecture import Seeded
from tests.strangers import mended_vllm

TARGET = Seeded(BROAD[1], 0)
"""The target whose checkpoint the engine opens."""

REQUESTS = 200
"""Requests of a right sampler, and of each fault."""

REQUESTS_OF = {"coins-too-small": 2}
"""Times as many requests for a fault that shifts few acceptances: 200 have evidence e^7 against it, 400 have e^18."""

REPEATS = 3
"""Times that the cost is measured without the tap, with it, and with stages."""

SAMPLER = "vllm.v1.sample.rejection_sampler"
"""The module whose names are replaced."""

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A function with a fault, made of the right one."""


def coins_times(factor: float) -> Wrapper:
    """Coins that are too small: drafted tokens are accepted too often."""
    return lambda draw: lambda *arguments, **settings: draw(*arguments, **settings) * factor


def residual_is_target(sample: Callable[..., Any]) -> Callable[..., Any]:
    """The token behind a rejection is drawn from the target's law: the rejected token may come again."""

    def recovered(*arguments: Any, **settings: Any) -> Any:
        tokens = sample(*arguments, **settings)
        law = arguments[5]
        return law.multinomial(1).flatten().to(tokens.dtype) if len(tokens) else tokens

    return recovered


def rejection_kept(choose: Callable[..., Any]) -> Callable[..., Any]:
    """The first token that is rejected stands in the text as if it were the target's."""

    def chosen(drafted: Any, counts: list[int], *arguments: Any, **settings: Any) -> Any:
        output = choose(drafted, counts, *arguments, **settings)
        first = 0
        for row, count in zip(output, counts, strict=True):
            length = int((row >= 0).sum())
            if length <= count:
                row[length - 1] = drafted[first + length - 1]
            first += count
        return output

    return chosen


def bonus_of_another_row(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The token behind the last drafted one is drawn from the logits before it."""

    def forwarded(sampler: Any, metadata: Any, *arguments: Any, **settings: Any) -> Any:
        rows = (metadata.bonus_logits_indices - 1).clamp(min=0)
        return forward(sampler, replace(metadata, bonus_logits_indices=rows), *arguments, **settings)

    return forwarded


FAULTS: dict[str, tuple[str, Wrapper]] = {
    "coins-of-zero": ("generate_uniform_probs", coins_times(0.0)),
    "coins-too-small": ("generate_uniform_probs", coins_times(0.7)),
    "residual-is-target": ("sample_recovered_tokens", residual_is_target),
    "settings-unread": ("apply_sampling_constraints", lambda _: lambda logits, *_: logits),
    "rejection-kept": ("rejection_sample", rejection_kept),
    "bonus-of-another-row": ("RejectionSampler.forward", bonus_of_another_row),
}
"""Faults of the sampler: the name in SAMPLER that is replaced, and its wrapper."""


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """Inside the `with`, the sampler has a fault of FAULTS."""
    name, wrapper = FAULTS[fault]
    owner = module_of(SAMPLER)
    *path, name = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    setattr(owner, name, wrapper(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def answer(llm: Any, requests: int, first_seed: int = 1) -> None:
    """Every third request is greedy, the others sample with seeds of their own; four run beside each other."""
    settings = module_of("vllm").SamplingParams
    engine = llm.llm_engine
    for number in range(requests):
        temperature = (0.0, 0.7, 1.0)[number % 3]
        prompt = [(7 * number + place) % 17 for place in (0, 3, 5, 3, 0, 3)]
        request = settings(
            temperature=temperature, top_p=0.9 if temperature else 1.0, seed=first_seed + number, max_tokens=8,
            logprobs=0, ignore_eos=True, detokenize=False,
        )  # fmt: skip
        engine.add_request(f"{first_seed}-{number}", {"prompt_token_ids": prompt}, request)
        if number % adapter.MOST_REQUESTS == adapter.MOST_REQUESTS - 1:
            while engine.has_unfinished_requests():
                engine.step()
    while engine.has_unfinished_requests():
        engine.step()


def seconds_in_turn(llm: Any, folder: Path, requests: int) -> dict[str, list[float]]:
    """Seconds of the same requests without the tap, with it, and with stages: REPEATS of each, in turn."""
    seconds: dict[str, list[float]] = {"untapped": [], "tapped": [], "stages": []}
    for repeat in range(REPEATS):
        for way, times in seconds.items():
            file = folder / f"cost-{way}-{repeat}.jsonl"
            context = nullcontext() if way == "untapped" else specverify.tap("vllm", file, stages=way == "stages")
            with context:
                begin = time.perf_counter()
                answer(llm, requests)
                times.append(time.perf_counter() - begin)
    return seconds


def write(figures: dict[str, Any]) -> None:
    """A line of figures as JSON."""
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


def main(folder: Path, requests: int) -> None:
    """Record the right sampler, measure its cost, and record each fault."""
    mended_vllm.open_ngram()
    llm = adapter.open_llm(str(checkpoint_of(TARGET, "float32")), "float32", "", adapter.NGRAM).llm
    with specverify.tap("vllm", folder / "right.jsonl", stages=True) as recorder:
        answer(llm, requests)
    write({"vllm": module_of("vllm").__version__, "right": recorder.runs})
    for fault in FAULTS:
        with planted(fault), specverify.tap("vllm", folder / f"{fault}.jsonl", stages=True) as recorder:
            answer(llm, requests * REQUESTS_OF.get(fault, 1))
        write({fault: recorder.runs})
    seconds = seconds_in_turn(llm, folder, requests)
    means = {way: sum(times) / len(times) for way, times in seconds.items()}
    ratios = {way: round(mean / means["untapped"], 3) for way, mean in means.items()}
    write({"seconds": seconds, "ratios": ratios})


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else REQUESTS)
