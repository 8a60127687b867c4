"""Reading and writing of recorded traces, line by line.

A complaint names the line, and the field on it. Values of stages are read as they stand: their types and shapes are
those that `specverify.backends.admission` asks of a backend's answer.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jsonschema

from specverify.reference.architecture import Checkpoint, Seeded
from specverify.reference.case import Case
from specverify.reference.case_json import Validator, case_from_json, case_to_json, dotted_path, shorten
from specverify.reference.files.json_types import build, encode
from specverify.reference.layout import KvLayout
from specverify.reference.malformed import Malformed, under
from specverify.reference.oracle.stopping import finish_reason
from specverify.reference.recorded.schema import ENDING, KINDS, Request, line_schema
from specverify.reference.trace import Emitted, Step, Trace

UNNAMED = "unnamed"
"""The digest of the model of a run whose checkpoint nobody names."""

LONGEST = 2**31
"""The positions that a model may have of which nothing is known."""


class UnreadableLine(ValueError):
    """A line of a recorded trace is no such line.

    Attributes:
        line: Its number, from 1.
        why: The field, and what is wrong with it.
    """

    def __init__(self, line: int, why: str) -> None:
        super().__init__(f"line {line}: {why}")
        self.line = line
        self.why = why


@dataclass
class FileRun:
    """One run of a file.

    Attributes:
        line: The number of the line `run`.
        request: The request; None where the run is that of a `whole` case.
        whole: The case as the file holds it, or None.
        takes_tape: Whether the coins of the run are those of the case's tape.
        engine: Name and version of the engine, as the file says.
        steps: The steps, with lists in place of arrays.
        lines: The number of each step's line.
        end: The content of the line `end`, or None for a run that was cut off.
        end_line: Its number; 0 where there is none.
    """

    line: int
    request: Request | None
    whole_case: Case | None
    takes_tape: bool = False
    engine: str = ""
    steps: list[dict[str, Any]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    end: dict[str, Any] | None = None
    end_line: int = 0

    def case(self, model: Checkpoint | None) -> Case:
        """The case of the run, on the checkpoint `model` if one is named.

        A request of which no model is known gets a stand-in with its vocabulary, which no oracle can run.

        Raises:
            UnreadableLine: The request is no case, or not one of `model`.
        """
        try:
            with under("run"):
                return self._case_of_file(model) if self.request is None else self._case_of_request(self.request, model)
        except Malformed as why:
            raise UnreadableLine(self.line, str(why)) from None

    def _case_of_file(self, model: Checkpoint | None) -> Case:
        assert self.whole_case is not None
        if model is None:
            return self.whole_case
        if isinstance(self.whole_case.model, Seeded) or self.whole_case.model.digest != model.digest:
            raise Malformed("case.model", "it is not the checkpoint that --model names: leave --model out")
        return replace(self.whole_case, model=model)

    def _case_of_request(self, request: Request, model: Checkpoint | None) -> Case:
        if model is None and request.vocabulary is None:
            raise Malformed("vocabulary", "missing: the number of token ids; or name the checkpoint with --model")
        if model is not None and request.vocabulary not in (None, model.vocab_size):
            raise Malformed("vocabulary", f"{request.vocabulary}; the checkpoint of --model has {model.vocab_size}")
        size = request.vocabulary or 0
        return Case(
            model=model or Checkpoint("", UNNAMED, size, LONGEST),
            prompt=request.prompt,
            sampling=request.sampling,
            stops=request.stops,
            dtype=request.dtype,
            layout=KvLayout(padded_nodes=self._padded_rows(request) or 0),
            # A limit of steps: the run is one of speculation, and none that could be its own control.
            steps=max(1, len(self.steps)),
        )

    def _padded_rows(self, request: Request) -> int | None:
        """Rows to which trees are padded; None where padded trees have different numbers of rows."""
        if request.padded_nodes is not None:
            return request.padded_nodes
        tree_steps = [step for step in self.steps if step.get("drafted") and step.get("lowered")]
        sizes = [(len(step["lowered"]["parent"]), len(step["drafted"]["tree"]["parent"])) for step in tree_steps]
        padded = {rows for rows, nodes in sizes if rows > nodes}
        return None if len(padded) > 1 else max(padded, default=0)

    @property
    def is_padding_known(self) -> bool:
        """Whether one number of rows explains the padding of every step."""
        return self.request is None or self._padded_rows(self.request) is not None

    def trace(self, case: Case) -> Trace:
        """The trace of the run, with the fields that may be left out.

        Raises:
            UnreadableLine: A field that follows from others is left out, and those are left out too.
        """
        end = dict(self.end or {})
        steps = [self._step(number, case) for number in range(len(self.steps))]
        emissions = [step.emitted for step in steps if step.emitted is not None]
        if "output" not in end:
            if emissions and len(emissions) < len(steps):
                line = self.end_line or self.line
                raise UnreadableLine(line, "end.output: missing, and some steps do not say what they emitted")
            end["output"] = tuple(token for emitted in emissions for token in emitted.tokens)
        output = tuple(end["output"])
        unknown_token = next((token for token in output if not 0 <= token < case.model.vocab_size), None)
        if unknown_token is not None:
            reason = f"end.output: {unknown_token} is not in the vocabulary of {case.model.vocab_size}"
            raise UnreadableLine(self.end_line or self.lines[-1], reason)
        if "finish" not in end:
            least, grammar = case.sampling.min_tokens, case.sampling.grammar
            end["finish"] = finish_reason(output, case.stops, len(case.prompt), least, grammar)
        if not steps and output:
            # Tokens alone: one step that emits them all.
            self.lines = [self.end_line]
            steps = [Step(case.prefix, emitted=Emitted(output, end["finish"]))]
        elif steps and steps[-1].emitted is not None and "finish" not in self.steps[-1]["emitted"]:
            last = replace(steps[-1].emitted, finish=end["finish"])
            steps[-1] = replace(steps[-1], emitted=last)
        try:
            with under("end"):
                trace: Trace = build(Trace, {**end, "output": output, "steps": []})
        except Malformed as complaint:
            raise UnreadableLine(self.end_line, str(complaint)) from None
        return replace(trace, steps=tuple(steps))

    def _step(self, number: int, case: Case) -> Step:
        """The step as a file shows it; a context that is left out follows from the steps before."""
        content = dict(self.steps[number])
        if "context" not in content:
            earlier_emissions = [step.get("emitted") for step in self.steps[:number]]
            if None in earlier_emissions:
                reason = f"step.context: missing, and step {earlier_emissions.index(None)} does not say what it emitted"
                raise UnreadableLine(self.lines[number], reason)
            tokens = (
                *case.prompt,
                *(token for emitted in earlier_emissions if emitted is not None for token in emitted["tokens"]),
            )
            content["context"] = list(tokens[:-1])
        try:
            with under("step"):
                step: Step = build(Step, content)
        except Malformed as complaint:
            raise UnreadableLine(self.lines[number], str(complaint)) from None
        return step


def read_runs(lines: Iterable[bytes | str]) -> list[FileRun]:
    """The runs of a file, in order; blank lines are passed over.

    Raises:
        UnreadableLine: A line is no JSON, no line of the schema, or at the wrong place.
    """
    runs: list[FileRun] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        kind, content = _parse_line(number, line)
        if kind == "run":
            runs.append(_read_run(number, content))
            continue
        if not runs or runs[-1].end is not None:
            raise UnreadableLine(number, f"{kind}: a line `run` comes before it")
        _validate(number, kind, content)
        if kind == "step":
            runs[-1].steps.append(content)
            runs[-1].lines.append(number)
        else:
            runs[-1].end, runs[-1].end_line = content, number
    return runs


def _parse_line(number: int, line: bytes | str) -> tuple[str, dict[str, Any]]:
    """Kind and content of a line."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as why:
        raise UnreadableLine(number, f"no JSON: {' '.join(str(why).split())[:120]}") from None
    if not isinstance(content, dict) or len(content) != 1 or next(iter(content)) not in KINDS:
        raise UnreadableLine(number, f"an object with one key is expected here: {', '.join(KINDS)}")
    (kind, line_content), *_ = content.items()
    return kind, line_content


