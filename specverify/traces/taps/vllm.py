"""The tap of vLLM: its scheduler and its model runner, in each process that loads vLLM's plug-ins.

The scheduler tells requests, emitted tokens and why they end; the model runner tells drafted tokens, the tokens that
the sampler chose, and with `stages` the target's logits and the proposals. Both are in one process unless a target is
spread over several, where the trace shows what the scheduler knows.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specverify.traces.taps.patching import Wrapped
from specverify.traces.taps.recorder import RecordedRequest, Recorder, one_hot_rows, rows_of

FITTING = "0.32"
"""The version whose inner names the tap knows; no other was run."""

RUNNER = ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner")
"""The class of the model runner, of which that of CPUs is a subclass."""

SCHEDULER = ("vllm.v1.core.sched.scheduler", "Scheduler")
"""The class of the scheduler, of which the asynchronous one is a subclass."""

MOST_WAITING = 8
"""Batches of a request that wait for the scheduler; one that runs a step ahead has two."""

NOT_TOLD = {
    "stop": "stop strings",
    "logit_bias": "logit_bias",
    "allowed_token_ids": "allowed_token_ids",
    "bad_words": "bad_words",
    "repetition_detection": "repetition_detection",
    "thinking_token_budget": "thinking_token_budget",
    "extra_args": "extra_args",
}
"""Settings of a request that the format does not have, each in words."""

GREEDY_BELOW = 1e-5
"""The temperature below which vLLM decodes greedily."""


@dataclass
class Batch:
    """A batch that was sampled.

    Attributes:
        sampled: int [requests, drafted + 1]; the chosen tokens, -1 behind them.
        counts: The number of drafted tokens of each request.
        drafted: int [all drafted tokens] in the order of requests, or None.
        logits: [all rows, vocabulary]; those of a request are its drafted tokens and one more; None without stages.
        proposals: [all drafted tokens, vocabulary] laws that drafted tokens were drawn from; None if they were not.
    """

    sampled: Any
    counts: list[int]
    drafted: Any = None
    logits: Any = None
    proposals: Any = None


@dataclass
class Row:
    """The place of a request in a batch."""

    batch: Batch
    index: int

    @property
    def chosen(self) -> list[int]:
        """The accepted tokens and the one behind them."""
        return [token for token in self.batch.sampled[self.index].tolist() if token >= 0]

    @property
    def drafted(self) -> list[int]:
        """The drafted chain."""
        count, first = self.batch.counts[self.index], self._first_drafted
        return [] if not count else self.batch.drafted[first : first + count].tolist()

    def stages(self, is_greedy: bool, vocabulary: int) -> dict[str, Any]:
        """Logits and proposals; none where they were not kept."""
        if self.batch.logits is None:
            return {}
        count, first = self.batch.counts[self.index], self._first_drafted
        begin = first + self.index
        fields: dict[str, Any] = {"scored.logits": rows_of(self.batch.logits[begin : begin + count + 1, :vocabulary])}
        if not is_greedy:
            laws = one_hot_rows(self.drafted, vocabulary)
            if count and self.batch.proposals is not None:
                laws[1:] = rows_of(self.batch.proposals[first : first + count, :vocabulary])
            fields["drafted.proposal"] = laws
        return fields

    @property
    def _first_drafted(self) -> int:
        return sum(self.batch.counts[: self.index])


class VllmTap:
    """Wraps vLLM's scheduler and model runner of this process.

    Raises:
        MissingInput: The installed version lacks a name that is wrapped.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._wrapped = Wrapped("vllm", FITTING)
        self._rows: dict[str, deque[Row]] = {}
        self._requests: dict[str, RecordedRequest | None] = {}
        self._version = str(getattr(self._wrapped.owner("vllm"), "__version__", ""))
        self._wrapped.wrap(self._wrapped.owner(*RUNNER), "_sample", self.watch_sampler)
        self._wrapped.wrap(self._wrapped.owner(*SCHEDULER), "update_from_output", self._watch_scheduler)

    def close(self) -> None:
        """Unwrap, and name the requests that had not ended."""
        self._wrapped.restore()
        for request in self._requests.values():
            if request is not None:
                self.recorder.leave_out("not ended when the recording did")
        self._requests.clear()

    def watch_sampler(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        """`sample`, a `_sample` of a model runner, which notes each batch."""

        def sampled(runner: Any, logits: Any, spec_decode_metadata: Any) -> Any:
            batch = self._batch_before(runner, logits, spec_decode_metadata)
            output = sample(runner, logits, spec_decode_metadata)
            batch.sampled = output.sampled_token_ids
            names = runner.input_batch.req_ids
            # The rows of prompts that are not whole yet are sampled too, and nobody reads them.
            discarded = runner.discard_request_mask.np[: len(names)]
            for index, name in enumerate(names):
                if not discarded[index] and self.recorder.settings.takes(name):
                    self._rows.setdefault(name, deque(maxlen=MOST_WAITING)).append(Row(batch, index))
            return output

        return sampled

    def _batch_before(self, runner: Any, logits: Any, metadata: Any) -> Batch:
        """The batch without its tokens; logits are copied, since samplers change them in place."""
        requests = len(runner.input_batch.req_ids)
        counts = [0] * requests if metadata is None else list(metadata.num_draft_tokens)
        batch = Batch(None, counts, None if metadata is None else metadata.draft_token_ids)
        if self.recorder.settings.stages and logits is not None:
            batch.logits = logits.detach().clone()
            if metadata is not None:
                batch.proposals = runner._get_spec_decode_draft_probs(metadata)
        return batch

    def _watch_scheduler(self, update: Callable[..., Any]) -> Callable[..., Any]:
        def updated(scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
            for name in scheduler_output.num_scheduled_tokens:
                if name not in self._requests and name in scheduler.requests:
                    self._requests[name] = self._begin(scheduler, scheduler.requests[name])
            answers = update(scheduler, scheduler_output, model_runner_output)
            for outputs in answers.values():
                for output in outputs.outputs:
                    self._take(output, scheduler_output.scheduled_spec_decode_tokens)
            for name in set(scheduler_output.finished_req_ids) & set(self._requests):
                self._forget(name, "cancelled")
            return answers

        return updated

    def _begin(self, scheduler: Any, request: Any) -> RecordedRequest | None:
        """The record of a request that is new; None for one that is not recorded."""
        name = request.request_id
        if not self.recorder.settings.takes(name):
            return None
        reason = _why_left_out(request)
        if reason is not None:
            self.recorder.leave_out(reason)
            return None
        params, config = request.sampling_params, scheduler.vllm_config.model_config
        is_greedy = params.temperature < GREEDY_BELOW
        sampling: dict[str, Any] = {
            "temperature": 0.0 if is_greedy else params.temperature,
            "repetition_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "min_tokens": params.min_tokens,
        }
        if not is_greedy:
            # -1 is an older word for all tokens.
            sampling |= {"top_k": max(0, params.top_k), "top_p": params.top_p, "min_p": params.min_p}
            if params.seed is not None:
                sampling["seed"] = params.seed % 2**63
        eos = params.eos_token_id
        stops = {
            "max_new_tokens": request.max_tokens,
            "eos": [] if eos is None else [eos],
            "stop_tokens": sorted(set(params.stop_token_ids or ()) - {eos}),
            "max_length": scheduler.max_model_len,
        }
        prompt = list(request.prompt_token_ids)
        run = {
            "prompt": prompt,
            "vocabulary": config.get_vocab_size(),
            "sampling": sampling,
            "stops": stops,
            "dtype": str(config.dtype).removeprefix("torch."),
            "engine": f"vllm {self._version}".strip(),
        }
        return RecordedRequest(run, list(prompt))

    def _take(self, output: Any, scheduled: dict[str, list[int]]) -> None:
        """Add what a step emitted of a request, and write the run where it ends."""
        name = output.request_id
        request = self._requests.get(name)
        tokens = list(output.new_token_ids)
        if request is not None and tokens:
            row = self._row_of(name, tokens)
            vocabulary = request.run["vocabulary"]
            is_greedy = request.run["sampling"]["temperature"] == 0.0
            drafted = row.drafted if row is not None else scheduled.get(name)
            is_known = drafted is not None and -1 not in drafted
            stages = {"emitted.logprobs": _logprobs_of(output)}
            stages |= row.stages(is_greedy, vocabulary) if row is not None else {}
            request.add(tokens, drafted if is_known else None, row.chosen if row is not None else None, stages)
        if output.finish_reason is not None:
            word = _finish_of(output)
            if request is not None and word is not None:
                self.recorder.write(request, word)
                self._forget(name)
            else:
                self._forget(name, f"ended by {output.finish_reason}")

    def _row_of(self, name: str, tokens: list[int]) -> Row | None:
        """The row that made these tokens; rows whose tokens the scheduler threw away are passed over."""
        rows = self._rows.get(name, deque())
        while rows:
            row = rows.popleft()
            if row.chosen[: len(tokens)] == tokens:
                return row
        return None

    def _forget(self, name: str, reason: str = "") -> None:
        """Drop a request; with a reason, it is left out if it was recorded."""
        if self._requests.pop(name, None) is not None and reason:
            self.recorder.leave_out(reason)
        self._rows.pop(name, None)


def _why_left_out(request: Any) -> str | None:
    """Why the format has no words for a request, or None."""
    params = request.sampling_params
    if params is None:
        return "pooling"
    if request.prompt_token_ids is None or request.prompt_embeds is not None or request.mm_features:
        return "a prompt of more than tokens"
    if request.lora_request is not None:
        return "a LoRA adapter"
    if request.structured_output_request is not None:
        return "structured output"
    return next((words for name, words in NOT_TOLD.items() if getattr(params, name, None)), None)


def _logprobs_of(output: Any) -> list[float] | None:
    """The log-probabilities of the new tokens that the engine reports, or None."""
    reported = output.new_logprobs
    if reported is None:
        return None
    # The first column is the chosen token's; further ones are the most probable tokens'.
    return [float(row[0]) for row in reported.logprobs]


def _finish_of(output: Any) -> str | None:
    """The end of a request in the words of the format; None for an end that they do not have."""
    word = str(output.finish_reason)
    if word == "stop":
        return "eos" if output.stop_reason is None else "stop"
    return word if word == "length" else None
