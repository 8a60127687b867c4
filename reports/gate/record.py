"""A gate as one JSON object, by the schema in `result.schema.json`."""

import json
from functools import cache
from importlib.resources import files
from typing import Any

from specverify.properties.gate_result import GateResult
from specverify.properties.known import signature
from specverify.reports.gate import words
from specverify.reports.record import summary
from specverify.reports.writing import jsonable

VERSION = 1
"""The version of the schema: a field may be added without a new one, none is taken away or changed."""


LONGEST = 10_000
"""The most characters of one text in the object."""


@cache
def schema() -> dict[str, Any]:
    """The JSON Schema of a gate's result."""
    content: dict[str, Any] = json.loads((files("specverify.reports.gate") / "result.schema.json").read_text("utf-8"))
    return content


def gate_fact(result: GateResult) -> dict[str, Any]:
    """The result as a JSON object."""
    content: dict[str, Any] = jsonable(
        {
            "schema": VERSION,
            "kind": "gate",
            "outcome": result.outcome,
            "exit_code": result.exit_code,
            "sentence": words.verdict(result),
            "seeds": list(result.seeds),
            "fresh_seed": result.fresh,
            "shard": list(result.shard),
            "seconds": result.seconds,
            "reasons": words.reasons(result),
            "notes": result.notes,
            "known": [
                {
                    "name": known_failure.known.name,
                    "backend": known_failure.backend,
                    "signature": str(known_failure.known.main),
                    "also": [str(further) for further in known_failure.known.also],
                    "state": known_failure.state,
                    "why": known_failure.why,
                    "cases": known_failure.cases,
                    "reason": known_failure.reason,
                    "issue": known_failure.issue,
                    "until": known_failure.until,
                }
                for known_failure in result.known
            ],
            "runs": [
                {
                    "model": run.model,
                    "exit_code": run.exit_code,
                    "drawn": run.drawn,
                    "signatures": [str(signature(failure.finding)) for failure in run.tally.failures],
                    "below_floors": run.short,
                    "passed_over": run.tally.passed,
                    "known": dict(run.tally.known),
                    "behind": dict(run.tally.behind),
                    **summary(run.tally),
                    "name": run.backend,
                    "outcome": run.outcome,
                }
                for run in result.runs
            ],
        }
    )
    bounded: dict[str, Any] = _bounded(content)
    return bounded


def _bounded(value: Any) -> Any:
    """A JSON value with every text cut to LONGEST characters."""
    if isinstance(value, str):
        return value if len(value) <= LONGEST else f"{value[:LONGEST]}…"
    if isinstance(value, list):
        return [_bounded(item) for item in value]
    if isinstance(value, dict):
        return {_bounded(key): _bounded(item) for key, item in value.items()}
    return value
