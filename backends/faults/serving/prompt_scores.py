"""Faults of the log-probabilities of a prompt."""

from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.engine.request import Request
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import emitted_fault, in_place_of
from specverify.reference.case import Case


@emitted_fault(
    "prompt-logprobs-of-the-token-itself",
    "family of vllm-project/vllm issue 3251: log-probabilities of a prompt's first tokens read from other rows",
    "a request that asks for the log-probabilities of a prompt of several tokens",
)
def of_itself(seams: Seams) -> Seams:
    """Each row of the prefill scores its own token in place of the next one."""

    class Itself(seams.request):  # type: ignore[misc,name-defined]
        def scored_prompt(self, scores: list[Tensor], first: int) -> list[float]:
            own_tokens = self.case.prompt[first:-1]
            logprobs: list[float] = (
                seams.logprobs(torch.cat(scores))[range(len(own_tokens)), own_tokens].tolist() if scores else []
            )
            return logprobs

    return replace(seams, request=Itself)


@emitted_fault(
    "prompt-logprobs-of-known-pages-zero",
    "vllm-project/vllm pull request 42245: the log-probabilities of cached prefix positions were never computed",
    "a prefix cache, and a request that asks for the log-probabilities of a prompt whose first page is kept",
)
@in_place_of("request")
class KnownPages(Request):
    """A request that asks for its prompt's log-probabilities takes known pages, whose places hold zeros."""

    @staticmethod
    def can_share_columns(case: Case) -> bool:
        return True

    def scored_prompt(self, scores: list[Tensor], first: int) -> list[float]:
        return [0.0] * first + list(super().scored_prompt(scores, first))


@emitted_fault(
    "prompt-logprobs-end-of-chunk-lost",
    "family of vllm-project/vllm issue 8268: log-probabilities of a prompt that is prefilled in parts",
    "chunked prefill; a request that asks for the log-probabilities of its prompt",
)
@in_place_of("request")
class PartedPrompt(Request):
    """The last row of a chunk has no next token in that chunk, and its log-probability stays zero."""

    def scored_prompt(self, scores: list[Tensor], first: int) -> list[float]:
        logprobs = list(super().scored_prompt(scores, first))
        end = 0
        for rows in scores[:-1]:
            end += len(rows)
            logprobs[end - 1] = 0.0
        return logprobs
