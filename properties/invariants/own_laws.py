"""The law after each node by definition, of the backend's own logits, and how near a row is to another law."""

import numpy as np

from properties.tolerance.closeness import UNIT
from reference.case import Case
from reference.oracle import processing
from reference.trace import Array, Step

CLOSE = {"float64": 1e-9, "float32": 2e-5, "bfloat16": 2e-5, "float16": 2e-5}
"""How far a probability may lie from the definition's on the same logits; engines process in float32 at least."""

LANES = 8
"""Partial sums that a softmax keeps at least: one over V numbers rounds V / LANES times."""

EDGE = {"float64": 1e-11, "float32": 1e-4, "bfloat16": 1e-4, "float16": 1e-4}
"""Rows nearer than this, relatively, to keeping another set of tokens are not compared."""


def close(case: Case) -> float:
    """How far a probability of `case` may lie off: CLOSE, and what the sum over a large vocabulary rounds.

    torch's float32 softmax over 49,152 tokens was seen 3e-5 off, relatively.
    """
    engine = UNIT["float64" if case.dtype == "float64" else "float32"]
    return CLOSE[case.dtype] + engine * case.model.vocab_size / LANES


def output_before(case: Case, step: Step) -> tuple[int, ...]:
    """The tokens emitted before `step`, its pending root included."""
    assert step.drafted is not None
    return (*step.context, step.drafted.tree.token[0])[len(case.prompt) :]


def laws(case: Case, step: Step) -> Array:
    """The law after each node [nodes, vocabulary], by definition, of the backend's own logits."""
    assert step.drafted is not None
    assert step.scored is not None
    tree, output = step.drafted.tree, output_before(case, step)
    rows = [
        processing.law(row, case.sampling, case.stops, case.prompt, output + tree.tokens_to(node)[1:])
        for node, row in enumerate(step.scored.logits)
    ]
    return np.stack(rows)


def near_edge(case: Case, logits: Array, path: tuple[int, ...], output: tuple[int, ...]) -> bool:
    """Whether an engine's rounding may keep another set of tokens in this row."""
    margin = processing.margin(logits, case.sampling, case.stops, case.prompt, output + path)
    return margin < EDGE[case.dtype]