def _validate(number: int, kind: str, content: Any, of_case: bool = False) -> None:
    validator = Validator(line_schema(kind, of_case))
    complaint = jsonschema.exceptions.best_match(validator.iter_errors(content))
    if complaint is not None:
        place = dotted_path([kind, *complaint.absolute_path])
        raise UnreadableLine(number, f"{place}: {shorten(complaint.message)}")


def _read_run(number: int, content: Any) -> FileRun:
    """The beginning of a run."""
    of_case = isinstance(content, dict) and "case" in content
    _validate(number, "run", content, of_case)
    try:
        with under("run"):
            if not of_case:
                request: Request = build(Request, content)
                if request.sampling.processors:
                    raise Malformed("sampling.processors", "a name in a file imports nothing: leave it out")
                return FileRun(number, request, None, engine=request.engine)
            with under("case"):
                case = case_from_json(content["case"])
            if case.session is not None or case.sampling.processors:
                raise Malformed("case", "a session, or a processor of somebody's own: neither is read from a file")
    except Malformed as why:
        raise UnreadableLine(number, str(why)) from None
    return FileRun(number, None, case, bool(content.get("takes_tape", False)), content.get("engine", ""))


def trace_lines(case: Case, trace: Trace, takes_tape: bool = False, engine: str = "") -> Iterator[str]:
    """The lines that record a run of `case`, each with its newline; large arrays make long lines.

    Args:
        case: The case, without a session.
        trace: The run's trace.
        takes_tape: Whether the coins of the run are those of the case's tape.
        engine: Name and version of the engine.
    """
    yield _line_text("run", {"case": case_to_json(case), "takes_tape": takes_tape, "engine": engine})
    for step in trace.steps:
        content = encode(step)
        if step.emitted is not None:
            content["emitted"]["finish"] = step.emitted.finish
        yield _line_text("step", content)
    yield _line_text("end", {"finish": trace.finish, **encode({name: getattr(trace, name) for name in ENDING})})


def _line_text(kind: str, content: dict[str, Any]) -> str:
    return json.dumps({kind: content}, allow_nan=False) + "\n"
