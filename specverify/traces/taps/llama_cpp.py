"""The tap of llama-cpp-python: `Llama.generate` and the draft that a `Llama` was given.

A step is a forward: the tokens that were drafted for it, and those that were yielded from it. It was written against
the published interface, is tested with a stand-in of the same signatures, and recorded 120 requests of version 0.3.36.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any

from specverify.traces.taps.patching import Wrapped
from specverify.traces.taps.recorder import RecordedRequest, Recorder

FITTING = "0.3"
"""The version whose names the tap knows."""

NOT_TOLD = {
    "typical_p": 1.0,
    "repeat_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "tfs_z": 1.0,
    "mirostat_mode": 0,
    "logits_processor": None,
    "grammar": None,
}
"""Settings that the format has no words for, each with the value that does nothing; penalties see the last 64."""

DEFAULTS = {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "temp": 0.80}
"""The sampling of a call that names none, in the order of `generate`."""


class LlamaCppTap:
    """Wraps `Llama.generate` in this process.

    Raises:
        MissingInput: The package is not installed, or lacks a name that is wrapped.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._wrapped = Wrapped("llama_cpp", FITTING)
        self._version = str(getattr(self._wrapped.owner("llama_cpp"), "__version__", ""))
        self._numbers = 0
        self._wrapped.wrap(self._wrapped.owner("llama_cpp", "Llama"), "generate", self._watch)

    def close(self) -> None:
        """Unwrap."""
        self._wrapped.restore()

    def _watch(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        def generated(llama: Any, tokens: Sequence[int], *arguments: Any, **settings: Any) -> Any:
            self._numbers += 1
            chosen = {**DEFAULTS, **dict(zip(DEFAULTS, arguments, strict=False)), **settings}
            if not self.recorder.settings.takes(str(self._numbers)):
                return generate(llama, tokens, *arguments, **settings)
            reason = _why_left_out(chosen, len(arguments))
            if reason is not None:
                self.recorder.leave_out(reason)
                return generate(llama, tokens, *arguments, **settings)
            request = self._begin(llama, list(tokens), chosen)
            return self._record(llama, request, lambda: generate(llama, tokens, *arguments, **settings))

        return generated

    def _record(
        self, llama: Any, request: RecordedRequest, start: Callable[[], Generator[int, Any, None]]
    ) -> Generator[int, Any, None]:
        """The tokens of a generation, which is written when it ends or is closed."""
        drafted: list[int] = []
        emitted: list[int] = []

        def end_step() -> None:
            if emitted:
                matched = len(emitted) - 1
                # A reader that stops at a drafted token does not see what was chosen behind it.
                is_cut = matched < len(drafted) and emitted[-1] == drafted[matched]
                request.add(emitted, drafted, None if is_cut else emitted, {})
            emitted.clear()
            drafted.clear()

        draft = llama.draft_model

        def proposed(input_ids: Any, **settings: Any) -> Any:
            answer = draft(input_ids, **settings)
            end_step()
            drafted.extend(answer.astype(int)[: llama.n_ctx() - len(input_ids)].tolist())
            return answer

        if draft is not None:
            llama.draft_model = proposed
        tokens = start()
        is_sent = False
        try:
            answer = None
            while True:
                try:
                    token = tokens.send(answer)
                except StopIteration:
                    break
                emitted.append(int(token))
                if draft is None:
                    end_step()
                answer = yield token
                if answer is not None:
                    is_sent = True
        finally:
            tokens.close()
            llama.draft_model = draft
            end_step()
            if is_sent:
                self.recorder.leave_out("tokens that the reader sent")
            else:
                self._end(llama, request)

    def _begin(self, llama: Any, prompt: list[int], chosen: dict[str, Any]) -> RecordedRequest:
        sampling: dict[str, Any] = {"temperature": chosen["temp"]}
        if chosen["temp"]:
            sampling |= {"top_k": max(0, chosen["top_k"]), "top_p": chosen["top_p"], "min_p": chosen["min_p"]}
        run = {
            "prompt": prompt,
            "vocabulary": llama.n_vocab(),
            "sampling": sampling,
            "dtype": "float32",
            "engine": f"llama-cpp-python {self._version}".strip(),
        }
        return RecordedRequest(run, list(prompt))

    def _end(self, llama: Any, request: RecordedRequest) -> None:
        """Write a run that has tokens; its reader ended it at the end of the text, or at a length of its own."""
        if not request.steps:
            return
        output = request.tokens[len(request.run["prompt"]) :]
        eos = llama.token_eos()
        stops_at_eos = eos >= 0 and eos not in output[:-1]
        request.run["stops"] = {"max_new_tokens": len(output), "eos": [eos] if stops_at_eos else []}
        self.recorder.write(request, "eos" if output[-1] == eos else "length")


def _why_left_out(chosen: dict[str, Any], positional: int) -> str | None:
    """Why the format has no words for a generation, or None."""
    if positional > len(DEFAULTS):
        return "settings without their names"
    unknown = next((name for name, idle in NOT_TOLD.items() if chosen.get(name, idle) != idle), None)
    if unknown is not None:
        return unknown
    if chosen["temp"] < 0:
        return "a temperature below 0"
    # llama.cpp truncates before it divides by the temperature; the format's order is the other.
    if chosen["temp"] not in (0.0, 1.0) and (chosen["top_p"] < 1.0 or chosen["min_p"] > 0.0):
        return "top_p or min_p before a temperature"
    return None
