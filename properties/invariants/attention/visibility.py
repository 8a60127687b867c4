"""Invariants of visibility: which columns each node reads, without tolerance.

`visibility_exact` uses transparent weights: the model's outputs are codes that name the columns each row attended to.
`no_leakage` works with any weights: it changes tokens that a node may not see, and the node's bits must stay.
"""

from collections.abc import Iterator

import numpy as np

from specverify.properties.invariants.rows import attended_of, logits_of, read_by
from specverify.properties.tolerance.closeness import Noise, noise, rows_beyond
from specverify.properties.verdict.finding import Comparisons, Finding, Reads
from specverify.properties.verdict.invariant import TURNS, Fact, Invariant, NotApplicable, Oracle, Unobserved, needing
from specverify.properties.verdict.subject import Subject
from specverify.properties.verdict.variants import (
    change_outside,
    dice,
    first_step,
    focus,
    leak_designs,
    probes,
    run_first_step,
    tree_of,
)
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.trace import Array, Stage, Step

NEEDS = needing(Stage.DRAFTED, Stage.SCORED)

MOST_CHANGES = 16
"""Most runs with changed tokens that a case on a drawn model takes; a tree that needs more has so many by lot.

A tree of 100 nodes in a line needs 99 such runs, which took 4 % of a default search. There `visibility_exact` reads
every pair of nodes in a single run. A checkpoint, whose weights nobody sets, has all runs.
"""

WITHIN_NOISE = "within the noise of two runs, since experts compute rows together"
"""The bound that no-leakage reports for a model whose rows are computed together; elsewhere bits must be the same."""


REST_OF_MEAN = 1e-4
"""The largest logit of a hidden code where the last norm subtracts the mean of a row.

The mean of a probe's row is zero, and of its sum rounding leaves some 1e-6 of the norm's outputs. A seen code has a
logit of .005 at least: a share of 1/64, in a row scaled to unit variance, times the least published factor of logits
(1/16).
"""


