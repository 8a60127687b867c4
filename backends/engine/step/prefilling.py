"""The part of a request that prefills its tokens and scores its prompt.

A prefill has forwards of its own, or its chunks are rows of the forwards in which other requests take steps (mixed
batches: chunked prefill in vLLM, `enable_mixed_chunk` in SGLang).
"""

import torch
from torch import Tensor

from specverify.backends.engine.handover.carrying import Carrying
from specverify.backends.engine.model.causal_lm import Rows, commit_all
from specverify.backends.engine.uploads import upload
from specverify.reference.case import Case
from specverify.reference.trace import Stage


class Prefilling(Carrying):
    """A request whose tokens are committed by `prefill`.

    Attributes:
        prompt_logprobs: The log-probability of each token of the prompt but the first; None unless it is asked for.
        filling: Whether tokens before the pending root wait for their columns: the request takes no step yet.
    """

    stage: Stage
    prompt_logprobs: tuple[float, ...] | None = None
    filling: bool = False
    _begun_at: int = 0
    _chunk_scores: list[Tensor] | None = None

    @staticmethod
    def can_share_columns(case: Case) -> bool:
        """Whether a request of `case` may begin with columns that another request has computed.

        No page holds the logits of a prompt.
        """
        return not case.sampling.prompt_logprobs

    def prefill(self) -> None:
        """Commit every token but the pending root; tokens whose KV the cache already holds are not run again."""
        if not self.filling:
            self.begin_prefill()
        cache = self.lease.target
        new_states = self.target.prefill(
            tuple(self.tokens[cache.length : -1]),
            cache,
            self.seams.prefill_attend or self.seams.attend,
            self.case.layout.prefill_chunk,
            self.seams.kv.single,
            self.case.draft.reads,
            self.seams.tap,
            self.adapter,
            self._chunk_scores,
            self.axes,
        )
        if new_states:
            self._add_states(cache.length, torch.cat(new_states))
        self._end_prefill()

    def begin_prefill(self) -> None:
        """Begin a prefill, whose rows `prefill` runs at once, or `chunk_rows` and `take_chunk` piece by piece."""
        self.stage = Stage.ATTENDED  # the first stage that runs the target
        first = self.lease.target.length
        reads = self.case.draft.reads
        if reads is None or first == 0:
            self.forget_states()
        elif not self._hidden:
            self._hidden = [self.states_of_pages(first)]
        if reads is not None and sum(map(len, self._hidden)) != first:
            raise ValueError("a draft that reads hidden states needs those of tokens whose KV was there already")
        # A restored request has told them before it was evicted.
        wants_scores = self.case.sampling.prompt_logprobs and self.prompt_logprobs is None
        self._chunk_scores = [] if wants_scores else None
        self._begun_at = first
        self.filling = first < len(self.tokens) - 1
        if not self.filling:
            self._end_prefill()

    def chunk_rows(self) -> Rows:
        """The next rows of the prefill, as many as a chunk of the layout has (0: all) and the cache takes at once."""
        cache = self.lease.target
        missing_tokens = self.tokens[cache.length : -1]
        widths = (self.case.layout.prefill_chunk, cache.most_rows, len(missing_tokens))
        width = min(width for width in widths if width)
        return self.target.causal_rows(tuple(missing_tokens[:width]), cache, self.adapter, self.axes)

    def take_chunk(self, logits: Tensor, states: Tensor | None) -> None:
        """Commit the rows of `chunk_rows` after their forward.

        `logits` are those of the rows, [rows, vocabulary], and `states` the hidden states that the draft reads,
        [rows, width].
        """
        cache = self.lease.target
        commit_all(cache, len(logits))
        if self._chunk_scores is not None:
            self._chunk_scores.append(logits)
        if states is not None:
            self._add_states(cache.length, states)
        self.filling = cache.length < len(self.tokens) - 1
        if not self.filling:
            self._end_prefill()

    def _add_states(self, end: int, states: Tensor) -> None:
        """Keep the hidden states of the columns up to `end`."""
        self._hidden.append(states)
        self.keep_states(end - len(states), states)

    def _end_prefill(self) -> None:
        self.filling = False
        if self._chunk_scores is not None:
            self.prompt_logprobs = tuple(self.scored_prompt(self._chunk_scores, self._begun_at))
        self._chunk_scores = None

    def scored_prompt(self, scores: list[Tensor], first: int) -> list[float]:
        """The log-probability of each token of the prompt behind token `first`, up to which the cache held KV before.

        `scores` are the logits of the tokens from `first` to the last but one, [tokens, vocabulary] for each forward.
        """
        following = self.tokens[first + 1 : len(self.case.prompt)]
        rows = self.seams.logprobs(torch.cat(scores)) if scores else torch.empty(0, 1)
        following_ids = upload(torch.tensor(following, dtype=torch.long), rows.device)
        logprobs: list[float] = rows.gather(1, following_ids[:, None])[:, 0].tolist()
        return logprobs
