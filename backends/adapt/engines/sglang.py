"""SGLang's offline class `Engine`, with a draft model in chains or trees, n-grams or an EAGLE-3 head.

It is written against the sources of the version that FITTING names, and was tried on a stand-in with its signatures:
no device has run it. An engine runs in processes of its own. Its reload from a directory puts the same weights into
target and draft, so that an engine with a draft of other weights is opened for each pair.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specverify.backends.adapt import Generated, blackbox, exported
from specverify.backends.adapt.batches import Request
from specverify.backends.adapt.export import save_eagle3
from specverify.backends.adapt.installed import module_of, positions_accepted, positions_of
from specverify.backends.base import Unavailable
from specverify.reference.abilities import Chains

FITTING = "0.5.23"
"""The version whose sources the adapter was written against."""

STEPS = 3
"""Levels of a drafted tree."""

TOP_K = 2
"""Children of a node, where trees are drafted."""

TREE = 8
"""Nodes of a drafted tree with its root."""

LONGEST = 4096
"""Most tokens of a prompt and its text."""

MOST_REQUESTS = 4
"""Requests that an engine runs at once."""

MOST_ENGINES = 2
"""Engines that are open at once: each holds the memory of a device for its pages."""

GPU_SHARE = 0.3
"""The share of a GPU's memory for weights and pages of an engine."""

ENVIRONMENT = {
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",  # else log-probabilities are those after the temperature
    "HF_HUB_OFFLINE": "1",
}
"""The variables that SGLang reads when it is imported."""

CHUNK = 16
"""Tokens of a prompt that one forward takes, where prompts are filled in chunks."""

SETTINGS: dict[str, dict[str, Any]] = {
    "no-overlap": {"disable_overlap_schedule": True},
    "radix-cache": {"disable_radix_cache": False},
    "chunked-prefill": {"chunked_prefill_size": CHUNK},
    "no-graphs": {"disable_cuda_graph": True},
}
"""The settings in which sessions run beside the plain one: each step is scheduled when the one before has ended; pages
of prompts are kept for prompts that begin alike; prompts are filled in chunks; no forward is recorded."""

CHAIN = {
    "speculative_algorithm": "STANDALONE",
    "speculative_num_steps": STEPS,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": STEPS + 1,
}
BRANCHING = {**CHAIN, "speculative_eagle_topk": TOP_K, "speculative_num_draft_tokens": TREE}
EAGLE3 = {**BRANCHING, "speculative_algorithm": "EAGLE3"}
NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": TREE}

DRAFT = "speculative_draft_model_path"
"""The setting with the directory of a draft model or head."""


@dataclass
class OpenEngine:
    """An open engine.

    Attributes:
        engine: SGLang's `Engine`.
        drafts: Whether it speculates.
        has_own_draft: Whether a draft model or head of its own is loaded beside the target.
    """

    engine: Any
    drafts: bool
    has_own_draft: bool


def entry_of(answer: dict[str, Any], name: str) -> Any:
    """An entry of an answer, or of a part of one.

    Raises:
        Unavailable: This version's answers have no such entry.
    """
    if name not in answer:
        raise Unavailable(f"sglang {version()}: its answers have no {name}, which the adapter of {FITTING} reads")
    return answer[name]


def version() -> str:
    """The version of SGLang that is imported."""
    return str(module_of("sglang").__version__)


def check_settings(settings: dict[str, Any]) -> None:
    """Ask the installed version for its settings.

    Raises:
        Unavailable: It lacks one of them.
    """
    known_names = inspect.signature(module_of("sglang.srt.server_args").ServerArgs).parameters
    missing_name = next((name for name in settings if name not in known_names), None)
    if missing_name is not None:
        raise Unavailable(f"sglang {version()} has no setting {missing_name}, which the adapter of {FITTING} gives")


def open_engine(checkpoint: str, dtype: str, setting: str, speculation: dict[str, Any] | None) -> OpenEngine:
    """An engine on a checkpoint in a setting of SETTINGS or the plain one, with speculation or without.

    Raises:
        Unavailable: SGLang cannot be imported, or the installed version lacks a setting.
    """
    settings: dict[str, Any] = {
        "model_path": checkpoint,
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "random_seed": 0,
        "context_length": positions_of(checkpoint, LONGEST),
        "max_running_requests": MOST_REQUESTS,
        "max_total_tokens": MOST_REQUESTS * LONGEST,
        "mem_fraction_static": GPU_SHARE,
        "page_size": 1,
        "attention_backend": "triton",  # FlashInfer and FlashAttention take no float32
        "disable_radix_cache": True,
        "enable_deterministic_inference": True,  # else the seeds of requests are not read
        "log_level": "error",
        **(speculation or {}),
        **SETTINGS.get(setting, {}),
    }
    check_settings(settings)
    engine = module_of("sglang").Engine(**settings)
    return OpenEngine(engine, speculation is not None, speculation is not None and DRAFT in speculation)


