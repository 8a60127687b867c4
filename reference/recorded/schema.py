"""The JSON Schema of a recorded trace: one object on each line of the file.

A run is a line `run`, then a line `step` for each speculative step, then a line `end`. A file holds one run after
another. The stages of a step are the dataclasses of `specverify.reference.trace`, and the schema is made from them.
"""

from copy import deepcopy
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from specverify.reference.files.json_types import object_schema
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Step, Trace

ENDING = ("output", "finish", "accounting", "fallbacks", "attention_calls", "prompt_logprobs")
"""The fields of `specverify.reference.trace.Trace` that a line `end` may hold."""


@dataclass(frozen=True)
class Request:
    """The request of a run, and facts on the engine.

    Attributes:
        prompt: Token ids; the last one is the root of the first tree.
        stops: Where the output ends; `max_new_tokens` is needed.
        vocabulary: Number of token ids that the target scores; not needed where `--model` names its checkpoint.
        sampling: How tokens are chosen; greedy where it is left out.
        dtype: The engine's working dtype: float64, float32, bfloat16 or float16.
        windows: The sliding window of each layer in tokens, the row's own included, 0 for none; empty for no windows.
        chunks: The attention chunk of each layer in tokens, 0 for none; empty for no chunks.
        padded_nodes: Rows to which smaller trees are padded; left out, the rows that padded trees have, if all have as
            many.
        engine: Name and version of the engine; not judged.
    """

    prompt: tuple[int, ...]
    stops: Stops
    vocabulary: int | None = None
    sampling: Sampling = Sampling()
    dtype: str = "float32"
    windows: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    padded_nodes: int | None = None
    engine: str = ""


KINDS = ("run", "step", "end")
"""The kinds of lines, in the order of a run."""

CASE = {
    "description": "A run of a whole case of this project, as a saved bundle holds it, in place of the request.",
    "type": "object",
    "properties": {
        "case": {"type": "object", "description": "As reference/case.schema.json describes it; without a session."},
        "takes_tape": {"type": "boolean", "description": "Whether every uniform came from the tape of the case."},
        "engine": {"type": "string"},
    },
    "required": ["case"],
    "additionalProperties": False,
}
"""The schema of a line `run` that holds a case."""


@cache
def _line_schemas() -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of each kind of line, and the definitions that they share."""
    definitions: dict[str, Any] = {}
    step = object_schema(Step, fields(Step), definitions)
    step["required"] = []
    step["description"] += "\n\nA file may leave out `context`: the prompt and all tokens emitted before, but the last."
    ending = object_schema(Trace, tuple(field_ for field_ in fields(Trace) if field_.name in ENDING), definitions)
    ending["required"] = []
    ending["description"] = (
        "The end of a run. `output`: every emitted token; left out, the tokens of the steps. `finish`: eos, stop, "
        "grammar, length or null; left out, it is not judged. A run without this line was cut off after its last step."
    )
    request = object_schema(Request, fields(Request), definitions)
    definitions["Stops"]["required"] = ["max_new_tokens"]
    return {"run": request, "step": step, "end": ending}, definitions


def line_schema(kind: str, of_case: bool = False) -> dict[str, Any]:
    """The schema of the object on a line of `kind`, with arrays of any content: their entries are read one by one.

    Args:
        kind: One of KINDS.
        of_case: Whether the line is a `run` that holds a case.
    """
    lines, definitions = _line_schemas()
    return {**(CASE if of_case else lines[kind]), "$defs": {**definitions, "Array": {"type": "array"}}}


def schema() -> dict[str, Any]:
    """The schema of one line of a file, as `specverify trace schema` prints it; a copy that may be changed."""
    lines, definitions = _line_schemas()

    def single_key_schema(kind: str, schema_of_kind: dict[str, Any]) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {kind: schema_of_kind},
            "required": [kind],
            "additionalProperties": False,
        }

    schema_of_line = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "One line of a recorded trace",
        "description": (
            "JSON lines: `run`, a `step` for each speculative step, `end`; then the next run. Any stage of a step, and "
            "any field with a default, may be left out: what a trace does not hold is not judged."
        ),
        "anyOf": [
            single_key_schema("run", {"anyOf": [lines["run"], CASE]}),
            single_key_schema("step", lines["step"]),
            single_key_schema("end", lines["end"]),
        ],
        "$defs": definitions,
    }
    return deepcopy(schema_of_line)
