"""The tap of transformers: assisted generation, by its candidates and the forwards of the target.

Generations without candidates are not recorded, and those whose settings the format has no words for are named.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from specverify.traces.taps.patching import Wrapped
from specverify.traces.taps.recorder import RecordedRequest, Recorder, one_hot_rows, rows_of

FITTING = "5"
"""The version whose inner names the tap knows."""

SETTINGS = {
    "TemperatureLogitsWarper": ("temperature", "temperature"),
    "TopKLogitsWarper": ("top_k", "top_k"),
    "TopPLogitsWarper": ("top_p", "top_p"),
    "MinPLogitsWarper": ("min_p", "min_p"),
    "RepetitionPenaltyLogitsProcessor": ("penalty", "repetition_penalty"),
}
"""Processors of logits that the format has a word for: their attribute, and the word."""

CRITERIA = ("MaxLengthCriteria", "EosTokenCriteria")
"""Criteria of the end that the format has words for."""


@dataclass
class Generation:
    """A generation that runs.

    Attributes:
        request: What is recorded of it.
        is_greedy: Whether it takes the best token.
        logits: The target's logits of its latest forward [rows, vocabulary]; None without stages.
        drafted: The candidates of the running step.
        scores: The scores from which they were drawn [candidates, vocabulary], or None.
    """

    request: RecordedRequest
    is_greedy: bool
    logits: Any = None
    drafted: list[int] = field(default_factory=list)
    scores: Any = None


class TransformersTap:
    """Wraps the assisted generation of transformers in this process.

    Raises:
        MissingInput: The installed version lacks a name that is wrapped.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._wrapped = Wrapped("transformers", FITTING)
        self._version = str(self._wrapped.owner("transformers").__version__)
        self._numbers = count()
        self._running: list[Generation | None] = []
        mixin = self._wrapped.owner("transformers.generation.utils", "GenerationMixin")
        self._wrapped.wrap(mixin, "_assisted_decoding", self._watch_generation)
        self._wrapped.wrap(mixin, "_get_candidate_generator", self._watch_candidates)

    def close(self) -> None:
        """Unwrap."""
        self._wrapped.restore()

    def _watch_generation(self, decode: Callable[..., Any]) -> Callable[..., Any]:
        def decoded(model: Any, input_ids: Any, **settings: Any) -> Any:
            generation = self._begin(model, input_ids, settings)
            self._running.append(generation)
            hook = model.register_forward_hook(self._note_logits) if self.recorder.settings.stages else None
            try:
                answer = decode(model, input_ids, **settings)
            finally:
                self._running.pop()
                if hook is not None:
                    hook.remove()
            if generation is not None and generation.request.steps:
                stops = generation.request.run["stops"]
                finish = "eos" if generation.request.tokens[-1] in stops["eos"] else "length"
                self.recorder.write(generation.request, finish)
            return answer

        return decoded

    def _note_logits(self, model: Any, inputs: Any, output: Any) -> None:
        generation = self._running[-1] if self._running else None
        logits = getattr(output, "logits", None)
        if generation is not None and logits is not None:
            # Processors of logits write into the same memory where the model computes in float32.
            generation.logits = logits[0, -len(generation.drafted) - 1 :].detach().clone()

    def _watch_candidates(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(model: Any, *arguments: Any, **settings: Any) -> Any:
            generator = make(model, *arguments, **settings)
            generation = self._running[-1] if self._running else None
            if generation is not None:
                self._watch(generator, generation)
            return generator

        return made

    def _watch(self, generator: Any, generation: Generation) -> None:
        """Wrap the two methods of a candidate generator; it is made anew for each generation."""
        propose, update = generator.get_candidates, generator.update_candidate_strategy

        def proposed(input_ids: Any, *arguments: Any, **settings: Any) -> Any:
            candidates, scores = propose(input_ids, *arguments, **settings)
            generation.drafted = candidates[0, input_ids.shape[1] :].tolist()
            # The scores of further steps may be written into the same memory.
            generation.scores = None if scores is None else scores[0].detach().clone()
            return candidates, scores

        def updated(input_ids: Any, scores: Any, num_matches: Any) -> Any:
            self._add_step(generation, input_ids[0].tolist())
            return update(input_ids, scores, num_matches)

        generator.get_candidates = proposed
        generator.update_candidate_strategy = updated

    def _add_step(self, generation: Generation, text: list[int]) -> None:
        """Add the step after which `text` is prompt and output."""
        request, drafted = generation.request, generation.drafted
        tokens = text[len(request.tokens) :]
        matched = len(tokens) - 1
        # The end of a text may cut its last block behind a drafted token: what was chosen behind it is then not seen.
        is_cut = matched < len(drafted) and tokens[-1] == drafted[matched]
        stages: dict[str, Any] = {}
        vocabulary = request.run["vocabulary"]
        if generation.logits is not None:
            stages["scored.logits"] = rows_of(generation.logits)
        if self.recorder.settings.stages and not generation.is_greedy:
            laws = one_hot_rows(drafted, vocabulary)
            if generation.scores is not None and drafted:
                q = generation.scores[-len(drafted) :].float().softmax(-1)
                laws[1:] = rows_of(q)
            stages["drafted.proposal"] = laws if all(len(law) == vocabulary for law in laws) else None
        request.add(tokens, drafted, None if is_cut else tokens, stages)

    def _begin(self, model: Any, input_ids: Any, settings: dict[str, Any]) -> Generation | None:
        """A new generation; None for one that is not recorded."""
        if not self.recorder.settings.takes(str(next(self._numbers))):
            return None
        config = settings["generation_config"]
        reason = _why_left_out(model, config, settings)
        if reason is not None:
            self.recorder.leave_out(reason)
            return None
        sampling: dict[str, Any] = {"temperature": 1.0 if config.do_sample else 0.0}
        for processor in settings["logits_processor"]:
            attribute, word = SETTINGS[type(processor).__name__]
            sampling[word] = getattr(processor, attribute)
        prompt = input_ids[0].tolist()
        eos = config._eos_token_tensor
        run = {
            "prompt": prompt,
            "vocabulary": model.config.get_text_config().vocab_size,
            "sampling": sampling,
            "stops": {
                "max_new_tokens": config.max_length - len(prompt),
                "eos": [] if eos is None else sorted(set(eos.flatten().tolist())),
            },
            "dtype": str(model.dtype).removeprefix("torch."),
            "engine": f"transformers {self._version}",
        }
        return Generation(RecordedRequest(run, list(prompt)), not config.do_sample)


def _why_left_out(model: Any, config: Any, settings: dict[str, Any]) -> str | None:
    """Why the format has no words for a generation, or None."""
    if model.config.is_encoder_decoder:
        return "an encoder and a decoder"
    if getattr(config, "assistant_ensemble_weight", None) is not None:
        return "assistant_ensemble_weight"
    mask = settings.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        return "a padded prompt"
    kinds = [type(processor).__name__ for processor in settings["logits_processor"]]
    unknown = [kind for kind in kinds if kind not in SETTINGS]
    unknown += [
        type(criterion).__name__
        for criterion in settings["stopping_criteria"]
        if type(criterion).__name__ not in CRITERIA
    ]
    return unknown[0] if unknown else None