def load_weights(engine: OpenEngine, checkpoint: str) -> bool:
    """Load other weights of the same shape; False where a draft of its own would get them too.

    Pages that are kept for later prompts hold keys and values of the weights before: SGLang empties its cache itself.

    Raises:
        Unavailable: SGLang refuses them.
    """
    if engine.has_own_draft:
        return False
    success, message, *_ = engine.engine.update_weights_from_disk(checkpoint)
    if not success:
        why = " ".join(str(message).split())
        raise Unavailable(f"sglang {version()} cannot load the weights in {checkpoint}: {why}")
    return True


def close_engine(engine: OpenEngine) -> None:
    """End an engine's processes."""
    engine.engine.shutdown()


def settings_of(request: Request) -> dict[str, Any]:
    """The settings of a request in SGLang's words."""
    return {
        "temperature": request.temperature,
        "top_k": request.top_k or -1,
        "top_p": request.top_p,
        "max_new_tokens": request.max_new_tokens,
        "sampling_seed": request.seed,
        "stop_token_ids": list(request.stops),
        "ignore_eos": True,
        "no_stop_trim": True,
    }


def generate(
    engine: OpenEngine, prompt_ids: list[int], max_new_tokens: int, temperature: float = 0.0, top_k: int = 0,
    top_p: float = 1.0, seed: int = 0, stops: Sequence[int] = (),
) -> Generated:  # fmt: skip
    """The answer to a request, with the model's own log-probabilities and the engine's counts of drafted tokens."""
    request = Request(prompt_ids, max_new_tokens, temperature, top_k, top_p, seed=seed, stops=tuple(stops))
    (answer,) = generate_many(engine, [request])
    return answer


def generate_many(engine: OpenEngine, requests: list[Request]) -> list[Generated]:
    """The answers to several requests, which the engine runs at once."""
    answers = engine.engine.generate(
        input_ids=[list(request.prompt_ids) for request in requests],
        sampling_params=[settings_of(request) for request in requests],
        return_logprob=True,
    )
    return [generated_of(answer, engine.drafts) for answer in answers]


def generated_of(answer: dict[str, Any], drafts: bool) -> Generated:
    """The tokens and log-probabilities of an answer, and its counts where the engine `drafts`.

    An answer without a verification has no counts, and drafted nothing.

    Raises:
        Unavailable: This version's answers lack what is read.
    """
    facts = entry_of(answer, "meta_info")
    tokens = [int(token) for token in entry_of(answer, "output_ids")]
    logprobs = [float(entry[0]) for entry in entry_of(facts, "output_token_logprobs")]
    if not drafts or "spec_verify_ct" not in facts:
        return Generated(tokens, logprobs, 0, 0)
    proposed, accepted = (int(entry_of(facts, f"spec_num_{kind}_drafts")) for kind in ("proposed", "correct"))
    by_position = positions_accepted(facts.get("spec_correct_drafts_histogram") or [])
    return Generated(tokens, logprobs, proposed, accepted, by_position or None)


def with_draft_model(speculation: dict[str, Any]) -> Callable[..., OpenEngine]:
    """An opener of engines with a draft model, and of engines without speculation for runs without a draft."""

    def open_pair(checkpoint: str, draft_checkpoint: str | None, dtype: str, setting: str) -> OpenEngine:
        with_draft = None if draft_checkpoint is None else {**speculation, DRAFT: draft_checkpoint}
        return open_engine(checkpoint, dtype, setting, with_draft)

    return open_pair


def open_with_ngrams(checkpoint: str, dtype: str, setting: str) -> OpenEngine:
    """An engine that drafts from the n-grams of its texts."""
    return open_engine(checkpoint, dtype, setting, NGRAM)


def open_with_eagle3(checkpoint: str, dtype: str, setting: str) -> OpenEngine:
    """An engine with an EAGLE-3 head that is made for the checkpoint."""
    return open_engine(checkpoint, dtype, setting, {**EAGLE3, DRAFT: str(exported(save_eagle3, checkpoint))})


ABILITIES: dict[str, Any] = {
    "device": "cuda",
    "families": ("llama", "qwen2", "qwen3", "mistral"),
    "ropes": ("default", "linear", "dynamic", "yarn", "llama3"),
    "head_multiple": 16,
    "longest": LONGEST,
    "reload": load_weights,
    "close": close_engine,
    "most_shapes": MOST_ENGINES,
    "environment": ENVIRONMENT,
    "generate_many": generate_many,
    "most_requests": MOST_REQUESTS,
    "own_seed": True,
    "settings": tuple(SETTINGS),
}
"""The declaration of the adapter, the same for every way of drafting."""

BY_OWN_TEXT = {**ABILITIES, "own_drafts": True}
"""The declaration where a request's drafts follow from its own text; n-grams come from texts of all requests."""

open_draft_model = blackbox(generate, name="sglang", open=with_draft_model(CHAIN), chains=Chains(STEPS), **BY_OWN_TEXT)
open_tree = blackbox(generate, name="sglang-tree", open=with_draft_model(BRANCHING), **BY_OWN_TEXT)
open_eagle3 = blackbox(generate, name="sglang-eagle3", open=open_with_eagle3, **BY_OWN_TEXT)
open_ngram = blackbox(generate, name="sglang-ngram", open=open_with_ngrams, **ABILITIES)
