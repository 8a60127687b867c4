"""The part of a request that prefills its tokens and scores its prompt."""

import torch
from torch import Tensor

from specverify.backends.engine.handover.carrying import Carrying
from specverify.backends.engine.uploads import upload
from specverify.reference.case import Case
from specverify.reference.trace import Stage


class Prefilling(Carrying):
    """A request whose tokens are committed by `prefill`.

    Attributes:
        prompt_logprobs: The log-probability of each token of the prompt but the first; None unless it is asked for.
    """

    stage: Stage
    prompt_logprobs: tuple[float, ...] | None = None

    @staticmethod
    def can_share_columns(case: Case) -> bool:
        """Whether a request of `case` may begin with columns that another request has computed.

        No page holds the logits of a prompt.
        """
        return not case.sampling.prompt_logprobs

    def prefill(self) -> None:
        """Commit every token but the pending root; tokens whose KV the cache already holds are not run again."""
        self.stage = Stage.ATTENDED  # the first stage that runs the target
        cache = self.lease.target
        first = cache.length
        attend = self.seams.prefill_attend or self.seams.attend
        lanes = self.seams.kv.single
        chunk = self.case.layout.prefill_chunk
        reads = self.case.draft.reads
        if reads is None or first == 0:
            self.forget_states()
        elif not self._hidden:
            self._hidden = [self.states_of_pages(first)]
        if reads is not None and sum(map(len, self._hidden)) != first:
            raise ValueError("a draft that reads hidden states needs those of tokens whose KV was there already")
        # A restored request has told them before it was evicted.
        wants_scores = self.case.sampling.prompt_logprobs and self.prompt_logprobs is None
        scores: list[Tensor] | None = [] if wants_scores else None
        new_states = self.target.prefill(
            tuple(self.tokens[first:-1]),
            cache,
            attend,
            chunk,
            lanes,
            reads,
            self.seams.tap,
            self.adapter,
            scores,
            self.axes,
        )
        self._hidden += new_states
        if new_states:
            self.keep_states(first, torch.cat(new_states))
        if scores is not None:
            self.prompt_logprobs = tuple(self.scored_prompt(scores, first))

    def scored_prompt(self, scores: list[Tensor], first: int) -> list[float]:
        """The log-probability of each token of the prompt behind token `first`, up to which the cache held KV before.

        `scores` are the logits of the tokens from `first` to the last but one, [tokens, vocabulary] for each forward.
        """
        following = self.tokens[first + 1 : len(self.case.prompt)]
        rows = self.seams.logprobs(torch.cat(scores)) if scores else torch.empty(0, 1)
        following_ids = upload(torch.tensor(following, dtype=torch.long), rows.device)
        logprobs: list[float] = rows.gather(1, following_ids[:, None])[:, 0].tolist()
        return logprobs
