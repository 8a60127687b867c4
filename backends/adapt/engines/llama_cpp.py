"""llama.cpp, as the server that the package `xllamacpp` runs inside this process.

Drafts are a model of the same vocabulary, or n-grams of the text. Models are GGUF files in float32, caches hold
float32, and flash attention is off, since on the CPU it rounds queries to 16 bits.
"""

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from http.client import HTTPConnection
from typing import Any

import xllamacpp as llama

from specverify.backends.adapt import Generated, blackbox, exported, save_gguf
from specverify.backends.adapt.export.gguf_file import ROPES, token_text

OPEN_SERVERS = 16
"""Servers that stay open; one is open in milliseconds."""

MATCHED_TOKENS, MOST_PROPOSED = 2, 3
"""Tokens that an n-gram must match, and most tokens that are proposed after it; the defaults suit long texts."""

SAMPLERS = ("temperature", "top_k", "top_p", "min_p")
"""A request's samplers in the order of `specverify.reference.sampling`; llama.cpp itself has the temperature last."""

KINDS = {
    "": llama.common_speculative_type.COMMON_SPECULATIVE_TYPE_NONE,
    "draft": llama.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE,
    "ngram": llama.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_MAP_K,
}
"""llama.cpp's kinds of speculation, by the names of our backends."""


class ServerRefused(RuntimeError):
    """The server answered with an error; the message has its status and its words."""


@lru_cache(maxsize=OPEN_SERVERS)
def server(checkpoint: str, draft: str | None, kind: str, probabilistic: bool = False) -> Any:
    """An open server on a checkpoint, with a kind of speculation of KINDS, and with a draft's checkpoint or None."""
    settings = llama.CommonParams()
    settings.model.path = str(exported(save_gguf, checkpoint))
    settings.n_ctx = 0  # as many columns as the model has positions
    settings.n_parallel = 1
    settings.n_threads_http = 1
    settings.fit_params = False
    settings.warmup = False
    settings.use_jinja = False
    settings.ui = False
    settings.verbosity = 0
    settings.cache_type_k = settings.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    speculative = settings.speculative
    speculative.types = [KINDS[kind]]
    speculative.draft.cache_type_k = speculative.draft.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    speculative.draft.probabilistic = probabilistic
    if draft is not None:
        speculative.draft.mparams.path = str(exported(save_gguf, draft))
    looked_up = speculative.ngram_map_k
    looked_up.size_n = MATCHED_TOKENS
    looked_up.size_m = MOST_PROPOSED
    looked_up.min_hits = 1
    for threads in (settings.cpuparams, settings.cpuparams_batch, speculative.draft.cpuparams):
        threads.n_threads = 1
    return llama.Server(settings)


def answer(running_server: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The server's answer to a request for `/completion`.

    Raises:
        ServerRefused: It answered with an error.
    """
    host, _, port = str(running_server.listening_address).rpartition("/")[2].rpartition(":")
    connection = HTTPConnection(host, int(port))
    try:
        connection.request("POST", "/completion", json.dumps(request), {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = json.loads(response.read())
    finally:
        connection.close()
    if response.status != 200:
        raise ServerRefused(f"llama.cpp's server answered {response.status}: {content.get('error', {}).get('message')}")
    return dict(content)


def request_of(
    prompt_ids: list[int], max_new_tokens: int, temperature: float, top_k: int, top_p: float, min_p: float, seed: int,
    stops: Sequence[int],
) -> dict[str, Any]:  # fmt: skip
    """The body of a request for `/completion`; a token that ends the text is asked for by its own text."""
    return {
        "prompt": prompt_ids,
        "n_predict": max_new_tokens,
        "return_tokens": True,
        "samplers": list(SAMPLERS),
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed % 2**32,
        "stop": [token_text(token) for token in stops],
    }


def generate_with_server(running_server: Any, request: dict[str, Any]) -> Generated:
    """The tokens of the server's answer, with its own counts of drafted tokens; it tells none where there were none."""
    content = answer(running_server, request)
    counts = content["timings"]
    return Generated(content["tokens"], proposed=counts.get("draft_n", 0), accepted=counts.get("draft_n_accepted", 0))


def with_draft(probabilistic: bool) -> Callable[..., Generated]:
    """Speculation with a draft model, whose tokens are its best ones, or with `probabilistic` drawn from its law."""

    def generate(
        prompt_ids: list[int], max_new_tokens: int, checkpoint: str, draft_checkpoint: str | None, temperature: float,
        top_k: int, top_p: float, min_p: float, seed: int, stops: Sequence[int],
    ) -> Generated:  # fmt: skip
        kind = "" if draft_checkpoint is None else "draft"
        running_server = server(checkpoint, draft_checkpoint, kind, probabilistic)
        request = request_of(prompt_ids, max_new_tokens, temperature, top_k, top_p, min_p, seed, stops)
        return generate_with_server(running_server, request)

    return generate


def with_ngrams(
    prompt_ids: list[int], max_new_tokens: int, checkpoint: str, temperature: float, top_k: int, top_p: float,
    min_p: float, seed: int, stops: Sequence[int],
) -> Generated:  # fmt: skip
    """Speculation with n-grams of the text; other kinds of n-grams of llama.cpp propose nothing in texts this short."""
    request = request_of(prompt_ids, max_new_tokens, temperature, top_k, top_p, min_p, seed, stops)
    return generate_with_server(server(checkpoint, None, "ngram"), request)


ABILITIES: dict[str, Any] = {
    "families": ("llama", "pangu", "qwen2", "qwen3", "mistral"),
    "ropes": ROPES,
    "least_window": 0,
}
"""Models that a GGUF of these architectures can describe: no layer with a window, three rotary embeddings."""

open_draft = blackbox(with_draft(False), name="llama-cpp", **ABILITIES)
open_probabilistic = blackbox(with_draft(True), name="llama-cpp-probabilistic", **ABILITIES)
open_ngram = blackbox(with_ngrams, name="llama-cpp-ngram", **ABILITIES)
