"""Faults of low-rank adapters.

A request that names an adapter runs without it, with another one, or on keys that another one made.
"""

from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.engine.kv.arena import Arena, CacheLease, CacheNeeds
from specverify.backends.engine.model.causal_lm import Rows
from specverify.backends.engine.model.low_rank import LowRank
from specverify.backends.engine.request import Request
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import attended_fault, in_place_of


@attended_fault(
    "prefix-shared-across-adapters",
    "vllm-project/vllm issues 30931 and 3264: prefix cache blocks shared between requests with different LoRA adapters",
    "a prefix cache; two prompts that begin alike, under different adapters",
)
@in_place_of("arena")
class OfTokens(Arena):
    """The prefix cache finds pages by their tokens alone, so that a request reads keys of another adapter."""

    def lease(self, needs: CacheNeeds) -> CacheLease:
        return super().lease(replace(needs, adapter=None))


@attended_fault(
    "adapter-of-the-first-lane",
    "huggingface/peft issue 1960: one active adapter for all requests of a batch in place of each request's own",
    "a batch of requests with different adapters",
)
@in_place_of("gather")
def of_the_first(seams: Seams, batch: list[Request]) -> list[Rows]:
    """All requests of a verify forward run with the adapter of the first one."""
    rows = seams.gather(batch)
    return [replace(rows_of_request, adapter=rows[0].adapter) for rows_of_request in rows]


@attended_fault(
    "adapter-left-out-of-verification",
    "family of sgl-project/sglang pull request 34337: a verify forward counts as an extend without its token counts",
    "an adapter",
)
@in_place_of("gather")
def prefill_alone(seams: Seams, batch: list[Request]) -> list[Rows]:
    """Prefills run with the adapter, and verify forwards with the bare target."""
    return [replace(rows_of_request, adapter=None) for rows_of_request in seams.gather(batch)]


class RootAlone(LowRank):
    """An adapter that is added to the first row of a block."""

    def added_output(self, module: str, rows: Tensor) -> Tensor | None:
        more = super().added_output(module, rows)
        return None if more is None else torch.cat([more[:1], torch.zeros_like(more[1:])])


@attended_fault(
    "adapter-for-one-row-per-request",
    "vllm-project/vllm-metal pull request 351 (review) and vllm-project/vllm pull request 21068: the adapter is routed "
    "to one row per decode request, although a speculative step has several",
    "an adapter, and a tree of several nodes",
)
@in_place_of("gather")
def one_row(seams: Seams, batch: list[Request]) -> list[Rows]:
    """A verify forward adds the adapter to the root's row, and to no other node."""
    return [
        rows_of_request
        if rows_of_request.adapter is None
        else replace(rows_of_request, adapter=RootAlone(rows_of_request.adapter.scale, rows_of_request.adapter.parts))
        for rows_of_request in seams.gather(batch)
    ]


@attended_fault(
    "adapter-not-divided-by-rank",
    "Blaizzy/mlx-vlm issue 845: the adapter is scaled by alpha in place of alpha / rank",
    "an adapter of a rank above 1",
)
@in_place_of("request")
class ScaledByAlpha(Request):
    """The product of the adapter counts alpha times, and not alpha / rank times."""

    def prefill(self) -> None:
        words = self.case.model.adapter
        if words is not None and self.adapter is not None:
            self.adapter = LowRank(words.alpha, self.adapter.parts)
        super().prefill()


@attended_fault(
    "prefill-without-adapter",
    "family of vllm-project/vllm issue 42125: keys of a prompt that other adapter weights made",
    "an adapter, and a prompt of several tokens",
)
@in_place_of("request")
class Bare(Request):
    """The prompt is prefilled by the bare target, and verify forwards run with the adapter."""

    def prefill(self) -> None:
        adapter = self.adapter
        self.adapter = None
        super().prefill()
        self.adapter = adapter


@attended_fault(
    "fork-keeps-keys-of-another-adapter",
    "family of vllm-project/vllm issue 30931: cached keys of one adapter serve a request with another one",
    "a fork whose twin names another adapter",
)
@in_place_of("arena")
class AnyAdapter(Arena):
    """A twin with another adapter takes over the committed columns of its source."""

    def shares(self, source: CacheLease, adapter: object) -> bool:
        return True