def visibility_exact(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """With transparent weights, each node sees exactly the columns that it may see, in every layer and head.

    The seen columns are read from attention outputs and logits. They are compared without tolerance.
    """
    step_case = focus(case, subject)
    assert isinstance(case.model, Seeded)
    context = len(step_case.prefix)
    arch = case.model.architecture
    for layer in sorted(set(range(arch.layers)) - set(arch.unattended)):  # without attention a layer sees no column
        for blank, columns in probes(step_case, layer):
            engine_step = run_first_step(blank, subject)
            oracle_step = oracle(blank).steps[0]
            for stage, read in ((Stage.ATTENDED, _attended_codes), (Stage.SCORED, _scored_codes)):
                observed, expected = (
                    read(engine_step, blank, layer, len(columns)),
                    read(oracle_step, blank, layer, len(columns)),
                )
                if observed is None or expected is None:
                    continue
                yield Comparisons(observed.size // max(1, observed.shape[-1]))
                differ = np.argwhere(observed != expected).tolist()
                for head, node, code in differ:
                    column = columns[code]
                    place: dict[str, int | str] = (
                        {"position": column} if column < context else {"node": column - context}
                    )
                    yield Finding(
                        "attention.visibility-exact",
                        stage,
                        0,
                        {"layer": layer, "head": head, "row": node, "column": column, **place},
                        "visible" if expected[head, node, code] else "hidden",
                        "visible" if observed[head, node, code] else "hidden",
                    )
                if differ:
                    break  # the logits can only repeat what the attention outputs already say


def _attended_codes(step: Step, blank: Case, layer: int, codes: int) -> Array | None:
    """Bool [heads, nodes, codes]: the probed columns that show in the attention outputs of `layer`; None if hidden."""
    return None if step.attended is None else np.asarray(step.attended.output[layer][:, :, :codes] != 0)


def _scored_codes(step: Step, blank: Case, layer: int, codes: int) -> Array | None:
    """Bool [heads, nodes, codes]: the probed columns that show in the logits; None if hidden.

    A NaN counts as a seen column, since it is unequal to 0 and not small.
    """
    if step.scored is None:
        return None
    assert isinstance(blank.model, Seeded)
    heads, head_dim = blank.model.architecture.heads, blank.model.architecture.head_dim
    logits = step.scored.logits[:, : heads * head_dim].reshape(-1, heads, head_dim)[:, :, :codes]
    is_hidden = np.abs(logits) <= REST_OF_MEAN if blank.model.architecture.words.centred_norms else logits == 0
    return np.asarray(np.moveaxis(~is_hidden, 0, 1))


def no_leakage(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """After tokens that a node may not see are changed, the node's row stays bit-identical.

    This holds in every dtype and for any length of the context.

    The null control comes first: if the same input run twice is not bit-identical, the comparison proves nothing. A
    model with experts computes rows together (`mixes_rows` of a model), so that the bits of a row may follow other
    rows without a leak. There a row must stay within the noise of two runs (rule N), and the finding says so.
    """
    if case.model.vocab_size < 2:
        raise NotApplicable("a vocabulary of one token has no other to put in its place")
    mixing = case.model.mixes_rows
    step_case = focus(case, subject)
    base = run_first_step(step_case, subject)
    control = first_step(subject.run_again(step_case))
    if base.scored is None or control.scored is None:
        raise Unobserved("the backend does not reveal the logits of every run")
    if not _same_bits(base, control, range(len(tree_of(step_case)))):
        raise Unobserved("the backend's rows are not bit-stable under repetition")
    designs = leak_designs(tree_of(step_case))
    if not designs:
        raise NotApplicable("every node sees every other")
    if isinstance(case.model, Seeded) and len(designs) > MOST_CHANGES:
        places = dice(case, "changes").choice(len(designs), MOST_CHANGES, replace=False)
        designs = [designs[place] for place in sorted(places.tolist())]
    for kept_nodes in designs:
        changed = run_first_step(change_outside(step_case, kept_nodes), subject)
        if changed.scored is None:
            raise Unobserved("the backend does not reveal the logits of every run")
        # No noise means that bits are compared.
        error = noise(case, oracle, subject) if mixing else None
        yield Comparisons(len(kept_nodes))
        for stage, layer, node, measure in _moved_rows(base, changed, sorted(kept_nodes), error):
            deeper = [changed_node for changed_node in range(len(tree_of(step_case))) if changed_node not in kept_nodes]
            where: dict[str, int | str] = {"node": node, **({"layer": layer} if layer >= 0 else {})}
            yield Finding(
                "attention.no-leakage",
                stage,
                0,
                where,
                WITHIN_NOISE if mixing else "bit-identical",
                f"follows one of nodes {deeper}, not on its path",
                measure,
                reads=None if error is None else _reads(error, base, stage, layer, node),
            )
            break


def _reads(error: Noise, base: Step, stage: Stage, layer: int, node: int) -> Reads | None:
    """Reads of a row that moved; any head of its attention output stands for all."""
    if stage is Stage.ATTENDED:
        limit = 2 * error.inner_limit("attended", layer)
        return read_by(error, base, node, limit, lambda true: attended_of(true, (layer, 0, node)), layer)
    return read_by(error, base, node, error.logits_limit(pair=True), lambda true: logits_of(true, node))


def _moved_rows(
    base: Step, changed: Step, nodes: list[int], error: Noise | None
) -> Iterator[tuple[Stage, int, int, float | None]]:
    """Kept nodes whose attention outputs or logits changed: (stage, layer or -1 for logits, node, measure).

    Attention outputs come first. Without `error` every changed bit counts, and the measure is None. With `error` a row
    counts if it leaves the noise of two runs; the measure is its distance in units of that noise.
    """
    if error is None:
        yield from ((*place, None) for place in _changed_bits(base, changed, nodes))
        return
    attended, logits = error.expected(base, changed, nodes, nodes)
    if attended is not None and changed.attended is not None:
        for layer, (true, observed) in enumerate(zip(attended, changed.attended.output, strict=True)):
            for (_, index), measure in rows_beyond(observed[:, nodes], true, 2 * error.inner_limit("attended", layer)):
                yield Stage.ATTENDED, layer, nodes[index], measure
    assert changed.scored is not None
    for (index,), measure in rows_beyond(changed.scored.logits[nodes], logits, error.logits_limit(pair=True)):
        yield Stage.SCORED, -1, nodes[index], measure


def _changed_bits(base: Step, changed: Step, nodes: list[int]) -> Iterator[tuple[Stage, int, int]]:
    """Kept nodes whose attention outputs or logits are not bit-identical: (stage, layer or -1 for logits, node)."""
    if base.attended is not None and changed.attended is not None:
        # [layers, heads, nodes, D]: any head and any dimension of a node's output.
        differ = (base.attended.output != changed.attended.output).any(axis=(1, 3))
        for layer, node in np.argwhere(differ).tolist():
            if node in nodes:
                yield Stage.ATTENDED, layer, node
    assert base.scored is not None
    assert changed.scored is not None
    differ = (base.scored.logits != changed.scored.logits).any(axis=1)
    for node in np.flatnonzero(differ).tolist():
        if node in nodes:
            yield Stage.SCORED, -1, node


def _same_bits(base: Step, repeated: Step, nodes: range) -> bool:
    return next(_changed_bits(base, repeated, list(nodes)), None) is None


INVARIANTS = (
    Invariant(
        "attention.visibility-exact",
        "In every layer and head each node sees exactly its context and its own path, read off transparent weights.",
        NEEDS,
        visibility_exact,
        lambda case: isinstance(case.model, Seeded),
        every=TURNS,
    ),
    Invariant(
        "attention.no-leakage",
        "Changing tokens that a node may not see leaves its row bit-identical; within noise where experts mix rows.",
        NEEDS,
        no_leakage,
        every=TURNS,
    ),
)
